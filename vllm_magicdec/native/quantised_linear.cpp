// SPDX-License-Identifier: Apache-2.0
// output = input * transposed weights, for a few rows, with weights of 4 or 8 bits.
//
// A draft step waits for its weights, so they are read once, in the order of memory. The activations of each row are
// rounded to integers with a scale per group of 32 inputs, so that the inner loop multiplies integers. A block holds the
// weights of 16 outputs and 32 inputs: integers (4 inputs of every output, then the next 4; with 4 bits, two such sets
// share the bytes), then a scale and a minimum per output in bfloat16. A weight is scale * integer + minimum.

#include "quantised_linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace magicdec {
namespace {

constexpr int GROUP = 32, OUTPUTS = 16;
constexpr int STEP = 4;  // inputs of an output that one instruction multiplies and adds
constexpr int STEPS = GROUP / STEP;
constexpr int VECTORS = OUTPUTS / LANES;
#if defined(__AVX512F__)
constexpr int ROWS = 8;  // computed together, as many as fit the registers
#else
constexpr int ROWS = 4;
#endif

constexpr int64_t groups_of(int64_t in_features) { return (in_features + GROUP - 1) / GROUP; }

template <int BITS>
constexpr int NUMBERS_BYTES = OUTPUTS * GROUP * BITS / 8;
template <int BITS>
constexpr int BLOCK_BYTES = NUMBERS_BYTES<BITS> + 2 * OUTPUTS * 2;

#if defined(__AVX512VNNI__)
template <int BITS>
constexpr int LARGEST_INPUT = 127;
#else
// Pairs of products are added in 16 bits.
template <int BITS>
constexpr int LARGEST_INPUT = BITS == 8 ? 63 : 127;
#endif

// Activations of all rows as integers.
struct Inputs {
  std::vector<int8_t> numbers;  // [rows, groups, GROUP]
  std::vector<float> scales;    // [rows, groups]
  std::vector<float> sums;      // [rows, groups], sums of the integers times the scale
};

template <int BITS, typename T>
void round_inputs(const MagicdecLinear& call, Inputs& inputs) {
  const int64_t groups = groups_of(call.in_features);
  const size_t blocks = call.num_rows * groups;
  if (inputs.scales.size() < blocks) {
    inputs.numbers.resize(blocks * GROUP);
    inputs.scales.resize(blocks);
    inputs.sums.resize(blocks);
  }
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const T* from = static_cast<const T*>(call.input) + row * call.input_stride;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * GROUP, count = std::min<int64_t>(GROUP, call.in_features - first);
      float values[GROUP] = {};
      float most = 0;
      for (int i = 0; i < count; ++i) {
        values[i] = as_float(from[first + i]);
        most = std::max(most, std::fabs(values[i]));
      }
      const float scale = most / LARGEST_INPUT<BITS>, inverse = most > 0 ? LARGEST_INPUT<BITS> / most : 0.0f;
      int8_t* numbers = &inputs.numbers[(row * groups + group) * GROUP];
      int sum = 0;
      for (int i = 0; i < GROUP; ++i) {
        // Adding 1.5 * 2^23 rounds to an integer.
        const int number = static_cast<int>(values[i] * inverse + 12582912.0f - 12582912.0f);
        numbers[i] = static_cast<int8_t>(number);
        sum += number;
      }
      inputs.scales[row * groups + group] = scale;
      inputs.sums[row * groups + group] = scale * static_cast<float>(sum);
    }
  }
}

// LANES * STEP integers of a block.
#if defined(__AVX512F__)
using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes low_halves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return low_halves(_mm512_srli_epi16(x, 4)); }
#elif defined(__AVX2__)
using Bytes = __m256i;
inline Bytes load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes low_halves(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return low_halves(_mm256_srli_epi16(x, 4)); }
#else
using Bytes = uint8_t __attribute__((vector_size(LANES * STEP)));
inline Bytes load_bytes(const uint8_t* from) {
  Bytes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Bytes low_halves(Bytes x) { return x & 15; }
inline Bytes high_halves(Bytes x) { return x >> 4; }
#endif

// Sum over a group of the products of weights and inputs, for LANES outputs.
#if defined(__AVX512VNNI__)
template <int BITS>
struct Sum {
  __m512i total = _mm512_setzero_si512();
  void add(Bytes weights, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof four);
    total = _mm512_dpbusd_epi32(total, weights, _mm512_set1_epi32(four));
  }
  Floats value() const { return (Floats)_mm512_cvtepi32_ps(total); }
};
#elif defined(__AVX512F__)
inline __m512i products(Bytes weights, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  return _mm512_maddubs_epi16(weights, _mm512_set1_epi32(four));
}
inline __m512i in_pairs(__m512i x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
template <int BITS>
struct Sum {
  __m512i total = _mm512_setzero_si512();
  void add(Bytes weights, const int8_t* inputs) {
    const __m512i more = products(weights, inputs);
    // With 4 bits the sum of a group fits 16 bits.
    total = BITS == 4 ? _mm512_add_epi16(total, more) : _mm512_add_epi32(total, in_pairs(more));
    asm("" : "+v"(total));  // or the compiler keeps all terms, and adds them in pairs
  }
  Floats value() const { return (Floats)_mm512_cvtepi32_ps(BITS == 4 ? in_pairs(total) : total); }
};
#elif defined(__AVX2__)
inline __m256i products(Bytes weights, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  return _mm256_maddubs_epi16(weights, _mm256_set1_epi32(four));
}
inline __m256i in_pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
template <int BITS>
struct Sum {
  __m256i total = _mm256_setzero_si256();
  void add(Bytes weights, const int8_t* inputs) {
    const __m256i more = products(weights, inputs);
    // With 4 bits the sum of a group fits 16 bits.
    total = BITS == 4 ? _mm256_add_epi16(total, more) : _mm256_add_epi32(total, in_pairs(more));
    asm("" : "+x"(total));  // or the compiler keeps all terms, and adds them in pairs
  }
  Floats value() const { return (Floats)_mm256_cvtepi32_ps(BITS == 4 ? in_pairs(total) : total); }
};
#else
template <int BITS>
struct Sum {
  Ints total = {};
  void add(Bytes weights, const int8_t* inputs) {
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < STEP; ++i) total[lane] += weights[lane * STEP + i] * inputs[i];
  }
  Floats value() const { return __builtin_convertvector(total, Floats); }
};
#endif

