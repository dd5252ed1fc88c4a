// Vectors of eight rows: AVX2, FMA and F16C; with AVX-VNNI its dot product.
#pragma once

#include <immintrin.h>

#include "plan.h"

namespace colibri {
namespace {

struct Avx2 {
  static constexpr int lanes = 8;
  static constexpr int rows = 4;
  static constexpr int together = 1;
  static constexpr bool tiles = false;
  using Codes = __m256i;
  using Table = __m256i;
  using I32 = __m256i;
  using F32 = __m256;

#ifdef __AVXVNNI__
  static constexpr bool split_bytes = false;
  static constexpr bool short_sums = false;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) { return _mm256_dpbusd_avx_epi32(sum, codes, four(x)); }
#else
  // vpmaddubsw adds two products in 16 bits, where only codes of 7 bits cannot saturate.
  static constexpr bool split_bytes = true;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) { return widened(sum, _mm256_maddubs_epi16(codes, four(x))); }

  // Sixteen columns of codes of five bits: 4 * 2 * 31 * 128 fits 16 bits, and one widening serves them all.
  static constexpr bool short_sums = true;
  static I32 dot_short(I32 sum, const Codes (&codes)[4][1], const int8_t* x) {
    const __m256i a = _mm256_maddubs_epi16(codes[0][0], four(x)), b = _mm256_maddubs_epi16(codes[1][0], four(x + 4));
    const __m256i c = _mm256_maddubs_epi16(codes[2][0], four(x + 8)), d = _mm256_maddubs_epi16(codes[3][0], four(x + 12));
    return widened(sum, _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d)));
  }
#endif

  static Codes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Table table(const uint8_t* entries) { return _mm256_broadcastsi128_si256(sixteen(entries)); }
  static Codes low(Table table, Codes codes) { return _mm256_shuffle_epi8(table, low_nibbles(codes)); }
  static Codes high(Table table, Codes codes) { return _mm256_shuffle_epi8(table, high_nibbles(codes)); }
  static Codes low_nibbles(Codes codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
  static Codes high_nibbles(Codes codes) { return low_nibbles(_mm256_srli_epi16(codes, 4)); }
  static Codes low_bits(Codes codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(127)); }
  static Codes top_bit(Codes codes) { return _mm256_and_si256(_mm256_srli_epi16(codes, 7), _mm256_set1_epi8(1)); }

  static I32 broadcast(int32_t value) { return _mm256_set1_epi32(value); }
  static I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
  static I32 multiply(I32 a, I32 b) { return _mm256_mullo_epi32(a, b); }
  template <int Bits>
  static I32 shift_left(I32 a) { return _mm256_slli_epi32(a, Bits); }
  static I32 zeros(const uint8_t* p, int part) { return _mm256_cvtepu8_epi32(eight(p + 8 * part)); }

  static F32 zero() { return _mm256_setzero_ps(); }
  static F32 spread(float value) { return _mm256_set1_ps(value); }
  static F32 sum(F32 a, F32 b) { return _mm256_add_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
  static F32 to_float(I32 a) { return _mm256_cvtepi32_ps(a); }
  static F32 floats(const uint8_t* p, int part) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + 8 * part); }
  static void store(float* p, F32 a) { _mm256_storeu_ps(p, a); }

  static F32 scales(int32_t kind, const uint8_t* p, int part) {
    switch (kind) {
      case COLIBRI_SCALE_BF16: return shifted(_mm256_cvtepu16_epi32(sixteen(p + 16 * part)), 16);
      case COLIBRI_SCALE_F16: return _mm256_cvtph_ps(sixteen(p + 16 * part));
      case COLIBRI_SCALE_F32: return floats(p, part);
      case COLIBRI_SCALE_E8M0: return shifted(_mm256_cvtepu8_epi32(eight(p + 8 * part)), 23);
      case COLIBRI_SCALE_E4M3: return halves(eight(p + 8 * part), 7, _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
      default: return spread(1);
    }
  }

  // The bits of a minifloat moved to where fp16 has them; the difference of biases is part of `unit`.
  struct Minifloat {
    int shift;
    __m128i mask;
    F32 unit;
    explicit Minifloat(const Packed& p)
        : shift(10 - p.matrix->mantissa),
          mask(_mm_set1_epi16(static_cast<int16_t>(0x8000 | (0x7f << shift)))),
          unit(spread(p.unit * p.minifloat_unit)) {}
    F32 decode(const uint8_t* p) const { return halves(eight(p), shift, mask); }
  };

 private:
  static I32 widened(I32 sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static F32 shifted(__m256i bits, int by) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, by)); }
  static F32 halves(__m128i bytes, int shift, __m128i mask) {  // sign-extended: the sign is already the top bit
    const __m128i wide = _mm_cvtepi8_epi16(bytes);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_sll_epi16(wide, _mm_cvtsi32_si128(shift)), mask));
  }
  static __m256i four(const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
  }
};

}  // namespace
}  // namespace colibri
