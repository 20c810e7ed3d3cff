// SPDX-License-Identifier: Apache-2.0
// Attention of a few query tokens per request over a paged KV cache, for CPUs, in any layout.
//
// A tile's rows are a request's query tokens times the heads that share a KV head, so verifying several tokens reads
// keys and values once. Rows are computed in groups that fit the registers, with an online softmax over tiles of tokens
// and float32 sums. Each thread gets an equal part of all blocks of all requests and KV heads; results of heads that are
// split between threads are merged at the end.

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "cache.h"
#include "shares.h"
#include "softmax.h"
#include "vector_cache.h"

#if defined(__AMX_BF16__)
#include "amx_cache.h"
#endif

namespace magicdec {
namespace {

constexpr int MAX_POSITIONS = 32;         // query tokens of a request
#ifndef MAGICDEC_MOST_LOGITS              // that a thread keeps to weigh tokens, if one group of rows has not more: 8 MiB
#define MAGICDEC_MOST_LOGITS (1 << 21)
#endif

template <typename T>
struct Type {
  using Own = T;
};

inline int num_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

inline int team_size() {
#ifdef _OPENMP
  return omp_get_num_threads();
#else
  return 1;
#endif
}

inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Buffers of a thread between calls; they never shrink.
template <typename Cache>
struct Scratch {
  using Left = typename Cache::Left;

  alignas(64) float scores[Cache::MAX_ROWS * SCORES_PITCH];
  alignas(64) Left weights[Cache::MAX_ROWS * SCORES_PITCH];
  Numbers<Left> query;         // [rows, QUERY_PITCH]
  Numbers<float> sums;         // [rows, head_size]
  Numbers<float> most, total;  // [rows]
  typename Cache::Tile tiles[2];

  void reserve(int rows, int head_size) {
    rows += Cache::SPARE_ROWS;
    if (query.size() < static_cast<size_t>(rows) * QUERY_PITCH) query.resize(static_cast<size_t>(rows) * QUERY_PITCH);
    if (sums.size() < static_cast<size_t>(rows) * head_size) sums.resize(static_cast<size_t>(rows) * head_size);
    if (most.size() < static_cast<size_t>(rows)) {
      most.resize(rows);
      total.resize(rows);
    }
    for (auto& tile : tiles) tile.reserve(head_size);
  }
};

// `Cache<T>` reads a layout of the KV cache.
template <template <typename> typename Cache, typename T>
class Attention {
 public:
  explicit Attention(const MagicdecCall& call)
      : call_(call),
        group_(call.num_heads / call.num_kv_heads),
        logits_{call.scale * Cache<T>::NUMBER, call.soft_cap},
        shares_(call.num_kv_heads, Cache<T>::READING) {
    int max_rows = 0;
    for (int request = 0; request < call.num_reqs; ++request) {
      const int rows = num_positions(request) * group_;
      max_rows = std::max(max_rows, rows);
      shares_.add(blocks_of(request), rows);
    }
    shares_.divide(num_threads());
    // Partial results by row: sums, maximum logit, denominator. Threads share no cache line.
    partial_pitch_ = (call.head_size + 2 + 15) / 16 * 16;
    slot_size_ = max_rows * partial_pitch_;
    if (shares_.threads() > 1) {
      // Kept by the caller, because initialising it in every call is slow with many threads.
      thread_local std::vector<float> partials;
      const size_t size = 2 * shares_.threads() * slot_size_ + 16;
      if (partials.size() < size) partials.resize(size);
      const auto address = reinterpret_cast<uintptr_t>(partials.data());
      partial_base_ = partials.data() + (64 - address % 64) % 64 / sizeof(float);
      parts_.resize(2 * shares_.threads(), Part{-1, 0, {0, 0}, true, 0});
    }
  }

  void run() {
    if (shares_.threads() == 1) {
      share(0);
      return;
    }
    // OpenMP may provide fewer threads than requested: each then does the work of several.
#pragma omp parallel num_threads(shares_.threads())
    {
      const int team = team_size();
      for (int thread = thread_number(); thread < shares_.threads(); thread += team) share(thread);
#pragma omp barrier
      for (int thread = thread_number(); thread < shares_.threads(); thread += team) combine(thread);
    }
  }

