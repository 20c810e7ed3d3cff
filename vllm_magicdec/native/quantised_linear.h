// SPDX-License-Identifier: Apache-2.0
// Products of activations with weights of 4 or 8 bits, which `quantised_linear.py` packs.
#pragma once

#include <cstdint>

#include "attention.h"

extern "C" {

// Mirrored in `quantised_linear.py`.
struct MagicdecLinear {
  const void* input;       // [num_rows, in_features] of `type`
  int64_t input_stride;    // elements from one row to the next
  const uint8_t* weights;  // [out_features / 16][in_features / 32] blocks, both rounded up
  void* output;            // [num_rows, out_features] of `type`, contiguous; written
  int64_t num_rows, in_features, out_features;
  int32_t bits;            // 4 or 8
  int32_t type;            // MAGICDEC_FLOAT32, MAGICDEC_BFLOAT16 or MAGICDEC_FLOAT16
};

// Returns 1 if the type or the number of bits is not supported, else 0.
int magicdec_multiply(const MagicdecLinear* call);

}
