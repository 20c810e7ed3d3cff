// SPDX-License-Identifier: Apache-2.0
// vLLM's layout `amx`: keys and values lie as the right factors of AMX's products, tiles of 16 rows of 64 bytes (32 of a
// cache of 8 bits), in which two neighbours of the dimension that is summed over lie side by side. A head's keys in a
// page are [page_size / 16, head_size / 2, 16 tokens, 2], its values [head_size / 16, page_size / 2, 16 dimensions, 2].
//
// A product of tiles is far quicker than memory brings the next one, so even one row goes this way.
#pragma once

#include <cmath>
#include <type_traits>

#include "amx_product.h"
#include "cache.h"

namespace magicdec {

// How numbers of 8 bits become bfloat16, which holds each of them: as integers, because products take a bfloat16 that is
// subnormal for zero, and that is what shifting alone would make of their own subnormal ones.
template <typename T>
struct Widening;
template <>
struct Widening<E4m3> {
  static constexpr int SIGNIFICAND = 3, BIAS = 7, FIRST_SPECIAL = 0x7f;
  static constexpr uint16_t SPECIAL[] = {0x7fc0};  // no number
};
template <>
struct Widening<E5m2> {
  static constexpr int SIGNIFICAND = 2, BIAS = 15, FIRST_SPECIAL = 0x7c;
  static constexpr uint16_t SPECIAL[] = {0x7f80, 0x7fc0, 0x7fc0, 0x7fc0};  // the first is infinite
};

// By the lowest 5 bits without a sign: subnormal numbers, which are the first, and special ones, which are the last.
template <typename T>
struct Exceptions {
  alignas(64) uint16_t bits[32] = {};
  Exceptions() {
    using W = Widening<T>;
    for (int i = 0; i < 1 << W::SIGNIFICAND; ++i) {
      Bfloat16 number;
      assign(number, std::ldexp(static_cast<float>(i), 1 - W::BIAS - W::SIGNIFICAND));
      bits[i] = number.bits;
    }
    for (int i = W::FIRST_SPECIAL; i < 0x80; ++i) bits[i % 32] = W::SPECIAL[i - W::FIRST_SPECIAL];
  }
};

// A row of a tile: 16 pairs of neighbours, as bfloat16.
inline __m512i load_pairs(const Bfloat16* from) { return _mm512_loadu_si512(from); }
template <typename T>
inline __m512i load_pairs(const T* from) {
  using W = Widening<T>;
  static const Exceptions<T> exceptions;
  constexpr int FIRST_NORMAL = 1 << W::SIGNIFICAND;
  const auto all_words = [](int word) { return _mm512_set1_epi16(static_cast<short>(word)); };
  const __m512i signed_bits = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i bits = _mm512_and_si512(signed_bits, all_words(0x7f));
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(bits, 7 - W::SIGNIFICAND), all_words((127 - W::BIAS) << 7));
  // Below the first normal number differences are negative, and so larger than all others without a sign.
  const __mmask32 is_exception = _mm512_cmpge_epu16_mask(_mm512_sub_epi16(bits, all_words(FIRST_NORMAL)),
                                                         all_words(W::FIRST_SPECIAL - FIRST_NORMAL));
  const __m512i size =
      _mm512_mask_permutexvar_epi16(normal, is_exception, bits, _mm512_load_si512(exceptions.bits));
  constexpr int SIGN_OF_FIRST = 0xe4;  // by the third's bits the first's, else the second's
  return _mm512_ternarylogic_epi32(signed_bits, size, all_words(0x8000 - 0x10000), SIGN_OF_FIRST);
}

// T: bfloat16, which is multiplied where it lies, or of 8 bits.
template <typename T>
class AmxCache {
 public:
  using Left = Bfloat16;
  static constexpr int MAX_ROWS = 4 * AMX_ROWS;
  static constexpr int SPARE_ROWS = AMX_ROWS - 1;
  static constexpr int WEIGHTS_STEP = AMX_DEPTH;
  static constexpr float NUMBER = 1;
  static constexpr int64_t READING = 64;

  struct Tile {
    int start, num_tokens;
    // Where neighbours of the tile are neighbours in the cache as well: there; else null.
    const T* keys[TILE / AMX_COLUMNS];
    const T* values[TILE / BLOCK];
    // As tiles, what cannot be multiplied where it lies: keys of two groups at a time, values of blocks.
    Numbers<Bfloat16> own_keys, own_values;