// Bytes between the block that is multiplied and the one that is prefetched into the second cache. The processor's
// own prefetching ends at every page: without this, 4 rows take 1.4 to 1.6 times as long (Emerald Rapids).
constexpr int64_t AHEAD = 4096;

// One vector of a tile's outputs at a time: with both the compiler keeps the inputs in more registers than there are.
template <int BITS, int NUM_ROWS>
void multiply_tile(const uint8_t* block, const Inputs& inputs, int64_t row, int64_t groups, float* sums) {
  const int8_t* numbers[NUM_ROWS];
  for (int r = 0; r < NUM_ROWS; ++r) numbers[r] = &inputs.numbers[(row + r) * groups * GROUP];
  const float *input_scales = &inputs.scales[row * groups], *input_sums = &inputs.sums[row * groups];
  for (int v = 0; v < VECTORS; ++v) {
    Floats total[NUM_ROWS] = {};
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* own = block + group * BLOCK_BYTES<BITS>;
      for (int64_t byte = 0; byte < BLOCK_BYTES<BITS>; byte += 64) __builtin_prefetch(own + AHEAD + byte, 0, 2);
      Sum<BITS> sum[NUM_ROWS];
      const auto add = [&](Bytes weights, int step) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) sum[r].add(weights, numbers[r] + group * GROUP + step * STEP);
      };
      const uint8_t* from = own + v * LANES * STEP;
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; step += 8 / BITS, from += OUTPUTS * STEP) {
        const Bytes weights = load_bytes(from);
        if constexpr (BITS == 4) {
          add(low_halves(weights), step);
          add(high_halves(weights), step + 1);
        } else {
          add(weights, step);
        }
      }
      const auto* scales = reinterpret_cast<const Bfloat16*>(own + NUMBERS_BYTES<BITS>) + v * LANES;
      const Floats scale = load(scales), minimum = load(scales + OUTPUTS);
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; ++r) {
        const int64_t at = r * groups + group;
        total[r] += sum[r].value() * input_scales[at] * scale + minimum * input_sums[at];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r) store(sums + r * OUTPUTS + v * LANES, total[r]);
  }
}

template <int BITS>
void multiply_tile(const uint8_t* block, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t groups,
                   float* sums) {
  switch (num_rows) {
    case 1: return multiply_tile<BITS, 1>(block, inputs, row, groups, sums);
    case 2: return multiply_tile<BITS, 2>(block, inputs, row, groups, sums);
    case 3: return multiply_tile<BITS, 3>(block, inputs, row, groups, sums);
    case 4: return multiply_tile<BITS, 4>(block, inputs, row, groups, sums);
#if defined(__AVX512F__)
    case 5: return multiply_tile<BITS, 5>(block, inputs, row, groups, sums);
    case 6: return multiply_tile<BITS, 6>(block, inputs, row, groups, sums);
    case 7: return multiply_tile<BITS, 7>(block, inputs, row, groups, sums);
    case 8: return multiply_tile<BITS, 8>(block, inputs, row, groups, sums);
#endif
  }
}

template <int BITS, typename T>
void multiply(const MagicdecLinear& call) {
  thread_local Inputs kept;
  Inputs& inputs = kept;
  round_inputs<BITS, T>(call, inputs);
  const int64_t groups = groups_of(call.in_features);
  const int64_t tiles = (call.out_features + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const uint8_t* block = call.weights + tile * groups * BLOCK_BYTES<BITS>;
    const int64_t first = tile * OUTPUTS, count = std::min<int64_t>(OUTPUTS, call.out_features - first);
    alignas(64) float sums[ROWS * OUTPUTS];
    for (int64_t row = 0; row < call.num_rows; row += ROWS) {
      const int64_t num_rows = std::min<int64_t>(ROWS, call.num_rows - row);
      multiply_tile<BITS>(block, inputs, row, num_rows, groups, sums);
      for (int64_t r = 0; r < num_rows; ++r) {
        T* to = static_cast<T*>(call.output) + (row + r) * call.out_features + first;
        for (int64_t i = 0; i < count; ++i) assign(to[i], sums[r * OUTPUTS + i]);
      }
    }
  }
}

template <typename T>
int multiply(const MagicdecLinear& call) {
  switch (call.bits) {
    case 4: multiply<4, T>(call); return 0;
    case 8: multiply<8, T>(call); return 0;
  }
  return 1;
}

}  // namespace
}  // namespace magicdec

extern "C" __attribute__((visibility("default"))) int magicdec_multiply(const MagicdecLinear* call) {
  switch (call->type) {
    case MAGICDEC_FLOAT32: return magicdec::multiply<float>(*call);
    case MAGICDEC_BFLOAT16: return magicdec::multiply<magicdec::Bfloat16>(*call);
    case MAGICDEC_FLOAT16: return magicdec::multiply<magicdec::Float16>(*call);
  }
  return 1;
}
