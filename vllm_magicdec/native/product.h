// SPDX-License-Identifier: Apache-2.0
// The one product that attention is made of: a few rows, kept in registers, times numbers of the KV cache, which
// are read where they lie and converted in registers on the way.
#pragma once

#include <type_traits>

#include "cache.h"
#include "vectors.h"

namespace magicdec {

constexpr int VECTORS = 2;  // columns of a tile of results, in vectors

// Sums of a row's columns, in vectors in the order of the columns.
struct InOrder {
  template <int Vectors>
  static void load_sums(const float* from, Floats (&sums)[Vectors]) {
    for (int v = 0; v < Vectors; ++v) sums[v] = load(from + v * LANES);
  }
  template <int Vectors>
  static void store_sums(float* to, const Floats (&sums)[Vectors]) {
    for (int v = 0; v < Vectors; ++v) store(to + v * LANES, sums[v]);
  }
};

// How the cache's numbers enter a product: `Left` is what the other factor's numbers are stored as, `DEPTH` how many
// neighbours of the dimension that is summed over go into one instruction. Sums lie in vectors as `load_columns` puts
// their columns there.
template <typename T>
struct Factor : InOrder {
  using Left = float;
  static constexpr int DEPTH = 1;
  using Right = Floats;
  using Broadcast = Floats;

  static Broadcast broadcast(const Left* from) { return all(*from); }
  static Floats add_product(Floats sum, Broadcast left, Right right) { return sum + left * right; }

  template <int Vectors>
  static void load_columns(const T* const (&rows)[DEPTH], Right (&right)[Vectors]) {
    for (int v = 0; v < Vectors; ++v) right[v] = load(rows[0] + v * LANES);
  }
};

#if defined(__AVX512BF16__)
// vdpbf16ps adds the products of two pairs to each sum, so two rows of the cache are interleaved on the way.
template <>
struct Factor<Bfloat16> : InOrder {
  using Left = Bfloat16;
  static constexpr int DEPTH = 2;
  using Right = __m512bh;
  using Broadcast = __m512bh;

  static Broadcast broadcast(const Left* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Floats add_product(Floats sum, Broadcast left, Right right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, left, right);
  }

  static void load_columns(const Bfloat16* const (&rows)[2], Right (&right)[1]) {
    const __m512i low = widened(rows[0]), high = widened(rows[1]);
    right[0] = (__m512bh)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  static void load_columns(const Bfloat16* const (&rows)[2], Right (&right)[2]) {
    __m512i first = _mm512_loadu_si512(rows[0]), second = _mm512_loadu_si512(rows[1]);
    asm("" : "+v"(first), "+v"(second));  // else GCC reads both twice
    right[0] = (__m512bh)_mm512_permutex2var_epi16(first, interleaved(0), second);
    right[1] = (__m512bh)_mm512_permutex2var_epi16(first, interleaved(16), second);
  }

 private:
  static __m512i widened(const Bfloat16* row) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
  }
  // Columns `from` to `from + 15`, each of the first row (0 to 31) and of the second (32 to 63).
  static __m512i interleaved(int from) {
    const __m512i columns = _mm512_add_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(from));
    return _mm512_or_si512(columns, _mm512_slli_epi32(_mm512_add_epi32(columns, _mm512_set1_epi32(32)), 16));
  }
};
#else
// Two vectors are read as one of pairs, and become float32 by an instruction each: the even columns and the odd ones.
template <>
struct Factor<Bfloat16> : Factor<float> {
  static void load_columns(const Bfloat16* const (&rows)[1], Right (&right)[1]) { right[0] = load(rows[0]); }
  static void load_columns(const Bfloat16* const (&rows)[1], Right (&right)[2]) {
    Words pairs;
    std::memcpy(&pairs, rows[0], sizeof pairs);
    right[0] = (Floats)(pairs << 16);
    right[1] = (Floats)(pairs & 0xffff0000u);
  }

