// Intel's intrinsics on any machine, for tests: from SIMDe, plus those it lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <simde/x86/gfni.h>

#include <cmath>
#include <cstdint>
#include <cstring>

inline simde__m512 _mm512_cvtph_ps(simde__m256i a) {
  simde__m256 halves[2] = {simde_mm256_cvtph_ps(simde_mm256_castsi256_si128(a)),
                           simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(a, 1))};
  simde__m512 result;
  std::memcpy(&result, halves, sizeof result);
  return result;
}
template <class To, class From, class ToVector, class FromVector>
ToVector convert_each(FromVector a) {
  constexpr int kCount = sizeof(ToVector) / sizeof(To);
  From from[kCount];
  To to[kCount];
  std::memcpy(from, &a, sizeof from);
  for (int i = 0; i < kCount; i++) to[i] = static_cast<To>(from[i]);
  ToVector result;
  std::memcpy(&result, to, sizeof result);
  return result;
}
inline simde__m512i _mm512_cvtepi8_epi32(simde__m128i a) { return convert_each<std::int32_t, std::int8_t, simde__m512i>(a); }
inline simde__m512i _mm512_cvtepu8_epi32(simde__m128i a) { return convert_each<std::int32_t, std::uint8_t, simde__m512i>(a); }
inline simde__m512i _mm512_cvtepu16_epi32(simde__m256i a) { return convert_each<std::int32_t, std::uint16_t, simde__m512i>(a); }
inline simde__m256i _mm512_cvtepi32_epi16(simde__m512i a) { return convert_each<std::uint16_t, std::uint32_t, simde__m256i>(a); }
inline simde__m512 _mm512_cvtepi32_ps(simde__m512i a) { return convert_each<float, std::int32_t, simde__m512>(a); }

inline simde__m256i _mm256_dpwssd_avx_epi32(simde__m256i sum, simde__m256i a, simde__m256i b) {
  return simde_mm256_dpwssd_epi32(sum, a, b);
}
inline simde__m256i _mm256_dpbusd_avx_epi32(simde__m256i sum, simde__m256i a, simde__m256i b) {
  return simde_mm256_dpbusd_epi32(sum, a, b);
}

// AVX512-FP16 in plain loops.
#define __AVX512FP16__ 1
using Half = __fp16;
using __m512h = simde__m512i;
using __mmask16 = std::uint16_t;
using __mmask64 = std::uint64_t;
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
inline __m512h _mm512_castsi512_ph(simde__m512i a) { return a; }
inline simde__m512i _mm512_castph_si512(__m512h a) { return a; }
template <class Function>
__m512h each_half(__m512h a, __m512h b, Function function) {
  Half left[32], right[32];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 32; i++) left[i] = function(left[i], right[i]);
  std::memcpy(&a, left, sizeof left);
  return a;
}
inline __m512h _mm512_mul_ph(__m512h a, __m512h b) {
  return each_half(a, b, [](Half x, Half y) { return static_cast<Half>(x * y); });
}
inline __m512h _mm512_sub_ph(__m512h a, __m512h b) {
  return each_half(a, b, [](Half x, Half y) { return static_cast<Half>(x - y); });
}
inline simde__m256i _mm512_cvtps_ph(simde__m512 a, int) { return convert_each<Half, float, simde__m256i>(a); }
inline simde__m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* p) {
  unsigned char bytes[64] = {};
  for (int i = 0; i < 64; i++)
    if (mask >> i & 1) bytes[i] = static_cast<const unsigned char*>(p)[i];
  simde__m512i result;
  std::memcpy(&result, bytes, sizeof result);
  return result;
}
inline simde__m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* p) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) bytes |= std::uint64_t{15} << 4 * i;
  return _mm512_maskz_loadu_epi8(bytes, p);
}
inline int _mm512_reduce_max_epi32(simde__m512i a) {
  int numbers[16], top = INT32_MIN;
  std::memcpy(numbers, &a, sizeof numbers);
  for (int number : numbers) top = number > top ? number : top;
  return top;
}
inline float _mm512_reduce_max_ps(simde__m512 a) {
  float numbers[16], top = -INFINITY;
  std::memcpy(numbers, &a, sizeof numbers);
  for (float number : numbers) top = number > top ? number : top;
  return top;
}

// AMX tiles in plain loops.
struct EmulatedTile {
  unsigned char lines[16][64];
};
inline thread_local EmulatedTile emulated_tiles[8];
inline thread_local int emulated_lines[8], emulated_bytes[8];

inline void _tile_loadconfig(const void* config) {
  const unsigned char* bytes = static_cast<const unsigned char*>(config);
  for (int i = 0; i < 8; i++) {
    std::uint16_t width;
    std::memcpy(&width, bytes + 16 + 2 * i, 2);
    emulated_bytes[i] = width;
    emulated_lines[i] = bytes[48 + i];
  }
  if (bytes[0] != 1) __builtin_trap();
}
inline void _tile_release() { std::memset(emulated_lines, 0, sizeof emulated_lines); }
inline void _tile_zero(int t) { std::memset(&emulated_tiles[t], 0, sizeof(EmulatedTile)); }
inline void _tile_loadd(int t, const void* base, long stride) {
  for (int i = 0; i < emulated_lines[t]; i++)
    std::memcpy(emulated_tiles[t].lines[i], static_cast<const char*>(base) + i * stride, emulated_bytes[t]);
}
inline void _tile_stored(int t, void* base, long stride) {
  for (int i = 0; i < emulated_lines[t]; i++)
    std::memcpy(static_cast<char*>(base) + i * stride, emulated_tiles[t].lines[i], emulated_bytes[t]);
}
// The instruction takes numbers below 2^-126 for zero.
inline float flushed(float number) { return std::fabs(number) < 0x1p-126f ? 0 : number; }
inline void _tile_dpbf16ps(int c, int a, int b) {
  const auto half = [](const EmulatedTile& tile, int line, int i) {
    std::uint16_t bits;
    std::memcpy(&bits, tile.lines[line] + 2 * i, 2);
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return flushed(value);
  };
  for (int m = 0; m < emulated_lines[c]; m++)
    for (int n = 0; n < emulated_bytes[c] / 4; n++) {
      float sum;
      std::memcpy(&sum, emulated_tiles[c].lines[m] + 4 * n, 4);
      for (int k = 0; k < emulated_bytes[a] / 2; k++)
        sum = flushed(sum + flushed(half(emulated_tiles[a], m, k) * half(emulated_tiles[b], k / 2, 2 * n + k % 2)));
      std::memcpy(emulated_tiles[c].lines[m] + 4 * n, &sum, 4);
    }
}
