// SPDX-License-Identifier: Apache-2.0
// Online softmax: converts products of a tile to weights relative to the maximum logit so far.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace magicdec {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING_SEEN = -1e30f;  // below all logits, and finite so that differences are

// Converts products to logits.
struct Logits {
  float scale;
  float soft_cap;  // 0: none
};

inline void keep(float* to, Floats x) { store(to, x); }
#if defined(__AVX512BF16__)
inline void keep(Bfloat16* to, Floats x) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &rounded, sizeof rounded);
}
#endif

// Updates one row: its maximum logit (base 2), denominator and rescaled sums, and converts `scores` to `weights`. Both
// are padded to a multiple of STEP tokens.
template <int STEP, typename Left>
inline void weigh(const Logits& logits, float* scores, int count, float& most, float& total, float* sums,
                  int head_size, Left* weights) {
  static_assert(STEP % LANES == 0);
  const int end = (count + STEP - 1) / STEP * STEP;
  std::fill(scores + count, scores + end, -INFINITY);
  if (logits.soft_cap > 0)
    for (int t = 0; t < end; t += LANES) {
      const Floats product = load(scores + t);
      const Floats capped = tanh_of(product * (logits.scale / logits.soft_cap)) * logits.soft_cap;
      store(scores + t, product > -INFINITY ? capped : product);  // keeps NaN
    }
  // Base 2, because powers of 2 are cheap.
  const float to_logits = (logits.soft_cap > 0 ? 1 : logits.scale) * LOG2_E;
  Floats largest_yet = load(scores);
  for (int t = LANES; t < end; t += LANES) largest_yet = larger(largest_yet, load(scores + t));
  const float now = std::max(most, largest(largest_yet) * to_logits);
  if (now > most) {
    const float fade = std::exp2(most - now);
    total *= fade;
    for (int d = 0; d < head_size; d += LANES) store(sums + d, load(sums + d) * fade);
    most = now;
  }
  // Unseen tokens weigh 2^-126, negligible beside the maximum weight of 1.
  Floats added = all(0);
  for (int t = 0; t < end; t += LANES) {
    const Floats power = load(scores + t) * to_logits - now;
    const Floats weight = exp2_of_negative(power);
    added += power == power ? weight : power;  // NaN propagates to the row
    keep(weights + t, weight);
  }
  total += sum(added);
}

}  // namespace magicdec