  static void load_sums(const float* from, Floats (&sums)[1]) { sums[0] = load(from); }
  static void load_sums(const float* from, Floats (&sums)[2]) {
    const Floats first = load(from), second = load(from + LANES);
    sums[0] = every_second<0>(first, second, Lanes());
    sums[1] = every_second<1>(first, second, Lanes());
  }
  static void store_sums(float* to, const Floats (&sums)[1]) { store(to, sums[0]); }
  static void store_sums(float* to, const Floats (&sums)[2]) {
    store(to, in_turns<0>(sums[0], sums[1], Lanes()));
    store(to + LANES, in_turns<LANES / 2>(sums[0], sums[1], Lanes()));
  }
};
#endif

// Rows of the cache's factor at equal distances: the keys of a block, one row for each dimension of the head.
template <typename T>
struct Strided {
  const T* first;
  int64_t stride;
  const T* operator()(int index) const { return first + index * stride; }
};

// Rows anywhere: the values of chosen tokens.
template <typename T>
struct Listed {
  const T* const* rows;
  int column;
  const T* operator()(int index) const { return rows[index] + column; }
};

// What is read next is asked for while this is read, a row of BLOCK columns with every row: memory is slow to begin and
// quick then. It is asked into the second cache, because the first one waits for far fewer lines at a time.

template <typename T>
inline void ask_for(const T* row) {
  constexpr int SECOND_CACHE = 2;
  const char* line = reinterpret_cast<const char*>(row);
  for (int byte = 0; byte < BLOCK * static_cast<int>(sizeof(T)); byte += 64)
    __builtin_prefetch(line + byte, 0, SECOND_CACHE);
}

struct Nothing {
  void operator()(int) const {}
};

// A block's values, while its keys are read.
template <typename T>
struct UpcomingValues {
  const T* block;
  void operator()(int at) const { ask_for(block + at * BLOCK); }
};

// Another block's keys, while a block's are read.
template <typename T>
struct NextKeys {
  const T* block;
  int64_t row_stride;
  void operator()(int at) const { ask_for(block + at * row_stride); }
};

// The next tile's keys, while this one's values are read: of each block the rows from `row` on.
template <typename T>
struct UpcomingKeys {
  const T* const* blocks;
  int64_t row_stride;
  int row;
  void operator()(int at) const { ask_for(blocks[at / BLOCK] + (row + at % BLOCK) * row_stride); }
};

// The next tile's keys and values, a few rows of BLOCK columns before every STEPS steps of this one's products.
template <typename T>
class Evenly {
 public:
  static constexpr int STEPS = sizeof(T) < 4 ? 16 : 8;  // with AVX2 and one group of rows 8 lines are asked for at a time

  // Of each block its keys and its values, `head_size` rows of both.
  Evenly(const T* const* keys, const T* const* values, int num_blocks, int head_size, int64_t key_stride)
      : keys_(keys), values_(values), runs_left_(2 * num_blocks), head_size_(head_size), key_stride_(key_stride) {}

  // `rows` in so many `steps`.
  void set_pace(int rows, int steps) { pace_ = (STEPS * rows << FRACTION) / steps + 1; }

  void ask() {
    if (left_of_run_ == 0 && !begin_run()) return;
    due_ += pace_;
    const int count = std::min(due_ >> FRACTION, left_of_run_);
    due_ -= count << FRACTION;
    const T* row = row_;  // here, in registers
    const int64_t stride = stride_;
#pragma GCC unroll 4
    for (int n = 0; n < count; ++n, row += stride) ask_for(row);
    row_ = row;
    left_of_run_ -= count;
  }

 private:
  static constexpr int FRACTION = 8;  // bits

  // A block's keys, or its values.
  bool begin_run() {
    if (runs_left_ == 0) return false;
    row_ = is_at_keys_ ? *keys_++ : *values_++;
    stride_ = is_at_keys_ ? key_stride_ : BLOCK;
    is_at_keys_ = !is_at_keys_;
    left_of_run_ = head_size_;
    --runs_left_;
    return true;
  }

