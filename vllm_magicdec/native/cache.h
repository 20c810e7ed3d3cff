// SPDX-License-Identifier: Apache-2.0
// What the readers of the cache's layouts have in common: `VectorCache<T>` and `AmxCache<T>`, for numbers of type T. Each
// lays tiles of tokens out and makes the two products of a tile, queries with its keys and weights with its values:
//
// - `Left`: what queries and weights are stored as; `NUMBER`: what the cache's numbers stand for as they are multiplied
// - `MAX_ROWS`, `rows_together`: how many rows go through at once; `SPARE_ROWS`: behind a request's last one, written too
// - `WEIGHTS_STEP`: weights are written up to a multiple of so many tokens; `tile_length`: tokens of a tile
// - `READING`: what a block costs beside its rows, in rows
// - `lay_out`, `score`, `add_values`: a tile, and its products; `release`: what a thread held for them
// - `Upcoming`: what is asked for while a tile is computed with
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "attention.h"
#include "shares.h"

namespace magicdec {

constexpr int BLOCK = 32;                 // tokens; a page holds a multiple of them
constexpr int TILE = 128;                 // most tokens between two looks at the softmax
constexpr int SCORES_PITCH = TILE + 32;  // rows of equal place in a cache line would push each other out
constexpr int MAX_HEAD_SIZE = 512;
constexpr int QUERY_PITCH = MAX_HEAD_SIZE + 32;

// Numbers whose first begins a cache line.
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

// One KV head of one request: where its tokens are.
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

  // Of the n-th token: of the context, or of those chosen.
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
