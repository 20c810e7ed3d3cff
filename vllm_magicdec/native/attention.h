// SPDX-License-Identifier: Apache-2.0
// What a call of the kernel is given; `library.py` has the same in ctypes.
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

// How a page's keys and values lie, by vLLM's names; see vector_cache.h (`vec` and `vec16`) and amx_cache.h.
enum MagicdecLayout : int32_t { MAGICDEC_VEC = 0, MAGICDEC_AMX = 1 };

// Attention of a layer's query tokens over its paged KV cache. Strides count elements; the innermost are 1.
struct MagicdecCall {
  // [num_pages, num_kv_heads, 2 * page_size * head_size]: of each head its keys, then its values.
  const void* cache;
  int64_t page_stride, cache_head_stride;
  // [num_tokens, num_heads, head_size], of the cache's type, and with a cache of 8 bits of any other; the heads of a KV
  // head are neighbours. The output, too.
  const void* query;
  int64_t query_token_stride, query_head_stride;
  void* output;
  int64_t output_token_stride, output_head_stride;
  const int32_t* query_starts;  // [num_reqs + 1]: where each request's tokens begin, and where the last one's end

  // Pages: a request's tokens are its context's last ones, and each sees those before it.
  const int32_t* block_table;  // [num_reqs, ...]
  int64_t block_table_stride;
  const int32_t* context_lens;  // [num_reqs], with the query tokens

  // Or chosen slots of each KV head, where `slots` is not null.
  const int32_t* slots;  // [num_reqs, num_kv_heads, width], of which the first `slot_lens` are read
  int64_t slots_request_stride, slots_head_stride;
  const int32_t* slot_lens;  // [num_reqs]
  const uint8_t* is_seen;    // [num_reqs, ..., width], by a request's n-th token; null: all see all
  int64_t is_seen_request_stride, is_seen_token_stride;

  const float* sinks;  // [num_heads]: learned logits in the denominator; null: none
  float scale, soft_cap;  // of the logits; a cap of 0 is none
  float value_scale;      // of the output
  int32_t window;         // each token sees so many, itself included; 0: all. Of pages alone
  int32_t layout, query_type, cache_type, num_reqs, num_heads, num_kv_heads, head_size, page_size;
};

// Bytes of `MagicdecCall` up to its last member's end: a library that was compiled from other sources is told by it.
int magicdec_call_end();

// 0, or 1: the shape or type is not one of those that this kernel has.
int magicdec_attend(const MagicdecCall* call);

// What each token of one request's context weighs in the softmax of its query tokens, added up over these and over the
// query heads of each KV head; values are not read. The output is float32, [num_kv_heads, context], each head's row
// `output_head_stride` after the one before. 0, or 1 as above.
int magicdec_weigh(const MagicdecCall* call);
}
