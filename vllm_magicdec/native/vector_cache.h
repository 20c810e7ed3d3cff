// SPDX-License-Identifier: Apache-2.0
// vLLM's layouts `vec` and `vec16`: a head's keys in a page are [head_size, page_size], its values
// [page_size, head_size].
#pragma once

#include <unistd.h>

#include <type_traits>

#include "cache.h"
#include "product.h"

namespace magicdec {

// Of a tile's keys and values. Few rows wait for memory: what is read should fit the first cache (heads of 128 in float32
// fill one of 32 KiB, larger ones do not fit: a tile has no less than a block). Of more rows each group reads the tile again:
// in float32 with narrow vectors it and the next one should fit the second cache, in which a KV head's pages, at distances of
// powers of two, share few of the sets. Many rows compute, and longer tiles mean fewer passes of the softmax.
constexpr int FEW_ROWS_BYTES = 16384, SOME_ROWS_BYTES = 65536;
constexpr long LARGE_FIRST_CACHE = 49152;  // bytes; it has room for twice as much of few rows: fewer passes there, too

inline int few_rows_bytes() {
#if defined(MAGICDEC_FEW_ROWS_BYTES)
  return MAGICDEC_FEW_ROWS_BYTES;
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
  static const long first_cache = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  return first_cache >= LARGE_FIRST_CACHE ? 2 * FEW_ROWS_BYTES : FEW_ROWS_BYTES;
#else
  return FEW_ROWS_BYTES;
#endif
}

template <int N>
using Count = std::integral_constant<int, N>;

template <typename T>
class VectorCache {
 public:
  using Left = typename Factor<T>::Left;
  static constexpr int MAX_ROWS = magicdec::MAX_ROWS;
  static constexpr int SPARE_ROWS = 0;
  static constexpr int64_t READING = 4;
  static constexpr float NUMBER = magicdec::UNIT<T>;
  static constexpr int WEIGHTS_STEP = LANES;

  struct Tile {
    int num_tokens;
    int num_blocks;
    const T* keys[TILE];          // of each block, its first token's
    int firsts[TILE + 1];         // the tile's tokens that are of each block begin here
    uint8_t places[TILE];         // of each token in its block
    const T* values[TILE + 1];    // of each token; one more where the number of tokens is odd
    const T* block_values[TILE];  // of each block of pages

    void reserve(int) {}
  };

  static int tile_length(int rows, int head_size) {
    if (rows >= MANY_ROWS) return TILE;
    const int token_bytes = 2 * head_size * static_cast<int>(sizeof(T));
    const int bytes = rows < FEW_ROWS ? few_rows_bytes() : SOME_ROWS_BYTES;
    return std::clamp(bytes / token_bytes / BLOCK * BLOCK, BLOCK, TILE);
  }

  // What is asked for while a tile is computed with, by each group of its rows in turn; nothing before `begin`.
  class Upcoming {
   public:
    // `next` may be null; all `rows` of the tile, so many of them `together`. No tile before the first has asked for it.
    Upcoming(const HeadPages<T>& head, const Tile&, const Tile* next, int /* together */, int rows, bool is_first_tile)
        : next_(next),
          evenly_(next == nullptr ? nullptr : next->keys, next == nullptr ? nullptr : next->block_values,
                  next == nullptr ? 0 : next->num_blocks, head.head_size(), head.page_size()),
          rows_(rows),
          is_first_tile_(is_first_tile) {}

    void begin(Range group) {
      is_first_ = group.first == 0;
      // A block's two times `head_size` rows, and as many steps for each of its `BLOCK / COLUMNS` products.
      evenly_.set_pace(group.last - group.first, rows_ * BLOCK / COLUMNS);
    }

    void ask() {}  // between the products of a tile

   private:
    friend VectorCache;
    const Tile* const next_;
    Evenly<T> evenly_;
    const int rows_;
    const bool is_first_tile_;
    bool is_first_ = false;
  };

  // As few groups of rows as fit the registers: equal ones where those all but fill them, else full ones and a rest. With
  // fewer rows each sum is waited for (8 + 8 rows of pairs on a Zen 5 take 1.2 times what 12 + 4 do).
  static int rows_together(int rows) {
    const int groups = (rows + MAX_ROWS - 1) / MAX_ROWS, equal = (rows + groups - 1) / groups;
    return groups == 1 || equal >= MAX_ROWS - 1 ? equal : MAX_ROWS;
  }

  static void lay_out(const HeadPages<T>& head, Range tokens, Tile& tile) {
    tile.num_tokens = tokens.last - tokens.first;
    tile.num_blocks = 0;
    if (head.has_slots())
      lay_out_slots(head, tokens.first, tile);
    else
      lay_out_pages(head, tokens.first, tile);
    tile.firsts[tile.num_blocks] = tile.num_tokens;
    // A tile that asks for this one's keys may have more blocks.
    for (int b = tile.num_blocks; b < TILE / BLOCK; ++b) tile.keys[b] = tile.keys[0];
    // A pair that has no second token: weighed by nothing, and a number.
    tile.values[tile.num_tokens] = tile.values[tile.num_tokens - 1];
  }