  const T *const *keys_, *const *values_;
  int runs_left_;
  const int head_size_;
  const int64_t key_stride_;
  int pace_ = 0, due_ = 0, left_of_run_ = 0;
  bool is_at_keys_ = true;
  const T* row_ = nullptr;
  int64_t stride_ = 0;
};

// In a product: between its steps.
template <typename T>
struct BetweenSteps {
  Evenly<T>& asking;
  void operator()(int) const {}
};

// sums[Rows][Vectors * LANES] (+)= left[Rows][depth] * right[depth][Vectors * LANES].
//
// What is added to is added last: in one sum over all of a long context a token would lose its last digits.
//
// `PITCH`: from one row of `left` to the next, known here so that addresses need no registers. `depth` is a multiple
// of `Factor<T>::DEPTH`.
template <typename T, int Rows, int Vectors, int PITCH, bool ADDS, typename RightRows, typename Upcoming>
inline void multiply(const typename Factor<T>::Left* left, RightRows right_rows, int depth, float* sums,
                     int64_t sums_pitch, Upcoming upcoming) {
  using F = Factor<T>;
  // A few rows of pairs would run through what is in the first cache, and wait there for what was asked into the second:
  // their sums stay in memory, which makes them slower and the reading faster (one row and two on a Zen 4: 18 GB/s
  // instead of 16, and 16.5 instead of 15; four on a Zen 5: 28 instead of 21).
  constexpr bool PACED = Rows <= 4 && F::DEPTH > 1;
  // Few rows leave few sums, and each waits for the last instruction on it: so more sums, of every n-th step.
  constexpr int CHAINS = Rows == 1 ? 4 : Rows <= 3 || PACED ? 2 : 1;
  Floats sum[CHAINS][Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; ++c) sum[c][r][v] = Floats{};
  }
  const auto step = [&](int at, int chain) __attribute__((always_inline)) {
    const T* rows[F::DEPTH];
#pragma GCC unroll 2
    for (int i = 0; i < F::DEPTH; ++i) rows[i] = right_rows(at + i);
    typename F::Right right[Vectors];
    F::load_columns(rows, right);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const auto factor = F::broadcast(left + r * PITCH + at);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        sum[chain][r][v] = F::add_product(sum[chain][r][v], factor, right[v]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < F::DEPTH; ++i) upcoming(at + i);
  };
  int at = 0;
  if constexpr (std::is_same_v<Upcoming, BetweenSteps<T>>) {
    static_assert(Evenly<T>::STEPS % (CHAINS * F::DEPTH) == 0);
    while (at + Evenly<T>::STEPS <= depth) {
      upcoming.asking.ask();
      const int end = at + Evenly<T>::STEPS;
#pragma GCC unroll 1
      for (; at < end; at += CHAINS * F::DEPTH) {
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; ++c) step(at + c * F::DEPTH, c);
      }
    }
  }
  for (; at + CHAINS * F::DEPTH <= depth; at += CHAINS * F::DEPTH) {
    if constexpr (PACED) {
#pragma GCC unroll 1
      for (int c = 0; c < CHAINS; ++c) step(at + c * F::DEPTH, c);
    } else {
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; ++c) step(at + c * F::DEPTH, c);
    }
  }
  if constexpr (CHAINS > 1)
    for (; at < depth; at += F::DEPTH) step(at, 0);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 4
      for (int c = 1; c < CHAINS; ++c) sum[0][r][v] += sum[c][r][v];
    if constexpr (ADDS) {
      Floats before[Vectors];
      F::load_sums(sums + r * sums_pitch, before);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[0][r][v] += before[v];
    }
    F::store_sums(sums + r * sums_pitch, sum[0][r]);
  }
}

}  // namespace magicdec
