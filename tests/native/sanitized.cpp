// SPDX-License-Identifier: Apache-2.0
// The kernel without Python, for the sanitizers: random shapes in buffers without a spare byte, against plain loops
// in float64. Its output is the number of shapes; it ends with 1 where a result is wrong.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "quantised_linear.h"

namespace {

std::mt19937 random_bits(7);

int between(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_bits); }
float normal() { return std::normal_distribution<float>()(random_bits); }

// bfloat16: a float32's first half, rounded.
uint16_t shortened(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
float lengthened(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// fp8 numbers between 2^-2 and 2^2: sign, exponent, and a significand of 3 (E4M3) or 2 bits (E5M2).
uint8_t random_byte(int bits) {
  const int bias = (1 << (6 - bits)) - 1;
  return between(0, 1) << 7 | (bias + between(-2, 1)) << bits | between(0, (1 << bits) - 1);
}
float lengthened(uint8_t x, int bits) {
  const int bias = (1 << (6 - bits)) - 1, exponent = (x & 0x7f) >> bits, significand = x & ((1 << bits) - 1);
  const float size = std::ldexp(1 + significand / static_cast<float>(1 << bits), exponent - bias);
  return x & 0x80 ? -size : size;
}

struct Shape {
  int num_reqs = between(1, 4), num_kv_heads = between(1, 3), group = between(1, 8);
  int head_size = 16 * between(1, 9), page_size = 32 * between(1, 3);
  int window = between(0, 2) ? 0 : between(1, 90);
  float soft_cap = between(0, 1) ? 0.0f : 5.0f;
  bool has_slots = between(0, 1), has_sinks = between(0, 1), is_short = between(0, 1);
  int fp8_bits = between(0, 1) ? 0 : between(2, 3);  // of a significand; 0: no fp8 cache
#if defined(__AMX_BF16__)
  bool is_amx = is_short && head_size % 32 == 0;
#else
  static constexpr bool is_amx = false;
#endif

  // Where a head's page has a number: of keys, and of values behind them.
  int key_at(int place, int d) const {
    return is_amx ? (place / 16 * (head_size / 2) + d / 2) * 32 + place % 16 * 2 + d % 2 : d * page_size + place;
  }
  int value_at(int place, int d) const {
    const int behind = page_size * head_size;
    return behind + (is_amx ? (d / 16 * (page_size / 2) + place / 2) * 32 + d % 16 * 2 + place % 2 : place * head_size + d);
  }
};

// What the tokens of one request weigh; the largest difference to what is expected, by KV head and token.
double weigh(MagicdecCall call, const int32_t* query_starts, int request, const std::vector<double>& expected) {
  const int32_t first = query_starts[request], own_starts[2] = {0, query_starts[request + 1] - first};
  const int count = call.context_lens[request], bytes = call.query_type == MAGICDEC_FLOAT32 ? 4 : 2;
  std::vector<float> weights(expected.size());
  call.query = static_cast<const char*>(call.query) + first * call.query_token_stride * bytes;
  call.query_starts = own_starts;
  call.block_table += request * call.block_table_stride;
  call.context_lens += request;
  call.num_reqs = 1;
  call.output = weights.data();
  call.output_head_stride = count;
  if (magicdec_weigh(&call)) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (size_t i = 0; i < weights.size(); ++i)
    if (const double error = std::abs(weights[i] - expected[i]); !(error <= worst)) worst = error;
  return worst;
}

// One shape; the largest error.
double run(const Shape& s) {
  std::vector<int32_t> starts{0}, contexts, slot_lens;
  int widest = 1, most = 1, width = 1;
  for (int i = 0; i < s.num_reqs; ++i) {
    const int length = between(0, 32);
    contexts.push_back(length + between(0, 200));
    starts.push_back(starts.back() + length);
    slot_lens.push_back(contexts.back() ? between(1, contexts.back()) : 0);
    widest = std::max(widest, (contexts.back() + s.page_size - 1) / s.page_size);
    most = std::max(most, length);
    width = std::max(width, slot_lens.back());
  }
  const int pages = s.num_reqs * widest, heads = s.num_kv_heads * s.group, half = s.page_size * s.head_size;
  std::vector<float> cache(static_cast<size_t>(pages) * s.num_kv_heads * 2 * half);
  std::vector<float> query(static_cast<size_t>(starts.back()) * heads * s.head_size), output(query.size());
  std::vector<float> sinks(heads);
  for (auto* numbers : {&cache, &query, &sinks})
    for (float& x : *numbers) x = normal();
  std::vector<uint8_t> bytes;
  std::vector<uint16_t> short_cache, short_query, short_output(s.is_short ? output.size() : 0);
  if (s.is_short) {
    for (float x : cache) short_cache.push_back(shortened(x));
    for (float x : query) short_query.push_back(shortened(x));
    for (float& x : cache) x = lengthened(shortened(x));
    for (float& x : query) x = lengthened(shortened(x));
    short_cache.shrink_to_fit();
    short_query.shrink_to_fit();
  }
  if (s.fp8_bits)
    for (float& x : cache) {
      bytes.push_back(random_byte(s.fp8_bits));
      x = lengthened(bytes.back(), s.fp8_bits);
    }
  bytes.shrink_to_fit();
  std::vector<int32_t> table(pages);
  for (int i = 0; i < pages; ++i) table[i] = pages - 1 - i;
  std::vector<int32_t> slots(static_cast<size_t>(s.num_reqs) * s.num_kv_heads * width, -1);
  std::vector<uint8_t> is_seen(static_cast<size_t>(s.num_reqs) * most * width);
  for (int i = 0; i < s.num_reqs; ++i) {
    for (int h = 0; h < s.num_kv_heads; ++h)
      for (int j = 0; j < slot_lens[i]; ++j) {
        const int position = between(0, contexts[i] - 1);
        slots[(i * s.num_kv_heads + h) * width + j] =
            table[i * widest + position / s.page_size] * s.page_size + position % s.page_size;
      }
    for (int t = 0; t < most; ++t)
      for (int j = 0; j < width; ++j) is_seen[(i * most + t) * width + j] = j == 0 || between(0, 1);
  }

  MagicdecCall call{};
  call.cache = cache.data();
  if (s.is_short) call.cache = short_cache.data();
  if (s.fp8_bits) call.cache = bytes.data();
  call.page_stride = int64_t{2} * half * s.num_kv_heads;
  call.cache_head_stride = 2 * half;
  call.query = s.is_short ? static_cast<const void*>(short_query.data()) : query.data();
  call.output = s.is_short ? static_cast<void*>(short_output.data()) : output.data();
  call.query_token_stride = call.output_token_stride = heads * s.head_size;
  call.query_head_stride = call.output_head_stride = s.head_size;
  call.query_starts = starts.data();
  if (s.has_slots) {
    call.slots = slots.data();
    call.slots_request_stride = s.num_kv_heads * width;
    call.slots_head_stride = width;
    call.slot_lens = slot_lens.data();
    call.is_seen = is_seen.data();
    call.is_seen_request_stride = most * width;
    call.is_seen_token_stride = width;
  } else {
    call.block_table = table.data();
    call.block_table_stride = widest;
    call.context_lens = contexts.data();
    call.window = s.window;
  }
  call.sinks = s.has_sinks ? sinks.data() : nullptr;
  call.scale = 1 / std::sqrt(static_cast<float>(s.head_size));
  call.soft_cap = s.soft_cap;
  call.value_scale = s.fp8_bits ? 0.5f : 1.0f;
  call.query_type = s.is_short ? MAGICDEC_BFLOAT16 : MAGICDEC_FLOAT32;
  call.cache_type = s.fp8_bits == 3 ? MAGICDEC_E4M3 : s.fp8_bits ? MAGICDEC_E5M2 : call.query_type;
  call.layout = s.is_amx ? MAGICDEC_AMX : MAGICDEC_VEC;
  call.num_reqs = s.num_reqs;
  call.num_heads = heads;
  call.num_kv_heads = s.num_kv_heads;
  call.head_size = s.head_size;
  call.page_size = s.page_size;
  if (magicdec_attend(&call)) return std::numeric_limits<double>::infinity();

  for (size_t i = 0; i < short_output.size(); ++i) output[i] = lengthened(short_output[i]);

  double worst = 0;
  for (int i = 0; i < s.num_reqs; ++i) {
    std::vector<double> weights(static_cast<size_t>(s.num_kv_heads) * contexts[i]);  // of the request's tokens
    for (int token = starts[i]; token < starts[i + 1]; ++token)
      for (int head = 0; head < heads; ++head) {
        const int kv_head = head / s.group, nth = token - starts[i];
        const int position = contexts[i] - (starts[i + 1] - starts[i]) + nth;
        const float* q = &query[(static_cast<size_t>(token) * heads + head) * s.head_size];
        std::vector<double> sums(s.head_size), powers(contexts[i]);
        double total = s.has_sinks ? std::exp(static_cast<double>(sinks[head])) : 0;
        const int count = s.has_slots ? slot_lens[i] : position + 1;
        for (int j = 0; j < count; ++j) {
          if (s.has_slots ? !is_seen[(i * most + nth) * width + j] : s.window && j <= position - s.window) continue;
          const int slot = s.has_slots ? slots[(i * s.num_kv_heads + kv_head) * width + j]
                                       : table[i * widest + j / s.page_size] * s.page_size + j % s.page_size;
          const float* keys = &cache[(static_cast<size_t>(slot / s.page_size) * s.num_kv_heads + kv_head) * 2 * half];
          const int place = slot % s.page_size;
          double logit = 0;
          for (int d = 0; d < s.head_size; ++d) logit += double{q[d]} * keys[s.key_at(place, d)];
          logit *= call.scale;
          if (s.soft_cap > 0) logit = s.soft_cap * std::tanh(logit / s.soft_cap);
          total += std::exp(logit);
          if (!s.has_slots) powers[j] = std::exp(logit);
          for (int d = 0; d < s.head_size; ++d)
            sums[d] += std::exp(logit) * keys[s.value_at(place, d)];
        }
        for (int j = 0; j < contexts[i]; ++j) weights[kv_head * contexts[i] + j] += powers[j] / total;
        for (int d = 0; d < s.head_size; ++d) {
          const float found = output[(static_cast<size_t>(token) * heads + head) * s.head_size + d];
          const double error = std::abs(found - call.value_scale * sums[d] / total);
          if (!(error <= worst)) worst = error == error ? error : std::numeric_limits<double>::infinity();
        }
      }
    if (!s.has_slots && !s.window) worst = std::max(worst, weigh(call, starts.data(), i, weights));
  }
  return worst;
}

// A linear layer with random integers as weights; returns the largest error as a share of its bound.
double multiply() {
  const int bits = between(0, 1) ? 8 : 4, rows = between(1, 11), inputs = between(1, 100), outputs = between(1, 40);
  const int groups = (inputs + 31) / 32, tiles = (outputs + 15) / 16, block = 64 * bits + 64;
  std::vector<uint8_t> packed(static_cast<size_t>(tiles) * groups * block);
  for (auto& byte : packed) byte = static_cast<uint8_t>(between(0, 255));
  for (int i = 0; i < tiles * groups; ++i)
    for (int j = 0; j < 32; ++j) {  // scales, then minima
      const uint16_t number = shortened(j < 16 ? 0.01f : -0.05f);
      std::memcpy(&packed[i * block + 64 * bits + 2 * j], &number, sizeof number);
    }
  const double scale = lengthened(shortened(0.01f)), minimum = lengthened(shortened(-0.05f));
  std::vector<float> input(rows * inputs), output(rows * outputs);
  for (auto& x : input) x = normal();
  const MagicdecLinear call{input.data(), inputs, packed.data(), output.data(), rows, inputs, outputs, bits, 0};
  if (magicdec_multiply(&call)) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (int row = 0; row < rows; ++row)
    for (int out = 0; out < outputs; ++out) {
      double sum = 0, size = 0;
      for (int in = 0; in < inputs; ++in) {
        const int step = in % 32 / 4, lane = out % 16 * 4 + in % 4;
        const uint8_t* from = &packed[(out / 16 * groups + in / 32) * block];
        const int integer = bits == 8 ? from[step * 64 + lane] : from[step / 2 * 64 + lane] >> step % 2 * 4 & 15;
        const double weight = scale * integer + minimum;
        sum += weight * input[row * inputs + in];
        size += std::abs(weight);
      }
      worst = std::max(worst, std::abs(output[row * outputs + out] - sum) / (0.04 * size + 1e-6));
    }
  return worst;
}

}  // namespace

int main() {
#if defined(__AMX_BF16__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILES = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILES)) return 2;
#endif
  constexpr int SHAPES = 40;
  for (int i = 0; i < SHAPES; ++i) {
    const Shape shape;
    if (const double error = run(shape); !(error < (shape.is_short ? 4e-2 : 2e-5))) {
      std::printf("shape %d: wrong by %g\n", i, error);
      return 1;
    }
  }
  for (int i = 0; i < SHAPES; ++i)
    if (const double error = multiply(); !(error < 1)) {
      std::printf("linear layer %d: %g of the largest error allowed\n", i, error);
      return 1;
    }
  std::printf("%d shapes\n", SHAPES);
}
