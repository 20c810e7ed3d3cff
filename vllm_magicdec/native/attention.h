// SPDX-License-Identifier: Apache-2.0
// Arguments of a call; mirrored in `library.py`.
#pragma once

#include <cstdint>

extern "C" {

enum MagicdecType : int32_t {
  MAGICDEC_FLOAT32 = 0,
  MAGICDEC_BFLOAT16 = 1,
  MAGICDEC_FLOAT16 = 2,
  MAGICDEC_E4M3 = 3,
  MAGICDEC_E5M2 = 4
};

// Layouts of a page, by vLLM's names; see vector_cache.h (`vec` and `vec16`) and amx_cache.h.
enum MagicdecLayout : int32_t { MAGICDEC_VEC = 0, MAGICDEC_AMX = 1 };

// Attention of a layer's query tokens over its paged KV cache. Strides count elements; the innermost are 1.
struct MagicdecCall {
  // [num_pages, num_kv_heads, 2 * page_size * head_size]: keys, then values, by head.
  const void* cache;
  int64_t page_stride, cache_head_stride;
  // Queries and output: [num_tokens, num_heads, head_size], of the cache's type, or of any with an 8-bit cache; the heads
  // of a KV head are adjacent.
  const void* query;
  int64_t query_token_stride, query_head_stride;
  void* output;
  int64_t output_token_stride, output_head_stride;
  const int32_t* query_starts;  // [num_reqs + 1], cumulative query tokens

  // Pages: the query tokens are the last ones of the context; attention is causal.
  const int32_t* block_table;  // [num_reqs, ...]
  int64_t block_table_stride;
  const int32_t* context_lens;  // [num_reqs], including the query tokens

  // Alternatively, slots of each KV head, if `slots` is not null.
  const int32_t* slots;  // [num_reqs, num_kv_heads, width], of which the first `slot_lens` are read
  int64_t slots_request_stride, slots_head_stride;
  const int32_t* slot_lens;  // [num_reqs]
  const uint8_t* is_seen;    // [num_reqs, ..., width], by a request's n-th token; null: all see all
  int64_t is_seen_request_stride, is_seen_token_stride;

  const float* sinks;  // [num_heads]: learned logits in the denominator; null: none
  float scale, soft_cap;  // of the logits; a cap of 0 is none
  float value_scale;      // of the output
  int32_t window;         // tokens that a query sees, including itself; 0: all. For pages only
  int32_t layout, query_type, cache_type, num_reqs, num_heads, num_kv_heads, head_size, page_size;
};

// Bytes of `MagicdecCall` up to the end of its last member, to detect outdated libraries.
int magicdec_call_end();

// Returns 1 if the shape or type is not supported, else 0.
int magicdec_attend(const MagicdecCall* call);

// Computes the softmax weights of one request's context, summed over its query tokens and the query heads of each KV
// head. The output is float32 [num_kv_heads, context] with rows `output_head_stride` apart. Returns 0, or 1 as above.
int magicdec_weigh(const MagicdecCall* call);
}
