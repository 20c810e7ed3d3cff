// SPDX-License-Identifier: Apache-2.0
// Shared code of the readers of cache layouts, `VectorCache<T>` and `AmxCache<T>`, for elements of type T. Each lays out
// tiles of tokens and computes the products of queries with keys and of weights with values:
//
// - `Left`: type of queries and weights; `NUMBER`: type of the cache's elements in products
// - `MAX_ROWS`, `rows_together`: rows computed at once; `SPARE_ROWS`: padding rows that are written
// - `WEIGHTS_STEP`: weights are padded to a multiple of so many tokens; `tile_length`: tokens of a tile
// - `READING`: cost of reading a block, in rows
// - `lay_out`, `score`, `add_values`: a tile and its products; `release`: frees a thread's state
// - `Upcoming`: prefetches during the computation of a tile
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "attention.h"
#include "shares.h"

namespace magicdec {

constexpr int BLOCK = 32;                 // tokens; pages hold a multiple
constexpr int TILE = 128;                 // maximum tokens between two softmax updates
constexpr int SCORES_PITCH = TILE + 32;  // avoids cache conflicts between rows
constexpr int MAX_HEAD_SIZE = 512;
constexpr int QUERY_PITCH = MAX_HEAD_SIZE + 32;

// An array aligned to a cache line.
template <typename T>
struct OfCacheLines {
  using value_type = T;
  static constexpr std::align_val_t LINE{64};
  OfCacheLines() = default;
  template <typename Other>
  OfCacheLines(const OfCacheLines<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
  void deallocate(T* numbers, size_t) { ::operator delete(numbers, LINE); }
  bool operator==(const OfCacheLines&) const { return true; }
  bool operator!=(const OfCacheLines&) const { return false; }
};
template <typename T>
using Numbers = std::vector<T, OfCacheLines<T>>;

// Addresses of the tokens of one request and KV head.
template <typename T>
class HeadPages {
 public:
  HeadPages(const MagicdecCall& call, int request, int head)
      : page_size_(call.page_size),
        head_size_(call.head_size),
        page_stride_(call.page_stride),
        pages_(static_cast<const T*>(call.cache) + head * call.cache_head_stride),
        table_(call.block_table == nullptr ? nullptr : call.block_table + request * call.block_table_stride),
        slots_(call.slots == nullptr
                   ? nullptr
                   : call.slots + request * call.slots_request_stride + head * call.slots_head_stride) {}

  bool has_slots() const { return slots_ != nullptr; }
  int page_size() const { return page_size_; }
  int head_size() const { return head_size_; }

  // Address of the n-th token of the context or of the slots.
  struct Place {
    const T* page;  // the head's part of it
    int in_page;
  };
  Place place(int token) const {
    const int64_t page = slots_ != nullptr ? slots_[token] / page_size_ : table_[token / page_size_];
    return {pages_ + page * page_stride_, (slots_ != nullptr ? slots_[token] : token) % page_size_};
  }

  const T* keys(const Place& place) const { return place.page; }
  const T* values(const Place& place) const { return place.page + static_cast<int64_t>(page_size_) * head_size_; }

 private:
  const int page_size_, head_size_;
  const int64_t page_stride_;
  const T* pages_;
  const int32_t *table_, *slots_;
};

}  // namespace magicdec
