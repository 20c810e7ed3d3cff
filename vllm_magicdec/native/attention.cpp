// SPDX-License-Identifier: Apache-2.0
// Attention of a few query tokens per request over a paged KV cache, for CPUs.
//
// A tile's rows are a request's query tokens times the heads that share a KV head, so that verifying several tokens
// reads keys and values once, as decoding one does. Rows go through in groups that fit the registers; the softmax is
// made on line over tiles of tokens; sums are float32. All blocks of all requests and KV heads are one line of work,
// of which each thread takes an equal part; what is cut between threads is put together at the end.

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "product.h"
#include "shares.h"

namespace magicdec {
namespace {

constexpr int TILE = 128;                 // most tokens between two looks at the softmax
constexpr int SCORES_PITCH = TILE + 16;   // rows of equal place in a cache line would push each other out
constexpr int MAX_HEAD_SIZE = 512;
constexpr int QUERY_PITCH = MAX_HEAD_SIZE + 32;
constexpr int COLUMNS = VECTORS * LANES;  // of a product
constexpr int MAX_POSITIONS = 32;         // query tokens of a request
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING_SEEN = -1e30f;  // less than any logit, and finite: differences of it are numbers

// Few rows wait for memory: what is read and what is asked for ahead should fit the first cache, with room to spare.
constexpr int FEW_ROWS = 8;
constexpr int FEW_ROWS_TILE_BYTES = 16384;

template <int N>
using Count = std::integral_constant<int, N>;

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

// The tokens of a tile: whose keys are where, and the rows of values.
template <typename T>
struct Tile {
  int num_tokens;
  int num_blocks;
  const T* keys[TILE];          // of each block, its first token's
  int firsts[TILE + 1];         // the tile's tokens that are of each block begin here
  uint8_t places[TILE];         // of each token in its block
  const T* values[TILE + 1];    // of each token; one more where the number of tokens is odd
  const T* block_values[TILE];  // of each block
};

// What a thread keeps between calls; it grows and never shrinks.
template <typename T>
struct Scratch {
  std::vector<typename Factor<T>::Left> query;  // [rows, QUERY_PITCH]
  std::vector<float> sums, most, total;         // [rows, head_size], [rows], [rows]
  Tile<T> tiles[2];

