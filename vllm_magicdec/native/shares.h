// SPDX-License-Identifier: Apache-2.0
// Partition of the blocks of all requests and KV heads into contiguous parts of equal cost, one per thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace magicdec {

struct Range {
  int first, last;  // last: exclusive
  bool empty() const { return first >= last; }
};

// One thread's part of one request's KV head.
struct Part {
  int request, head;
  Range blocks;
  bool is_whole;
  int slot;  // index of its partial result
};

class Shares {
 public:
  // A block's cost in rows: a constant for reading it, plus its rows.
  Shares(int num_kv_heads, int64_t reading) : num_kv_heads_(num_kv_heads), reading_(reading) {}

  // Adds a request: its blocks per KV head and its rows.
  void add(Range blocks, int rows) {
    works_.push_back({blocks, reading_ + rows, cost_});
    cost_ += works_.back().cost * std::max(0, blocks.last - blocks.first) * num_kv_heads_;
  }

  // Partitions among at most so many threads.
  void divide(int threads) {
    threads_ = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, cost_ / (MIN_BLOCKS * reading_))));
  }

  int threads() const { return threads_; }

  // Calls `attend` for a thread's parts; the first thread calls `see_nothing` for requests without blocks.
  template <typename Attend, typename SeeNothing>
  void take(int thread, Attend attend, SeeNothing see_nothing) const {
    const int64_t from = cost_ * thread / threads_, to = cost_ * (thread + 1) / threads_;
    for (int request = 0; request < static_cast<int>(works_.size()); ++request) {
      const Work& work = works_[request];
      const int num_blocks = work.blocks.last - work.blocks.first;
      if (num_blocks <= 0) {
        if (thread == 0) see_nothing(request);
        continue;
      }
      const int64_t head_cost = work.cost * num_blocks;
      const int64_t end = work.before + head_cost * num_kv_heads_;
      if (end <= from || work.before >= to) continue;
      const int first_head = static_cast<int>(std::max<int64_t>(0, from - work.before) / head_cost);
      for (int head = first_head; head < num_kv_heads_; ++head) {
        const int64_t start = work.before + head * head_cost;
        if (start >= to) break;
        const auto cut = [&](int64_t at) {
          return static_cast<int>(std::clamp<int64_t>((at - start + work.cost - 1) / work.cost, 0, num_blocks));
        };
        const int first = from <= start ? 0 : cut(from), last = to >= start + head_cost ? num_blocks : cut(to);
        if (first >= last) continue;
        attend(Part{request, head, {work.blocks.first + first, work.blocks.first + last},
                    first == 0 && last == num_blocks, 2 * thread + (first == 0)});
      }
    }
  }

 private:
  struct Work {
    Range blocks;
    int64_t cost;    // of a block
    int64_t before;  // cost of the requests before it
  };

  // Minimum blocks per thread; below, an additional thread costs more than it saves.
  static constexpr int64_t MIN_BLOCKS = 64;

  const int num_kv_heads_;
  const int64_t reading_;
  int threads_ = 1;
  int64_t cost_ = 0;
  std::vector<Work> works_;
};

}  // namespace magicdec