  // Implements `magicdec_weigh`, one thread per KV head.
  void weigh_tokens() {
#pragma omp parallel for schedule(static)  // only threads with a head allocate a buffer
    for (int head = 0; head < call_.num_kv_heads; ++head) {
      weigh_tokens(head);
      Cache<T>::release();
    }
  }

 private:
  using Tile = typename Cache<T>::Tile;

  int num_positions(int request) const { return call_.query_starts[request + 1] - call_.query_starts[request]; }

  // Blocks that some token of the request sees; with slots, groups of `BLOCK` slots.
  Range blocks_of(int request) const {
    if (num_positions(request) == 0) return {0, 0};
    if (call_.slots != nullptr) return {0, (call_.slot_lens[request] + BLOCK - 1) / BLOCK};
    const int context = call_.context_lens[request];
    const int first = call_.window > 0 ? std::max(0, context - num_positions(request) + 1 - call_.window) : 0;
    return {first / BLOCK, (context + BLOCK - 1) / BLOCK};
  }

  void share(int thread) {
    const auto attend_part = [&](const Part& part) {
      if (!part.is_whole) parts_[part.slot] = part;
      attend(part);
    };
    shares_.take(thread, attend_part, [&](int request) { see_nothing(request); });
    Cache<T>::release();
  }

  void attend(const Part& part) {
    thread_local Scratch<Cache<T>> scratch;
    const int rows = num_positions(part.request) * group_;
    scratch.reserve(rows, call_.head_size);
    take_query(part, scratch);
    std::fill_n(scratch.most.begin(), rows, NOTHING_SEEN);
    std::fill_n(scratch.total.begin(), rows, 0.0f);
    std::fill_n(scratch.sums.begin(), static_cast<size_t>(rows) * call_.head_size, 0.0f);
    const int first = part.blocks.first * BLOCK;
    const int last = std::min(part.blocks.last * BLOCK, num_tokens(part.request));
    const int together = Cache<T>::rows_together(rows);
    const int length = Cache<T>::tile_length(rows, call_.head_size);
    const HeadPages<T> head(call_, part.request, part.head);
    Tile *tile = &scratch.tiles[0], *next = &scratch.tiles[1];
    Cache<T>::lay_out(head, {first, std::min(first + length, last)}, *tile);
    for (int start = first; start < last; start += length) {
      const bool is_last = start + length >= last;
      if (!is_last) Cache<T>::lay_out(head, {start + length, std::min(start + 2 * length, last)}, *next);
      typename Cache<T>::Upcoming upcoming(head, *tile, is_last ? nullptr : next, together, rows, start == first);
      for (int row = 0; row < rows; row += together) {
        const Range group = {row, std::min(row + together, rows)};
        upcoming.begin(group);
        advance(part, head, start, *tile, group, upcoming, scratch);
      }
      std::swap(tile, next);
    }
    if (part.is_whole) {
      for (int row = 0; row < rows; ++row)
        write(part, row, &scratch.sums[row * call_.head_size], scratch.most[row], scratch.total[row]);
      return;
    }
    for (int row = 0; row < rows; ++row) {
      float* kept = partial(part.slot, row);
      std::copy_n(&scratch.sums[row * call_.head_size], call_.head_size, kept);
      kept[call_.head_size] = scratch.most[row];
      kept[call_.head_size + 1] = scratch.total[row];
    }
  }

  // A few rows at a time, to bound the memory of logits.
  void weigh_tokens(int head) const {
    thread_local Scratch<Cache<T>> scratch;
    const Part part{0, head, blocks_of(0), true, 0};
    const int rows = num_positions(0) * group_, count = num_tokens(0);
    float* output = static_cast<float*>(call_.output) + head * call_.output_head_stride;
    std::fill_n(output, count, 0.0f);
    if (rows == 0) return;
    const int64_t pitch = (count + TILE - 1) / TILE * TILE;
    const int together = Cache<T>::rows_together(rows);
    const int at_once = static_cast<int>(std::max<int64_t>(1, MAGICDEC_MOST_LOGITS / (pitch * together))) * together;
    scratch.reserve(rows, call_.head_size);
    take_query(part, scratch);
    for (int row = 0; row < rows; row += at_once)
      weigh_tokens(part, {row, std::min(row + at_once, rows)}, together, pitch, scratch, output);
  }