  // scores[rows][SCORES_PITCH] = query[rows][QUERY_PITCH] * the tile's keys.
  static void score(const HeadPages<T>& head, const Tile& tile, const Left* query, int rows, float* scores,
                    Upcoming& upcoming) {
    by_rows(rows, [&](auto count) {
      constexpr int ROWS = decltype(count)::value;
      if (asks_evenly(head) && !(upcoming.is_first_ && upcoming.is_first_tile_))
        score_rows<ROWS, Asks::EVENLY>(head, tile, query, scores, upcoming);
      else if (upcoming.is_first_)
        score_rows<ROWS, Asks::FIRST>(head, tile, query, scores, upcoming);
      else
        score_rows<ROWS, Asks::NOTHING>(head, tile, query, scores, upcoming);
    });
  }

  // sums[rows][head_size] += weights[rows][SCORES_PITCH] * the tile's values.
  static void add_values(const HeadPages<T>& head, const Tile& tile, const Left* weights, int rows, float* sums,
                         Upcoming& upcoming) {
    by_rows(rows, [&](auto count) {
      constexpr int ROWS = decltype(count)::value;
      if (asks_evenly(head))
        add_rows<ROWS, Asks::EVENLY>(head, tile, weights, sums, upcoming);
      else if (upcoming.is_first_ && upcoming.next_ != nullptr)
        add_rows<ROWS, Asks::FIRST>(head, tile, weights, sums, upcoming);
      else
        add_rows<ROWS, Asks::NOTHING>(head, tile, weights, sums, upcoming);
    });
  }

  static void release() {}

 private:
  static constexpr int COLUMNS = VECTORS * LANES;     // of a product
  static constexpr bool IS_NARROW = COLUMNS < BLOCK;  // a block's keys are several products (AVX2, portable)
  // From so many rows on they are not few, or many. Float32 has half as much to compute for what is read. Measured with AVX2,
  // one core of a Zen 3 and heads of 64 and 128; the portable vectors have the same, unmeasured.
  static constexpr bool IS_NARROW_FLOAT32 = IS_NARROW && sizeof(T) == 4;
  static constexpr int FEW_ROWS = IS_NARROW_FLOAT32 ? 14 : 9;
  static constexpr int MANY_ROWS = IS_NARROW_FLOAT32 ? 32 : FEW_ROWS;

  // How a group of rows asks for what is read next.
  enum class Asks {
    NOTHING,
    FIRST,   // for values while keys are read, and for the next tile's keys while values are
    EVENLY,  // see `Evenly`
  };

  // If a block's keys are several products (AVX2, portable), one that asks for what all of them need wants it sooner than
  // memory has it, and leaves memory nothing to do while the others run, and the other groups of rows. One core of a Zen 3
  // attends 1.05 to 1.6 times as fast so, with AVX2. With AVX-512 they are one product; there it was not measured.
  static bool asks_evenly(const HeadPages<T>& head) { return IS_NARROW && !head.has_slots(); }

  static void lay_out_pages(const HeadPages<T>& head, int start, Tile& tile) {
    for (int first = 0; first < tile.num_tokens; first += BLOCK) {
      const auto place = head.place(start + first);
      const T* values = head.values(place) + place.in_page * head.head_size();
      tile.keys[tile.num_blocks] = head.keys(place) + place.in_page;
      tile.block_values[tile.num_blocks] = values;
      tile.firsts[tile.num_blocks++] = first;
      for (int i = 0; i < std::min(BLOCK, tile.num_tokens - first); ++i) {
        tile.places[first + i] = static_cast<uint8_t>(i);
        tile.values[first + i] = values + i * head.head_size();
      }
    }
  }

  // Neighbours in the list that are of one block share its products: a token's key is spread over all lines of it.
  static void lay_out_slots(const HeadPages<T>& head, int start, Tile& tile) {
    const T* block = nullptr;  // of the latest token, its keys
    for (int t = 0; t < tile.num_tokens; ++t) {
      const auto place = head.place(start + t);
      const int in_block = place.in_page % BLOCK;
      const T* keys = head.keys(place) + place.in_page - in_block;
      if (block != keys) {
        block = tile.keys[tile.num_blocks] = keys;
        tile.block_values[tile.num_blocks] = head.values(place) + (place.in_page - in_block) * head.head_size();
        tile.firsts[tile.num_blocks++] = t;
      }
      tile.places[t] = static_cast<uint8_t>(in_block);
      tile.values[t] = head.values(place) + place.in_page * head.head_size();
    }
  }

  static bool is_block(const uint8_t* places, int count) {
    for (int i = 0; i < count; ++i)
      if (places[i] != i) return false;
    return count == BLOCK;
  }