  void reserve(int rows, int head_size) {
    if (query.size() < static_cast<size_t>(rows) * QUERY_PITCH) query.resize(static_cast<size_t>(rows) * QUERY_PITCH);
    if (sums.size() < static_cast<size_t>(rows) * head_size) sums.resize(static_cast<size_t>(rows) * head_size);
    if (most.size() < static_cast<size_t>(rows)) {
      most.resize(rows);
      total.resize(rows);
    }
  }
};

template <typename T>
class Attention {
 public:
  explicit Attention(const MagicdecCall& call)
      : call_(call),
        group_(call.num_heads / call.num_kv_heads),
        scale_(call.scale * UNIT<T>),
        shares_(call.num_kv_heads) {
    int max_rows = 0;
    for (int request = 0; request < call.num_reqs; ++request) {
      const int rows = num_positions(request) * group_;
      max_rows = std::max(max_rows, rows);
      shares_.add(blocks_of(request), rows);
    }
    shares_.divide(num_threads());
    // Of each waiting row: sums, the largest logit, the denominator; a cache line is no two threads'.
    partial_pitch_ = (call.head_size + 2 + 15) / 16 * 16;
    slot_size_ = max_rows * partial_pitch_;
    if (shares_.threads() > 1) {
      // The caller keeps it: as large as it gets with many threads, filling it every time would take long.
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
    // OpenMP may give fewer threads than it is asked for: each then does the work of several.
#pragma omp parallel num_threads(shares_.threads())
    {
      const int team = team_size();
      for (int thread = thread_number(); thread < shares_.threads(); thread += team) share(thread);
#pragma omp barrier
      for (int thread = thread_number(); thread < shares_.threads(); thread += team) combine(thread);
    }
  }

 private:
  int num_positions(int request) const { return call_.query_starts[request + 1] - call_.query_starts[request]; }

  // Blocks that some token of the request sees; of chosen slots, each `BLOCK` of them.
  Range blocks_of(int request) const {
    if (call_.slots != nullptr) return {0, (call_.slot_lens[request] + BLOCK - 1) / BLOCK};
    const int context = call_.context_lens[request];
    if (num_positions(request) == 0) return {0, 0};
    const int first = call_.window > 0 ? std::max(0, context - num_positions(request) + 1 - call_.window) : 0;
    return {first / BLOCK, (context + BLOCK - 1) / BLOCK};
  }

  void share(int thread) {
    const auto attend_part = [&](const Part& part) {
      if (!part.is_whole) parts_[part.slot] = part;
      attend(part);
    };
    shares_.take(thread, attend_part, [&](int request) { see_nothing(request); });
  }

  void attend(const Part& part) {
    thread_local Scratch<T> scratch;
    const int rows = num_positions(part.request) * group_;
    scratch.reserve(rows, call_.head_size);
    take_query(part, scratch);
    std::fill_n(scratch.most.begin(), rows, NOTHING_SEEN);
    std::fill_n(scratch.total.begin(), rows, 0.0f);
    std::fill_n(scratch.sums.begin(), static_cast<size_t>(rows) * call_.head_size, 0.0f);
    const int first = part.blocks.first * BLOCK;
    const int last = std::min(part.blocks.last * BLOCK, num_tokens(part.request));
    const int length = tile_length(rows);
    Tile<T>*tile = &scratch.tiles[0], *next = &scratch.tiles[1];
    lay_out(part, {first, std::min(first + length, last)}, *tile);
    for (int start = first; start < last; start += length) {
      const bool is_last = start + length >= last;
      if (!is_last) lay_out(part, {start + length, std::min(start + 2 * length, last)}, *next);
      // As few groups of rows as fit the registers, as equal as can be.
      const int groups = (rows + MAX_ROWS - 1) / MAX_ROWS;
      for (int g = 0; g < groups; ++g) {
        const Range of_group = {rows * g / groups, rows * (g + 1) / groups};
        if (g == 0)
          advance<true>(part, start, *tile, is_last ? *tile : *next, of_group, scratch);
        else
          advance<false>(part, start, *tile, *tile, of_group, scratch);
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

  int tile_length(int rows) const {
    if (rows >= FEW_ROWS) return TILE;
    const int token_bytes = 2 * call_.head_size * static_cast<int>(sizeof(T));
    return std::clamp(FEW_ROWS_TILE_BYTES / token_bytes / BLOCK * BLOCK, BLOCK, TILE);
  }

  int num_tokens(int request) const {
    return call_.slots != nullptr ? call_.slot_lens[request] : call_.context_lens[request];
  }

  // Does something that depends on the type of queries and output.
  template <typename Action>
  void of_query_type(Action action) const {
    switch (call_.query_type) {
      case MAGICDEC_FLOAT32: return action(Type<float>());
      case MAGICDEC_BFLOAT16: return action(Type<Bfloat16>());
      case MAGICDEC_FLOAT16: return action(Type<Float16>());
    }
  }

  // Row r is the request's token r / group, and of it the KV head's query head r % group.
  void take_query(const Part& part, Scratch<T>& scratch) const {
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

  const T* page(int number, int head) const {
    return static_cast<const T*>(call_.cache) + number * call_.page_stride + head * call_.cache_head_stride;
  }

  void lay_out(const Part& part, Range tokens, Tile<T>& tile) const {
    tile.num_tokens = tokens.last - tokens.first;
    tile.num_blocks = 0;
    if (call_.slots != nullptr)
      lay_out_slots(part, tokens.first, tile);
    else
      lay_out_pages(part, tokens.first, tile);
    tile.firsts[tile.num_blocks] = tile.num_tokens;
    // A tile that asks for this one's keys may have more blocks.
    for (int b = tile.num_blocks; b < TILE / BLOCK; ++b) tile.keys[b] = tile.keys[0];
    // A pair that has no second token: weighed by nothing, and a number.
    tile.values[tile.num_tokens] = tile.values[tile.num_tokens - 1];
  }

  void lay_out_pages(const Part& part, int start, Tile<T>& tile) const {
    const int32_t* table = call_.block_table + part.request * call_.block_table_stride;
    for (int t = 0; t < tile.num_tokens; t += BLOCK) {
      const int token = start + t, place = token % call_.page_size;
      const T* keys = page(table[token / call_.page_size], part.head);
      const T* values = keys + call_.page_size * call_.head_size + place * call_.head_size;
      tile.keys[tile.num_blocks] = keys + place;
      tile.block_values[tile.num_blocks] = values;
      tile.firsts[tile.num_blocks++] = t;
      for (int i = 0; i < std::min(BLOCK, tile.num_tokens - t); ++i) {
        tile.places[t + i] = static_cast<uint8_t>(i);
        tile.values[t + i] = values + i * call_.head_size;
      }
    }
  }

  // Neighbours in the list that are of one block share its products: a token's key is spread over all lines of it.
  void lay_out_slots(const Part& part, int start, Tile<T>& tile) const {
    const int32_t* slots = call_.slots + part.request * call_.slots_request_stride +
                           part.head * call_.slots_head_stride + start;
    for (int t = 0; t < tile.num_tokens; ++t) {
      const int place = slots[t] % call_.page_size, in_block = place % BLOCK;
      const T* first = page(slots[t] / call_.page_size, part.head);
      const T* keys = first + place - in_block;
      if (tile.num_blocks == 0 || tile.keys[tile.num_blocks - 1] != keys) {
        tile.keys[tile.num_blocks] = keys;
        // Most values are of tokens that were not chosen: instead, what is there already.
        tile.block_values[tile.num_blocks] = keys;
        tile.firsts[tile.num_blocks++] = t;
      }
      tile.places[t] = static_cast<uint8_t>(in_block);
      tile.values[t] = first + (call_.page_size + place) * call_.head_size;
    }
  }

  // Which of the tile's tokens, from `start` on, a row sees; of pages.
  Range seen(const Part& part, int row, int start, int count) const {
    const int position = call_.context_lens[part.request] - num_positions(part.request) + row / group_;
    const int first = call_.window > 0 ? position + 1 - call_.window - start : 0;
    return {std::clamp(first, 0, count), std::clamp(position + 1 - start, 0, count)};
  }

  // A tile of tokens for some rows; the first of them to read it ask for what is read next.
  template <bool ASKS>
  void advance(const Part& part, int start, const Tile<T>& tile, const Tile<T>& next, Range rows,
               Scratch<T>& scratch) const {
    const auto advance_by = [&](auto count) {
      constexpr int ROWS = decltype(count)::value;
      if constexpr (ROWS <= MAX_ROWS) advance_rows<ROWS, ASKS>(part, start, tile, next, rows.first, scratch);
    };
    switch (rows.last - rows.first) {
      case 1: return advance_by(Count<1>());
      case 2: return advance_by(Count<2>());
      case 3: return advance_by(Count<3>());
      case 4: return advance_by(Count<4>());
      case 5: return advance_by(Count<5>());
      case 6: return advance_by(Count<6>());
      case 7: return advance_by(Count<7>());
      case 8: return advance_by(Count<8>());
      case 9: return advance_by(Count<9>());
      case 10: return advance_by(Count<10>());
      case 11: return advance_by(Count<11>());
      case 12: return advance_by(Count<12>());
    }
  }

  // Logits, weights, and the values so weighted.
  template <int Rows, bool ASKS>
  void advance_rows(const Part& part, int start, const Tile<T>& tile, const Tile<T>& next, int first_row,
                    Scratch<T>& scratch) const {
    using F = Factor<T>;
    alignas(64) float scores[Rows * SCORES_PITCH];
    alignas(64) typename F::Left weights[Rows * SCORES_PITCH];
    score<Rows, ASKS>(tile, &scratch.query[first_row * QUERY_PITCH], scores);
    const bool is_clear = all_see(part, start, tile.num_tokens);
    for (int r = 0; r < Rows; ++r) {
      const int row = first_row + r;
      if (!is_clear) hide(part, row, start, tile.num_tokens, scores + r * SCORES_PITCH);
      weigh(scores + r * SCORES_PITCH, tile.num_tokens, scratch.most[row], scratch.total[row],
            &scratch.sums[row * call_.head_size], weights + r * SCORES_PITCH);
    }
    const int depth = (tile.num_tokens + F::DEPTH - 1) / F::DEPTH * F::DEPTH;
    float* sums = &scratch.sums[first_row * call_.head_size];
    int column = 0;
    for (; column + COLUMNS <= call_.head_size; column += COLUMNS) {
      const Listed<T> values{tile.values, column};
      if (ASKS && column % BLOCK == 0)
        multiply<T, Rows, VECTORS, SCORES_PITCH, true>(weights, values, depth, sums + column, call_.head_size,
                                                       UpcomingKeys<T>{next.keys, call_.page_size, column});
      else
        multiply<T, Rows, VECTORS, SCORES_PITCH, true>(weights, values, depth, sums + column, call_.head_size,
                                                       Nothing());
    }
    for (; column < call_.head_size; column += LANES)
      multiply<T, Rows, 1, SCORES_PITCH, true>(weights, Listed<T>{tile.values, column}, depth, sums + column,
                                               call_.head_size, Nothing());
  }

  template <int Rows, bool ASKS>
  void score(const Tile<T>& tile, const typename Factor<T>::Left* query, float* scores) const {
    for (int b = 0; b < tile.num_blocks; ++b) {
      const int first = tile.firsts[b], count = tile.firsts[b + 1] - first;
      const bool is_whole = count == BLOCK && tile.places[first] == 0 && tile.places[first + BLOCK - 1] == BLOCK - 1;
      const bool in_place = is_whole || call_.slots == nullptr;  // a last block has room behind it
      alignas(64) float apart[Rows * BLOCK];
      float* to = in_place ? scores + first : apart;
      const int pitch = in_place ? SCORES_PITCH : BLOCK;
      for (int column = 0; column < BLOCK; column += COLUMNS) {
        const Strided<T> keys{tile.keys[b] + column, call_.page_size};
        if (ASKS && column == 0)
          multiply<T, Rows, VECTORS, QUERY_PITCH, false>(query, keys, call_.head_size, to + column, pitch,
                                                         UpcomingValues<T>{tile.block_values[b]});
        else
          multiply<T, Rows, VECTORS, QUERY_PITCH, false>(query, keys, call_.head_size, to + column, pitch,
                                                         Nothing());
      }
      if (in_place) continue;
      for (int r = 0; r < Rows; ++r)
        for (int t = first; t < first + count; ++t)
          scores[r * SCORES_PITCH + t] = apart[r * BLOCK + tile.places[t]];
    }
  }

  // Whether every row sees all of the tile's tokens.
  bool all_see(const Part& part, int start, int count) const {
    if (call_.slots != nullptr) return call_.is_seen == nullptr;
    const int last_row = num_positions(part.request) * group_ - 1;
    return seen(part, 0, start, count).last == count && seen(part, last_row, start, count).first == 0;
  }

  // -inf where the row does not see.
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

  // One step of the softmax on line: products become weights relative to the largest logit so far.
  void weigh(float* scores, int count, float& most, float& total, float* sums,
             typename Factor<T>::Left* weights) const {
    // Up to the next whole vector there is nothing.
    const int end = (count + LANES - 1) / LANES * LANES;
    std::fill(scores + count, scores + end, -INFINITY);
    if (call_.soft_cap > 0)
      for (int t = 0; t < end; t += LANES) {
        const Floats product = load(scores + t);
        const Floats capped = tanh_of(product * (scale_ / call_.soft_cap)) * call_.soft_cap;
        store(scores + t, product > -INFINITY ? capped : product);  // and not what is no number
      }
    // To the base of 2, because powers of 2 are cheap.
    const float to_logits = (call_.soft_cap > 0 ? 1 : scale_) * LOG2_E;
    Floats largest_yet = load(scores);
    for (int t = LANES; t < end; t += LANES) largest_yet = larger(largest_yet, load(scores + t));
    const float now = std::max(most, largest(largest_yet) * to_logits);
    if (now > most) {
      const float fade = std::exp2(most - now);
      total *= fade;
      for (int d = 0; d < call_.head_size; d += LANES) store(sums + d, load(sums + d) * fade);
      most = now;
    }
    // What is not seen weighs 2^-126, which is nothing beside the largest weight, 1.
    Floats added = all(0);
    for (int t = 0; t < end; t += LANES) {
      const Floats power = load(scores + t) * to_logits - now;
      const Floats weight = exp2_of_negative(power);
      added += power == power ? weight : power;  // what is no number makes the row none
      keep(weights + t, weight);
    }
    total += sum(added);
  }

  static void keep(float* to, Floats x) { store(to, x); }
#if defined(__AVX512BF16__)
  static void keep(Bfloat16* to, Floats x) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &rounded, sizeof rounded);
  }
#endif

  float* partial(int slot, int row) { return partial_base_ + slot * slot_size_ + row * partial_pitch_; }

  // Where a KV head was cut between threads: all rows of all such, one thread each.
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
    if (call_.sinks != nullptr) total += std::exp2(call_.sinks[part.head * group_ + row % group_] * LOG2_E - most);
    const float share = total == 0 ? 0 : call_.value_scale * UNIT<T> / total;
    write_row(part.request, part.head, row, [&](int d) { return sums[d] * share; });
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
  const float scale_;  // of products as they are loaded
  Shares shares_;
  std::vector<Part> parts_;  // that are not whole: by thread, one that began before it and one that begins in it
  float* partial_base_ = nullptr;
  int64_t partial_pitch_ = 0, slot_size_ = 0;
};

bool fits(const MagicdecCall& call) {
  if (call.num_kv_heads <= 0 || call.num_heads % call.num_kv_heads || call.page_size % BLOCK ||
      call.head_size % 16 || call.head_size > MAX_HEAD_SIZE || !(call.scale > 0))
    return false;
  const bool is_fp8 = call.cache_type == MAGICDEC_E4M3 || call.cache_type == MAGICDEC_E5M2;
  if (call.query_type > MAGICDEC_FLOAT16 || (!is_fp8 && call.query_type != call.cache_type)) return false;
  for (int request = 0; request < call.num_reqs; ++request) {
    const int num_positions = call.query_starts[request + 1] - call.query_starts[request];
    if (num_positions < 0 || num_positions > MAX_POSITIONS) return false;
  }
  return true;
}

}  // namespace
}  // namespace magicdec

extern "C" __attribute__((visibility("default"))) int magicdec_call_size() { return sizeof(MagicdecCall); }

extern "C" __attribute__((visibility("default"))) int magicdec_attend(const MagicdecCall* call) {
  using namespace magicdec;
  if (!fits(*call)) return 1;
  switch (call->cache_type) {
    case MAGICDEC_FLOAT32:
      Attention<float>(*call).run();
      return 0;
    case MAGICDEC_BFLOAT16:
      Attention<Bfloat16>(*call).run();
      return 0;
    case MAGICDEC_FLOAT16:
      Attention<Float16>(*call).run();
      return 0;
    case MAGICDEC_E4M3:
      Attention<E4m3>(*call).run();
      return 0;
    case MAGICDEC_E5M2:
      Attention<E5m2>(*call).run();
      return 0;
  }
  return 1;
}