  void weigh_tokens(const Part& part, Range rows, int together, int64_t pitch, Scratch<Cache<T>>& scratch,
                    float* output) const {
    thread_local Numbers<float> products;  // [rows, pitch]
    const int count = num_tokens(0);
    const size_t size = (rows.last - rows.first) * pitch;
    if (products.size() < size) {
      Numbers<float>().swap(products);
      products.resize(size);
    }
    const HeadPages<T> head(call_, 0, part.head);
    Tile& tile = scratch.tiles[0];
    for (int start = 0; start < count; start += TILE) {
      Cache<T>::lay_out(head, {start, std::min(start + TILE, count)}, tile);
      const bool is_clear = all_see(part, start, tile.num_tokens);
      for (int row = rows.first; row < rows.last; row += together) {
        const int num_rows = std::min(together, rows.last - row);
        typename Cache<T>::Upcoming nothing(head, tile, nullptr, num_rows, num_rows, false);
        Cache<T>::score(head, tile, &scratch.query[row * QUERY_PITCH], num_rows, scratch.scores, nothing);
        for (int r = 0; r < num_rows; ++r) {
          float* scores = scratch.scores + r * SCORES_PITCH;
          if (!is_clear) hide(part, row + r, start, tile.num_tokens, scores);
          std::copy_n(scores, tile.num_tokens, &products[(row + r - rows.first) * pitch + start]);
        }
      }
    }
    for (int row = rows.first; row < rows.last; ++row) {
      float most = NOTHING_SEEN, total = 0;
      float* weights = &products[(row - rows.first) * pitch];
      weigh<LANES>(logits_, weights, count, most, total, nullptr, 0, weights);
      const float share = 1 / with_sink(part, row, most, total);
      for (int t = 0; t < count; ++t) output[t] += weights[t] * share;
    }
  }

  int num_tokens(int request) const {
    return call_.slots != nullptr ? call_.slot_lens[request] : call_.context_lens[request];
  }

  // Dispatches on the type of queries and output.
  template <typename Action>
  void of_query_type(Action action) const {
    switch (call_.query_type) {
      case MAGICDEC_FLOAT32: return action(Type<float>());
      case MAGICDEC_BFLOAT16: return action(Type<Bfloat16>());
      case MAGICDEC_FLOAT16: return action(Type<Float16>());
    }
  }

  // Row r is token r / group of the request and query head r % group of the KV head.
  void take_query(const Part& part, Scratch<Cache<T>>& scratch) const {
    const int rows = num_positions(part.request) * group_;
    of_query_type([&](auto type) {
      const auto* query = static_cast<const typename decltype(type)::Own*>(call_.query) +
                          call_.query_starts[part.request] * call_.query_token_stride +
                          part.head * group_ * call_.query_head_stride;
      for (int row = 0; row < rows; ++row) {
        const auto* from = query + row / group_ * call_.query_token_stride + row % group_ * call_.query_head_stride;
        auto* to = &scratch.query[row * QUERY_PITCH];
        for (int d = 0; d < call_.head_size; ++d) assign(to[d], as_float(from[d]));
      }
    });
  }

  // Range of the tile's tokens, from `start` on, that a row sees; for pages.
  Range seen(const Part& part, int row, int start, int count) const {
    const int position = call_.context_lens[part.request] - num_positions(part.request) + row / group_;
    const int first = call_.window > 0 ? position + 1 - call_.window - start : 0;
    return {std::clamp(first, 0, count), std::clamp(position + 1 - start, 0, count)};
  }