  // Whether a product's columns from `column` on are of a chosen token.
  static bool has_chosen(const uint8_t* places, int count, int column) {
    return std::any_of(places, places + count, [&](int place) { return place / COLUMNS == column / COLUMNS; });
  }

  template <typename Action>
  static void by_rows(int rows, Action action) {
    const auto act = [&](auto count) {
      if constexpr (decltype(count)::value <= MAX_ROWS) action(count);
    };
    switch (rows) {
      case 1: return act(Count<1>());
      case 2: return act(Count<2>());
      case 3: return act(Count<3>());
      case 4: return act(Count<4>());
      case 5: return act(Count<5>());
      case 6: return act(Count<6>());
      case 7: return act(Count<7>());
      case 8: return act(Count<8>());
      case 9: return act(Count<9>());
      case 10: return act(Count<10>());
      case 11: return act(Count<11>());
      case 12: return act(Count<12>());
    }
  }

  // Flat: one call in the loops of a product, and its sums are registers no more.
  template <int Rows, Asks ASKS>
  [[gnu::flatten, gnu::noinline]] static void score_rows(const HeadPages<T>& head, const Tile& tile, const Left* query,
                                                         float* scores, Upcoming& upcoming) {
    constexpr bool IS_FIRST = ASKS == Asks::FIRST;
    for (int b = 0; b < tile.num_blocks; ++b) {
      const int first = tile.firsts[b], count = tile.firsts[b + 1] - first;
      // Chosen tokens are of many blocks: of each the values that are read, and while its keys are, the next one's.
      if (IS_FIRST && head.has_slots())
        for (int t = first; t < first + count; ++t)
          for (int column = 0; column < head.head_size(); column += BLOCK) ask_for(tile.values[t] + column);
      const bool in_place = !head.has_slots() || is_block(tile.places + first, count);  // a last block has room behind it
      alignas(64) float apart[Rows * BLOCK];
      float* to = in_place ? scores + first : apart;
      const int pitch = in_place ? SCORES_PITCH : BLOCK;
      bool has_asked = false;  // the first product does, of which chosen tokens may leave out some
      for (int column = 0; column < BLOCK; column += COLUMNS) {
        if (!in_place && !has_chosen(tile.places + first, count, column)) continue;
        const Strided<T> keys{tile.keys[b] + column, head.page_size()};
        if constexpr (ASKS == Asks::EVENLY)
          multiply<T, Rows, VECTORS, QUERY_PITCH, false>(query, keys, head.head_size(), to + column, pitch,
                                                         BetweenSteps<T>{upcoming.evenly_});
        else if (IS_FIRST && !has_asked && head.has_slots())
          multiply<T, Rows, VECTORS, QUERY_PITCH, false>(
              query, keys, head.head_size(), to + column, pitch,
              NextKeys<T>{tile.keys[std::min(b + 1, tile.num_blocks - 1)], head.page_size()});
        else if (IS_FIRST && !has_asked)
          multiply<T, Rows, VECTORS, QUERY_PITCH, false>(query, keys, head.head_size(), to + column, pitch,
                                                         UpcomingValues<T>{tile.block_values[b]});
        else
          multiply<T, Rows, VECTORS, QUERY_PITCH, false>(query, keys, head.head_size(), to + column, pitch,
                                                         Nothing());
        has_asked = true;
      }
      if (in_place) continue;
      for (int r = 0; r < Rows; ++r)
        for (int t = first; t < first + count; ++t)
          scores[r * SCORES_PITCH + t] = apart[r * BLOCK + tile.places[t]];
    }
  }

  template <int Rows, Asks ASKS>
  [[gnu::flatten, gnu::noinline]] static void add_rows(const HeadPages<T>& head, const Tile& tile, const Left* weights,
                                                       float* sums, Upcoming& upcoming) {
    constexpr int DEPTH = Factor<T>::DEPTH;
    const int depth = (tile.num_tokens + DEPTH - 1) / DEPTH * DEPTH, head_size = head.head_size();
    int column = 0;
    for (; column + COLUMNS <= head_size; column += COLUMNS) {
      const Listed<T> values{tile.values, column};
      if constexpr (ASKS == Asks::EVENLY)
        multiply<T, Rows, VECTORS, SCORES_PITCH, true>(weights, values, depth, sums + column, head_size,
                                                       BetweenSteps<T>{upcoming.evenly_});
      else if (ASKS == Asks::FIRST && column % BLOCK == 0)
        multiply<T, Rows, VECTORS, SCORES_PITCH, true>(weights, values, depth, sums + column, head_size,
                                                       UpcomingKeys<T>{upcoming.next_->keys, head.page_size(), column});
      else
        multiply<T, Rows, VECTORS, SCORES_PITCH, true>(weights, values, depth, sums + column, head_size, Nothing());
    }
    for (; column < head_size; column += LANES)
      multiply<T, Rows, 1, SCORES_PITCH, true>(weights, Listed<T>{tile.values, column}, depth, sums + column,
                                               head_size, Nothing());
  }
};

}  // namespace magicdec
