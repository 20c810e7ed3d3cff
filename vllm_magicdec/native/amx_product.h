// SPDX-License-Identifier: Apache-2.0
// The product of AMX: up to 64 rows, in tiles of registers, times tiles that lie in memory as AMX takes them.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace magicdec {

constexpr int AMX_ROWS = 16;     // most rows of a left factor's tile
constexpr int AMX_COLUMNS = 16;  // of a right factor's: tokens of keys, dimensions of values
constexpr int AMX_DEPTH = 32;    // numbers that one product sums over
constexpr int AMX_NUMBERS = AMX_DEPTH * AMX_COLUMNS;  // of a right factor's tile

// The rows of a product in as few tiles as can be, of one height; behind the last row there may be others that nobody
// looks at.
struct AmxRows {
  explicit AmxRows(int rows) : tiles((rows + AMX_ROWS - 1) / AMX_ROWS), height((rows + tiles - 1) / tiles) {}
  int tiles, height;
};

// A thread's registers of tiles, as long as it needs them: results are 0 to 3, left factors 4 and 5, right ones 6 and 7.
class AmxRegisters {
 public:
  void release() {
    if (height_ > 0) _tile_release();
    height_ = 0;
  }

  void configure(int height) {
    if (height == height_) return;
    height_ = height;
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {0, 0, 0, 0, 0, 0, AMX_DEPTH / 2, AMX_DEPTH / 2};
    } shapes;
    std::fill_n(shapes.rows, 6, static_cast<uint8_t>(height));
    asm volatile("" : : "r"(&shapes) : "memory");  // GCC 12 believes that 8 of its bytes are read
    _tile_loadconfig(&shapes);
  }

 private:
  int height_ = 0;
};

// Sanitizers do not see what the instructions for tiles read and write.
#if defined(__SANITIZE_ADDRESS__)
extern "C" void* __asan_region_is_poisoned(void* first, size_t size);
inline void check_tile(const void* first, int64_t row_bytes, int rows) {
  for (int row = 0; row < rows; ++row) {
    const char* at = static_cast<const char*>(first) + row * row_bytes;
    if (__asan_region_is_poisoned(const_cast<char*>(at), 64) != nullptr) __builtin_trap();
  }
}
#else
inline void check_tile(const void*, int64_t, int) {}
#endif

// sums[rows][2 * AMX_COLUMNS] (+)= left[rows][steps * AMX_DEPTH] * the tiles right(column, step).
template <bool ADDS, typename Right, typename Upcoming>
inline void multiply_tiles(AmxRows rows, const Bfloat16* left, int64_t left_pitch, Right right, int steps, float* sums,
                           int64_t sums_pitch, Upcoming& upcoming) {
  const int64_t left_bytes = left_pitch * sizeof(Bfloat16), sums_bytes = sums_pitch * sizeof(float);
  asm volatile("" ::: "memory");  // GCC does not know that a tile's load reads what was written before
  for (int tile = 0; tile < rows.tiles; tile += 2) {
    const bool has_lower = tile + 1 < rows.tiles;
    const Bfloat16* upper = left + tile * rows.height * left_pitch;
    const Bfloat16* lower = upper + rows.height * left_pitch;
    float* upper_sums = sums + tile * rows.height * sums_pitch;
    float* lower_sums = upper_sums + rows.height * sums_pitch;
    for (const float* from : {upper_sums, upper_sums + AMX_COLUMNS}) {
      check_tile(from, sums_bytes, rows.height);
      if (has_lower) check_tile(from + rows.height * sums_pitch, sums_bytes, rows.height);
    }
    if constexpr (ADDS) {
      _tile_loadd(0, upper_sums, sums_bytes);
      _tile_loadd(1, upper_sums + AMX_COLUMNS, sums_bytes);
      if (has_lower) {
        _tile_loadd(2, lower_sums, sums_bytes);
        _tile_loadd(3, lower_sums + AMX_COLUMNS, sums_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int step = 0; step < steps; ++step) {
      check_tile(upper + step * AMX_DEPTH, left_bytes, rows.height);
      if (has_lower) check_tile(lower + step * AMX_DEPTH, left_bytes, rows.height);
      for (int column : {0, 1}) check_tile(right(column, step), 64, AMX_DEPTH / 2);
      _tile_loadd(4, upper + step * AMX_DEPTH, left_bytes);
      _tile_loadd(6, right(0, step), 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right(1, step), 64);
      _tile_dpbf16ps(1, 4, 7);
      if (has_lower) {
        _tile_loadd(5, lower + step * AMX_DEPTH, left_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      upcoming.ask();
    }
    _tile_stored(0, upper_sums, sums_bytes);
    _tile_stored(1, upper_sums + AMX_COLUMNS, sums_bytes);
    if (has_lower) {
      _tile_stored(2, lower_sums, sums_bytes);
      _tile_stored(3, lower_sums + AMX_COLUMNS, sums_bytes);
    }
  }
}

}  // namespace magicdec