    void reserve(int head_size) {
      if (own_keys.size() < static_cast<size_t>(BLOCK) * head_size) own_keys.resize(BLOCK * head_size);
      if (own_values.size() < static_cast<size_t>(TILE) * head_size) own_values.resize(TILE * head_size);
    }
    int num_blocks() const { return (num_tokens + BLOCK - 1) / BLOCK; }
  };

  // What is read of the next tile, asked for bit by bit while this one is computed with: memory is as slow as that.
  class Upcoming {
   public:
    // `next` may be null; of all rows of the tile so many `together`, the first of which ask for it.
    Upcoming(const HeadPages<T>& head, const Tile& tile, const Tile* next, int together, int rows, bool /* is_first_tile */) {
      if (next == nullptr) return;
      const int depth = head.head_size() / AMX_DEPTH;
      for (int b = 0; b < next->num_blocks(); ++b) {
        for (int group : {2 * b, 2 * b + 1})
          if (next->keys[group] != nullptr)
            for (int i = 0; i < depth; ++i) tiles_[num_tiles_++] = next->keys[group] + i * AMX_NUMBERS;
        if (next->values[b] != nullptr)
          for (int i = 0; i < 2 * depth; ++i) tiles_[num_tiles_++] = next->values[b] + i * values_stride(head);
      }
      const int first_rows = std::min(together, rows);
      const int passes = (AmxRows(first_rows).tiles + 1) / 2 + (IN_PLACE ? 0 : 2);
      const int turns = 2 * depth * tile.num_blocks() * passes + first_rows;
      pieces_a_turn_ = (static_cast<int64_t>(num_tiles_) * PIECES << FRACTION) / turns + 1;
    }

    // Before the products of each group of rows.
    void begin(Range group) { is_first_ = group.first == 0; }

    bool is_first() const { return is_first_; }  // no other rows had this tile yet

    // At each step of a product, once for each row between the two, and for each tile that is widened.
    void ask() {
      due_ += pieces_a_turn_;
      for (const int64_t end = std::min<int64_t>(num_tiles_ * PIECES, due_ >> FRACTION); asked_ < end; ++asked_) {
        const char* piece = reinterpret_cast<const char*>(tiles_[asked_ / PIECES]) + asked_ % PIECES * PIECE_BYTES;
#pragma GCC unroll 4
        for (int byte = 0; byte < PIECE_BYTES; byte += 64) __builtin_prefetch(piece + byte, 0, 2);
      }
    }

   private:
    static constexpr int PIECES = 4;  // of a tile
    static constexpr int PIECE_BYTES = AMX_NUMBERS * sizeof(T) / PIECES;
    static constexpr int FRACTION = 16;  // bits
    const T* tiles_[2 * TILE / BLOCK * 2 * MAX_HEAD_SIZE / AMX_DEPTH];
    int num_tiles_ = 0;
    int64_t pieces_a_turn_ = 0, due_ = 0, asked_ = 0;
    bool is_first_ = false;
  };

  static int tile_length(int, int) { return TILE; }

  static void lay_out(const HeadPages<T>& head, Range tokens, Tile& tile) {
    tile.start = tokens.first;
    tile.num_tokens = tokens.last - tokens.first;
    for (int b = 0; b < tile.num_blocks(); ++b) {
      const int token = tile.start + b * BLOCK;
      const auto place = head.place(token);
      for (int half : {0, 1}) {
        const int first = token + half * AMX_COLUMNS;
        const T*& keys = tile.keys[2 * b + half];
        // What lies behind a context's end is multiplied, and not looked at.
        if (!head.has_slots())
          keys = head.keys(place) + (place.in_page + half * AMX_COLUMNS) * int64_t{head.head_size()};
        else if (are_neighbours(head, {first, first + AMX_COLUMNS}, tokens.last))
          keys = head.keys(head.place(first)) + head.place(first).in_page * int64_t{head.head_size()};
        else
          keys = nullptr;
      }
      // Of values it is not even multiplied: nothing times what is no number is none.
      const bool in_place = are_neighbours(head, {token, token + BLOCK}, tokens.last);
      tile.values[b] = in_place ? head.values(place) + place.in_page * AMX_COLUMNS : nullptr;
    }
  }