  // Computes logits, weights and weighted values of a tile for some rows.
  void advance(const Part& part, const HeadPages<T>& head, int start, Tile& tile, Range rows,
               typename Cache<T>::Upcoming& upcoming, Scratch<Cache<T>>& scratch) const {
    const int num_rows = rows.last - rows.first;
    Cache<T>::score(head, tile, &scratch.query[rows.first * QUERY_PITCH], num_rows, scratch.scores, upcoming);
    const bool is_clear = all_see(part, start, tile.num_tokens);
    for (int r = 0; r < num_rows; ++r) {
      const int row = rows.first + r;
      upcoming.ask();
      float* scores = scratch.scores + r * SCORES_PITCH;
      if (!is_clear) hide(part, row, start, tile.num_tokens, scores);
      weigh<Cache<T>::WEIGHTS_STEP>(logits_, scores, tile.num_tokens, scratch.most[row], scratch.total[row],
                            &scratch.sums[row * call_.head_size], call_.head_size, scratch.weights + r * SCORES_PITCH);
    }
    Cache<T>::add_values(head, tile, scratch.weights, num_rows, &scratch.sums[rows.first * call_.head_size], upcoming);
  }

  // Whether every row sees all of the tile's tokens.
  bool all_see(const Part& part, int start, int count) const {
    if (call_.slots != nullptr) return call_.is_seen == nullptr;
    const int last_row = num_positions(part.request) * group_ - 1;
    return seen(part, 0, start, count).last == count && seen(part, last_row, start, count).first == 0;
  }

  // Sets logits of unseen tokens to -inf.
  void hide(const Part& part, int row, int start, int count, float* scores) const {
    if (call_.slots == nullptr) {
      const Range visible = seen(part, row, start, count);
      std::fill(scores, scores + visible.first, -INFINITY);
      std::fill(scores + visible.last, scores + count, -INFINITY);
      return;
    }
    const uint8_t* sees = call_.is_seen + part.request * call_.is_seen_request_stride +
                          row / group_ * call_.is_seen_token_stride + start;
    for (int t = 0; t < count; ++t)
      if (!sees[t]) scores[t] = -INFINITY;
  }

  float* partial(int slot, int row) { return partial_base_ + slot * slot_size_ + row * partial_pitch_; }

  // Merges the rows of KV heads that were split between threads.
  void combine(int thread) {
    int turn = 0;
    for (int owner = 0; owner < shares_.threads(); ++owner) {
      const Part& first = parts_[2 * owner + 1];
      if (first.request < 0) continue;
      const int rows = num_positions(first.request) * group_;
      for (int row = 0; row < rows; ++row)
        if (turn++ % shares_.threads() == thread) combine_row(owner, first, row);
    }
  }

  void combine_row(int owner, const Part& first, int row) {
    const int head_size = call_.head_size;
    float* sums = partial(first.slot, row);
    float &most = sums[head_size], &total = sums[head_size + 1];
    for (int other = owner + 1; other < shares_.threads(); ++other) {
      const Part& part = parts_[2 * other];
      if (part.request != first.request || part.head != first.head) continue;
      const float* more = partial(part.slot, row);
      const float now = std::max(most, more[head_size]);
      const float fade = std::exp2(most - now), share = std::exp2(more[head_size] - now);
      for (int d = 0; d < head_size; ++d) sums[d] = sums[d] * fade + more[d] * share;
      total = total * fade + more[head_size + 1] * share;
      most = now;
    }
    write(first, row, sums, most, total);
  }

  void write(const Part& part, int row, const float* sums, float most, float total) const {
    total = with_sink(part, row, most, total);
    const float share = total == 0 ? 0 : call_.value_scale * Cache<T>::NUMBER / total;
    write_row(part.request, part.head, row, [&](int d) { return sums[d] * share; });
  }

  // The denominator of a row, relative to its largest logit.
  float with_sink(const Part& part, int row, float most, float total) const {
    if (call_.sinks == nullptr) return total;
    return total + std::exp2(call_.sinks[part.head * group_ + row % group_] * LOG2_E - most);
  }

