// SPDX-License-Identifier: Apache-2.0
// What the readers of the cache's layouts have in common. Each of them lays tiles of tokens out and makes the two
// products of a tile: queries with its keys, and weights with its values.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "shares.h"

namespace magicdec {

constexpr int BLOCK = 32;                 // tokens; a page holds a multiple of them
constexpr int TILE = 128;                 // most tokens between two looks at the softmax
constexpr int SCORES_PITCH = TILE + 16;   // rows of equal place in a cache line would push each other out
constexpr int MAX_HEAD_SIZE = 512;
constexpr int QUERY_PITCH = MAX_HEAD_SIZE + 32;

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

  // Slot of the n-th token: of the context, or of those chosen.
  struct Place {
    int64_t page;
    int in_page;
  };
  Place place(int token) const {
    if (slots_ != nullptr) return {slots_[token] / page_size_, slots_[token] % page_size_};
    return {table_[token / page_size_], token % page_size_};
  }

  const T* keys(int64_t page) const { return pages_ + page * page_stride_; }
  const T* values(int64_t page) const { return keys(page) + static_cast<int64_t>(page_size_) * head_size_; }

 private:
  const int page_size_, head_size_;
  const int64_t page_stride_;
  const T* pages_;
  const int32_t *table_, *slots_;
};

}  // namespace magicdec
