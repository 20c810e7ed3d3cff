// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 as wide as the instruction set that this file is compiled for, and how numbers of a KV
// cache become them. Written with the compiler's vector extensions; intrinsics only for what those lack.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace magicdec {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MAX_ROWS = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int MAX_ROWS = 6;  // 12 of 16
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int MAX_ROWS = 12;  // 24 of 32
#else
constexpr int LANES = 4;
constexpr int MAX_ROWS = 6;
#endif

using Floats = float __attribute__((vector_size(LANES * 4)));
using Ints = int32_t __attribute__((vector_size(LANES * 4)));
using Words = uint32_t __attribute__((vector_size(LANES * 4)));
using Halfwords = uint16_t __attribute__((vector_size(LANES * 2)));

struct Bfloat16 {
  uint16_t bits;
};
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using Float16 = __fp16;  // the same numbers; C++ has no other name for them there
#else
using Float16 = _Float16;
#endif
// Of an fp8 cache: sign, exponent and significand of 1, 4, 3 and of 1, 5, 2 bits.
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// What a number that `load` returns stands for, in units of it.
template <typename T>
constexpr float UNIT = 1.0f;
template <>
constexpr float UNIT<E4m3> = 256.0f;  // float16's smallest exponent is so much smaller

inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const Bfloat16* from) {
  // GCC 12 takes a conversion of vectors to pieces.
#if defined(__AVX512F__)
  const Words wide = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  const Words wide = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Halfwords bits;
  std::memcpy(&bits, from, sizeof bits);
  const Words wide = __builtin_convertvector(bits, Words);
#endif
  return (Floats)(wide << 16);
}

// Bits of float16.
inline Floats from_float16(Halfwords bits) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)bits);
#else
  Floats x;
  for (int i = 0; i < LANES; ++i) {
    const uint16_t own = bits[i];
    Float16 number;
    std::memcpy(&number, &own, sizeof number);
    x[i] = static_cast<float>(number);
  }
  return x;
#endif
}

inline Floats load(const Float16* from) {
  Halfwords bits;
  std::memcpy(&bits, from, sizeof bits);
  return from_float16(bits);
}

// Bytes, each with its highest bit in all of the upper byte.
inline Halfwords widened(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Halfwords)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Halfwords)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Halfwords bits;
  for (int i = 0; i < LANES; ++i) bits[i] = static_cast<uint16_t>(static_cast<int8_t>(from[i]));
  return bits;
#endif
}

// It is float16's upper byte.
inline Floats load(const E5m2* from) { return from_float16(widened(&from->bits) << 8); }

// Under another exponent it is float16 as well, but for its one NaN, which would be 480.
inline Floats load(const E4m3* from) {
  const Halfwords bits = widened(&from->bits);
  const auto is_nan = (bits & 0x7f) == 0x7f;
  return from_float16(((bits << 7) & 0xbf80) | ((Halfwords)is_nan & 0x7fff));
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

using Lanes = std::make_integer_sequence<int, LANES>;

// Of x's and y's numbers, one after the other, every second from the `FIRST` on.
template <int FIRST, int... I>
inline Floats every_second(Floats x, Floats y, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, y, (FIRST + 2 * I)...);
}

// One of x and one of y in turns, from the `FIRST` of each on.
template <int FIRST, int... I>
inline Floats in_turns(Floats x, Floats y, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, y, (FIRST + I / 2 + I % 2 * LANES)...);
}

inline float as_float(float x) { return x; }
inline float as_float(Float16 x) { return static_cast<float>(x); }
inline float as_float(Bfloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void assign(float& to, float x) { to = x; }
inline void assign(Float16& to, float x) { to = static_cast<Float16>(x); }
inline void assign(Bfloat16& to, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

// GCC 12 does not make one instruction of a comparison and a choice.
inline Floats larger(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
  float most = x[0];
  for (int i = 1; i < LANES; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
#endif
}

// 2^x for x <= 0 within 3e-7 of itself; 2^-126 for all below, float32's smallest number of full precision.
inline Floats exp2_of_negative(Floats x) {
  // Adding 1.5 * 2^23 rounds to whole numbers, and leaves them in the lowest bits.
  const Floats shift = all(12582912.0f);
  const Floats clamped = larger(x, all(-126.0f));
  const Floats shifted = clamped + shift;
  const Floats rest = clamped - (shifted - shift);  // in [-0.5, 0.5]
  // The polynomial of degree 5 that is nearest to 2^rest there, relatively.
  Floats power = all(1.326472668e-03f);
  power = power * rest + all(9.671512677e-03f);
  power = power * rest + all(5.550733745e-02f);
  power = power * rest + all(2.402224208e-01f);
  power = power * rest + all(6.931469776e-01f);
  power = power * rest + all(1.0f);
  return (Floats)((Ints)power + ((Ints)shifted << 23));
}

// tanh within 2e-7, absolutely.
inline Floats tanh_of(Floats x) {
  constexpr float TWO_LOG2_E = 2.8853900817779268f;
  const Floats size = larger(x, -x);
  const Floats decay = exp2_of_negative(-TWO_LOG2_E * size);
  const Floats result = (1.0f - decay) / (1.0f + decay);
  return x < 0.0f ? -result : result;
}

}  // namespace magicdec