  void see_nothing(int request) const {
    for (int head = 0; head < call_.num_kv_heads; ++head)
      for (int row = 0; row < num_positions(request) * group_; ++row)
        write_row(request, head, row, [](int) { return 0.0f; });
  }

  template <typename Numbers>
  void write_row(int request, int head, int row, Numbers number) const {
    const int64_t at = (call_.query_starts[request] + row / group_) * call_.output_token_stride +
                       (head * group_ + row % group_) * call_.output_head_stride;
    of_query_type([&](auto type) {
      auto* to = static_cast<typename decltype(type)::Own*>(call_.output) + at;
      for (int d = 0; d < call_.head_size; ++d) assign(to[d], number(d));
    });
  }

  const MagicdecCall& call_;
  const int group_;
  const Logits logits_;  // of products as they are loaded
  Shares shares_;
  std::vector<Part> parts_;  // split heads by thread: one that began before it, one that begins in it
  float* partial_base_ = nullptr;
  int64_t partial_pitch_ = 0, slot_size_ = 0;
};

bool fits(const MagicdecCall& call) {
  if (call.num_kv_heads <= 0 || call.num_heads % call.num_kv_heads || call.page_size % BLOCK ||
      call.head_size % 16 || call.head_size > MAX_HEAD_SIZE || !(call.scale > 0))
    return false;
  const bool is_fp8 = call.cache_type == MAGICDEC_E4M3 || call.cache_type == MAGICDEC_E5M2;
  if (call.query_type > MAGICDEC_FLOAT16 || (!is_fp8 && call.query_type != call.cache_type)) return false;
  if (call.layout == MAGICDEC_AMX && (call.query_type != MAGICDEC_BFLOAT16 || call.head_size % 32)) return false;
  for (int request = 0; request < call.num_reqs; ++request) {
    const int num_positions = call.query_starts[request + 1] - call.query_starts[request];
    if (num_positions < 0 || num_positions > MAX_POSITIONS) return false;
  }
  return true;
}

// Dispatches on the type of cache; returns 1 if it is not supported, else 0.
template <typename Action>
int of_cache_type(const MagicdecCall& call, Action action) {
  if (!fits(call)) return 1;
  if (call.layout == MAGICDEC_AMX) {
#if defined(__AMX_BF16__)
    switch (call.cache_type) {
      case MAGICDEC_BFLOAT16: return action(Attention<AmxCache, Bfloat16>(call)), 0;
      case MAGICDEC_E4M3: return action(Attention<AmxCache, E4m3>(call)), 0;
      case MAGICDEC_E5M2: return action(Attention<AmxCache, E5m2>(call)), 0;
    }
#endif
    return 1;
  }
  switch (call.cache_type) {
    case MAGICDEC_FLOAT32: return action(Attention<VectorCache, float>(call)), 0;
    case MAGICDEC_BFLOAT16: return action(Attention<VectorCache, Bfloat16>(call)), 0;
    case MAGICDEC_FLOAT16: return action(Attention<VectorCache, Float16>(call)), 0;
    case MAGICDEC_E4M3: return action(Attention<VectorCache, E4m3>(call)), 0;
    case MAGICDEC_E5M2: return action(Attention<VectorCache, E5m2>(call)), 0;
  }
  return 1;
}

}  // namespace
}  // namespace magicdec

extern "C" __attribute__((visibility("default"))) int magicdec_call_end() {
  return offsetof(MagicdecCall, page_size) + sizeof(int32_t);
}

extern "C" __attribute__((visibility("default"))) int magicdec_attend(const MagicdecCall* call) {
  return magicdec::of_cache_type(*call, [](auto attention) { attention.run(); });
}

extern "C" __attribute__((visibility("default"))) int magicdec_weigh(const MagicdecCall* call) {
  if (call->num_reqs != 1 || call->slots != nullptr) return 1;
  if (call->context_lens[0] < call->query_starts[1] - call->query_starts[0]) return 1;
  return magicdec::of_cache_type(*call, [](auto attention) { attention.weigh_tokens(); });
}