  // Whole tiles, but for the last of a request's rows.
  static int rows_together(int rows) { return std::min(rows, MAX_ROWS); }

  // scores[rows][SCORES_PITCH] = query[rows][QUERY_PITCH] * the tile's keys.
  static void score(const HeadPages<T>& head, Tile& tile, const Left* query, int rows, float* scores,
                    Upcoming& upcoming) {
    const AmxRows in_tiles(rows);
    registers().configure(in_tiles.height);
    for (int b = 0; b < tile.num_blocks(); ++b) {
      const Bfloat16* const groups[2] = {keys_of(head, tile, 2 * b, upcoming), keys_of(head, tile, 2 * b + 1, upcoming)};
      const auto keys = [&](int column, int step) { return groups[column] + step * AMX_NUMBERS; };
      multiply_tiles<false>(in_tiles, query, QUERY_PITCH, keys, head.head_size() / AMX_DEPTH, scores + b * BLOCK,
                            SCORES_PITCH, upcoming);
    }
  }

  // sums[rows][head_size] += weights[rows][SCORES_PITCH] * the tile's values.
  static void add_values(const HeadPages<T>& head, Tile& tile, const Left* weights, int rows, float* sums,
                         Upcoming& upcoming) {
    if (upcoming.is_first()) gather_values(head, tile);
    for (int pair = 0; pair < head.head_size() / AMX_DEPTH; ++pair) {
      alignas(64) Bfloat16 widened[IN_PLACE ? 1 : TILE / BLOCK][2][IN_PLACE ? 1 : AMX_NUMBERS];
      const Bfloat16* tiles[TILE / BLOCK][2];
      for (int b = 0; b < tile.num_blocks(); ++b)
        for (int column : {0, 1})
          tiles[b][column] =
              values_of(head, tile, b, 2 * pair + column, IN_PLACE ? nullptr : widened[b][column], upcoming);
      const auto values = [&](int column, int block) { return tiles[block][column]; };
      multiply_tiles<true>(AmxRows(rows), weights, SCORES_PITCH, values, tile.num_blocks(), sums + pair * AMX_DEPTH,
                           head.head_size(), upcoming);
    }
  }

  // Whoever uses tiles after this thread configures them anew, as vLLM and oneDNN do.
  static void release() { registers().release(); }

 private:
  static constexpr bool IN_PLACE = std::is_same_v<T, Bfloat16>;
  using Place = typename HeadPages<T>::Place;

  static AmxRegisters& registers() {
    thread_local AmxRegisters registers;
    return registers;
  }

  static int64_t values_stride(const HeadPages<T>& head) { return int64_t{head.page_size()} * AMX_COLUMNS; }

  // Whether tokens, all before `end`, lie in the cache one after the other from a multiple of their number on.
  static bool are_neighbours(const HeadPages<T>& head, Range tokens, int end) {
    if (tokens.last > end) return false;
    if (!head.has_slots()) return true;
    const Place first = head.place(tokens.first);
    if (first.in_page % (tokens.last - tokens.first)) return false;
    for (int token = tokens.first + 1; token < tokens.last; ++token) {
      const Place place = head.place(token);
      if (place.page != first.page || place.in_page != first.in_page + token - tokens.first) return false;
    }
    return true;
  }

  // Of 16 tokens, as tiles: there, or in a place of the thread's own until the next but one are asked for.
  static const Bfloat16* keys_of(const HeadPages<T>& head, Tile& tile, int group, Upcoming& upcoming) {
    const int size = AMX_COLUMNS * head.head_size();
    const T* keys = tile.keys[group];
    Bfloat16* own = &tile.own_keys[group % 2 * size];
    const int first = tile.start + group * AMX_COLUMNS;
    const Range tokens = {first, std::min(first + AMX_COLUMNS, tile.start + tile.num_tokens)};
    if constexpr (IN_PLACE) {
      if (keys != nullptr) return keys;
      gather_keys(head, tokens, own);
    } else {
      alignas(64) T chosen[AMX_COLUMNS * MAX_HEAD_SIZE];
      if (keys == nullptr) gather_keys(head, tokens, chosen);
      for (int at = 0; at < size; at += AMX_NUMBERS)
        widen_tile((keys == nullptr ? chosen : keys) + at, own + at, upcoming);
    }
    return own;
  }

  static void widen_tile(const T* from, Bfloat16* to, Upcoming& upcoming) {
#pragma GCC unroll 4
    for (int at = 0; at < AMX_NUMBERS; at += AMX_DEPTH) _mm512_storeu_si512(to + at, load_pairs(from + at));
    upcoming.ask();
  }

  // A token's key is spread over all lines of its 16 tokens, a pair in each.
  static void gather_keys(const HeadPages<T>& head, Range tokens, T* to) {
    const auto key_of = [&](int token) {
      const Place place = head.place(token);
      const int in_group = place.in_page % AMX_COLUMNS;
      return head.keys(place) + (place.in_page - in_group) * int64_t{head.head_size()} + 2 * in_group;
    };
    for (int token = tokens.first; token < tokens.last; ++token) {
      const T *key = key_of(token), *next = key_of(std::min(token + 1, tokens.last - 1));
      for (int at = 0; at < AMX_COLUMNS * head.head_size(); at += AMX_DEPTH) {
        __builtin_prefetch(next + at);
        std::memcpy(to + at, key + at, 2 * sizeof(T));
      }
      to += 2;
    }
  }

  // Values that are no neighbours in the cache, as tiles, [blocks, head_size / 16].
  static void gather_values(const HeadPages<T>& head, Tile& tile) {
    const int end = tile.start + tile.num_tokens;
    for (int b = 0; b < tile.num_blocks(); ++b) {
      if (tile.values[b] != nullptr) continue;
      Bfloat16* own = &tile.own_values[b * BLOCK * head.head_size()];
      for (int token = tile.start + b * BLOCK, pair = 0; pair < BLOCK / 2; token += 2, ++pair)
        gather_pair(head, token, end, own + pair * AMX_DEPTH);
    }
  }

  // A block's values, of 16 dimensions.
  static const Bfloat16* values_of(const HeadPages<T>& head, const Tile& tile, int block, int dimensions,
                                   Bfloat16* widened, Upcoming& upcoming) {
    if (tile.values[block] == nullptr)
      return &tile.own_values[block * BLOCK * head.head_size() + dimensions * AMX_NUMBERS];
    const T* values = tile.values[block] + dimensions * values_stride(head);
    if constexpr (IN_PLACE) {
      return values;
    } else {
      widen_tile(values, widened, upcoming);
      return widened;
    }
  }

  // Two tokens' values beside each other; zero, which is a number, of what is not before `end`.
  static void gather_pair(const HeadPages<T>& head, int token, int end, Bfloat16* to) {
    const auto lines_of = [&](int token) {
      const Place place = head.place(token);
      return head.values(place) + place.in_page / 2 * AMX_DEPTH;
    };
    // Each line has a pair of neighbours of which one was chosen: where it is, in bits.
    const auto bits_of = [&](int token) { return _mm_cvtsi32_si128(head.place(token).in_page % 2 * 16); };
    const bool has_first = token < end, has_second = token + 1 < end;
    const T* first = has_first ? lines_of(token) : nullptr;
    const T* second = has_second ? lines_of(token + 1) : nullptr;
    const T* later[2] = {lines_of(std::min(token + 4, end - 1)), lines_of(std::min(token + 5, end - 1))};
    const __m128i first_bits = has_first ? bits_of(token) : _mm_setzero_si128();
    const __m128i second_bits = has_second ? bits_of(token + 1) : _mm_setzero_si128();
    const __m512i lower_halves = _mm512_set1_epi32(0xffff);
    for (int64_t at = 0; at < head.head_size() / AMX_COLUMNS * values_stride(head); at += values_stride(head)) {
      __m512i low = _mm512_setzero_si512(), high = low;
      if (has_first) low = _mm512_and_si512(_mm512_srl_epi32(load_pairs(first + at), first_bits), lower_halves);
      if (has_second) high = _mm512_slli_epi32(_mm512_srl_epi32(load_pairs(second + at), second_bits), 16);
      for (const T* lines : later) __builtin_prefetch(lines + at);
      _mm512_storeu_si512(to, _mm512_or_si512(low, high));
      to += AMX_NUMBERS;
    }
  }
};

}  // namespace magicdec
