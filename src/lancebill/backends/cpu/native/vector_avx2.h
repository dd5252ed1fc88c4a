// Vectors of sixteen rows in two registers: AVX2, FMA and F16C, and the dot product of AVX-VNNI where compiled for it.
#pragma once

#include <immintrin.h>

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

struct Avx2 {
  static constexpr int lanes = 16;
  // A sum takes two registers, and as many for its 16-bit sums.
  static constexpr int blocks = 4;
  static constexpr int blocks_at_once(int sums) { return sums <= 2 ? 2 : 1; }
  static constexpr bool tiles = false;
  static constexpr bool plain_nibbles = true;
  static constexpr bool lane_inputs = false;
  static constexpr bool signed_codes = false;
  static constexpr bool biased_sums = false;
  static constexpr bool whole_bytes = false;
  struct Codes {
    __m256i part[2];
  };
  struct I32 {
    __m256i part[2];
  };
  struct F32 {
    __m256 part[2];
  };
  using Table = __m256i;

#ifdef __AVXVNNI__
  static constexpr int rows = 2;  // more rows would need too many registers with two-plane inputs
  static constexpr bool prefetch_twice = true;
  static constexpr bool split_bytes = false;
  static constexpr bool short_sums = false;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) {
    const __m256i inputs = broadcast4(x);
    return each<I32>([&](int i) { return _mm256_dpbusd_avx_epi32(sum.part[i], codes.part[i], inputs); });
  }
#else
  static constexpr int rows = 3;
  static constexpr bool prefetch_twice = false;
  // vpmaddubsw adds two products in 16 bits, which is exact for codes of at most seven bits.
  static constexpr bool split_bytes = true;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) {
    const __m256i inputs = broadcast4(x);
    return each<I32>([&](int i) { return widened(sum.part[i], _mm256_maddubs_epi16(codes.part[i], inputs), 1); });
  }

  static constexpr bool short_sums = true;
  static Codes short_products(Codes codes, const int8_t* x) {
    const __m256i inputs = broadcast4(x);
    return each<Codes>([&](int i) { return _mm256_maddubs_epi16(codes.part[i], inputs); });
  }
  static Codes add_shorts(Codes a, Codes b) {
    return each<Codes>([&](int i) { return keep_in_register(_mm256_add_epi16(a.part[i], b.part[i])); });
  }
  static I32 add_widened(I32 sum, Codes shorts, int16_t factor) {
    return each<I32>([&](int i) { return widened(sum.part[i], shorts.part[i], factor); });
  }
#endif

  static Codes load(const uint8_t* p) {
    return each<Codes>([&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i); });
  }
  static Table table(const uint8_t* entries) { return _mm256_broadcastsi128_si256(load16(entries)); }
  static Codes low(Table table, Codes codes) { return look_up(table, low_nibbles(codes)); }
  static Codes high(Table table, Codes codes) { return look_up(table, high_nibbles(codes)); }
  static Codes low_nibbles(Codes codes) {
    return each<Codes>([&](int i) { return low_nibble(codes.part[i]); });
  }
  static Codes high_nibbles(Codes codes) {
    return each<Codes>([&](int i) { return low_nibble(_mm256_srli_epi16(codes.part[i], 4)); });
  }
  static Codes low_six(Codes codes) {
    return each<Codes>([&](int i) { return _mm256_and_si256(codes.part[i], _mm256_set1_epi8(63)); });
  }
  static Codes top_pairs(Codes a, Codes b, Codes c) {
    return each<Codes>([&](int i) {
      const __m256i first = _mm256_and_si256(_mm256_srli_epi16(a.part[i], 6), _mm256_set1_epi8(3));
      const __m256i second = _mm256_and_si256(_mm256_srli_epi16(b.part[i], 4), _mm256_set1_epi8(12));
      const __m256i third = _mm256_and_si256(_mm256_srli_epi16(c.part[i], 2), _mm256_set1_epi8(48));
      return _mm256_or_si256(_mm256_or_si256(first, second), third);
    });
  }
  static Codes low_bits(Codes codes) {
    return each<Codes>([&](int i) { return _mm256_and_si256(codes.part[i], _mm256_set1_epi8(127)); });
  }
  static Codes top_bit(Codes codes) {
    const __m256i one = _mm256_set1_epi8(1);
    return each<Codes>([&](int i) { return _mm256_and_si256(_mm256_srli_epi16(codes.part[i], 7), one); });
  }

  // Measured on a Cascade Lake, with weights in the second cache and with weights in memory.
#ifdef __AVXVNNI__
  static constexpr ManyRows many_rows = {32, 16, 32, 16};  // not measured
#else
  static constexpr ManyRows many_rows = {4, 6, 16, 12};  // bytes in two planes are slow
#endif
  static constexpr int word_rows = 4, word_blocks = 1;
  static Codes even_bytes(Codes codes) {
    return each<Codes>([&](int i) { return _mm256_and_si256(codes.part[i], _mm256_set1_epi16(255)); });
  }
  static Codes odd_bytes(Codes codes) {
    return each<Codes>([&](int i) { return _mm256_srli_epi16(codes.part[i], 8); });
  }
  static Codes subtract_words(Codes a, Codes b) {
    return each<Codes>([&](int i) { return _mm256_sub_epi16(a.part[i], b.part[i]); });
  }
  static Codes broadcast_words(int32_t value) {
    return each<Codes>([&](int) { return _mm256_set1_epi16(static_cast<int16_t>(value)); });
  }
  static Codes words(const uint8_t* p) {
    return each<Codes>([&](int i) {
      const __m256i wide = _mm256_cvtepu8_epi32(load8(p + 8 * i));
      return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
    });
  }
  static Codes load_words(const int16_t* p) { return load(reinterpret_cast<const uint8_t*>(p)); }
  static void store_words(int16_t* p, Codes words) {
    for (int i = 0; i < 2; i++) _mm256_store_si256(reinterpret_cast<__m256i*>(p) + i, words.part[i]);
  }
  static __m256i broadcast_pair(const int16_t* x) { return broadcast4(reinterpret_cast<const int8_t*>(x)); }
  static I32 dot_words(I32 sum, Codes words, __m256i pair) {
    return each<I32>([&](int i) {
#ifdef __AVXVNNI__
      return _mm256_dpwssd_avx_epi32(sum.part[i], words.part[i], pair);
#else
      return keep_in_register(_mm256_add_epi32(sum.part[i], _mm256_madd_epi16(words.part[i], pair)));
#endif
    });
  }

  static I32 broadcast(int32_t value) {
    return each<I32>([&](int) { return _mm256_set1_epi32(value); });
  }
  static I32 add(I32 a, I32 b) {
    return each<I32>([&](int i) { return _mm256_add_epi32(a.part[i], b.part[i]); });
  }
  static I32 multiply(I32 a, I32 b) {
    return each<I32>([&](int i) { return _mm256_mullo_epi32(a.part[i], b.part[i]); });
  }
  template <int Bits>
  static I32 shift_left(I32 a) {
    return each<I32>([&](int i) { return _mm256_slli_epi32(a.part[i], Bits); });
  }
  static I32 zeros(const uint8_t* p, int) {
    return each<I32>([&](int i) { return _mm256_cvtepu8_epi32(load8(p + 8 * i)); });
  }

  static F32 zero() { return spread(0); }
  static F32 spread(float value) {
    return each<F32>([&](int) { return _mm256_set1_ps(value); });
  }
  static F32 sum(F32 a, F32 b) {
    return each<F32>([&](int i) { return _mm256_add_ps(a.part[i], b.part[i]); });
  }
  static F32 mul(F32 a, F32 b) {
    return each<F32>([&](int i) { return _mm256_mul_ps(a.part[i], b.part[i]); });
  }
  static F32 fma(F32 a, F32 b, F32 c) {
    return each<F32>([&](int i) { return _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]); });
  }
  static F32 to_float(I32 a) {
    return each<F32>([&](int i) { return _mm256_cvtepi32_ps(a.part[i]); });
  }
  static F32 floats(const uint8_t* p, int) {
    return each<F32>([&](int i) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + 8 * i); });
  }
  static void store(float* p, F32 a) {
    for (int i = 0; i < 2; i++) _mm256_storeu_ps(p + 8 * i, a.part[i]);
  }

  static F32 signed_bytes(const uint8_t* p, int) {
    return each<F32>([&](int i) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p + 8 * i))); });
  }

  static F32 scales(int32_t kind, const uint8_t* p, int) {
    switch (kind) {
      case LANCEBILL_SCALE_BF16:
        return each<F32>([&](int i) { return shifted(_mm256_cvtepu16_epi32(load16(p + 16 * i)), 16); });
      case LANCEBILL_SCALE_F16:
        return each<F32>([&](int i) { return _mm256_cvtph_ps(load16(p + 16 * i)); });
      case LANCEBILL_SCALE_F32: return floats(p, 0);
      case LANCEBILL_SCALE_E8M0:
        return each<F32>([&](int i) { return shifted(_mm256_cvtepu8_epi32(load8(p + 8 * i)), 23); });
      case LANCEBILL_SCALE_E4M3:
        return each<F32>([&](int i) { return halves(load8(p + 8 * i), 7, _mm_set1_epi16(int16_t{-0x4001})); });
      default: return spread(1);
    }
  }

  // Shifts the bits of a minifloat to their place in fp16; `unit` corrects the exponent bias.
  struct Minifloat {
    int shift;
    __m128i mask;
    F32 unit;
    explicit Minifloat(const Packed& p)
        : shift(10 - p.matrix->mantissa),
          mask(_mm_set1_epi16(static_cast<int16_t>(0x8000 | (0x7f << shift)))),
          unit(spread(p.unit * p.minifloat_unit)) {}
    F32 decode(const uint8_t* p) const {
      return each<F32>([&](int i) { return halves(load8(p + 8 * i), shift, mask); });
    }
  };

  // The fp32 numbers that the `nibble`-th four bits of each lane select: the low three bits in each half of the table,
  // and by the fourth, shifted to the sign, which half.
  struct FloatTable {
    __m256 low, high;
    explicit FloatTable(const float* values) : low(_mm256_loadu_ps(values)), high(_mm256_loadu_ps(values + 8)) {}
    LANCEBILL_INLINE F32 at(Codes codes, int nibble) const {
      const __m128i to_low = _mm_cvtsi32_si128(4 * nibble), to_sign = _mm_cvtsi32_si128(28 - 4 * nibble);
      return each<F32>([&](int i) {
        const __m256i index = _mm256_srl_epi32(codes.part[i], to_low);
        const __m256 upper = _mm256_castsi256_ps(_mm256_sll_epi32(codes.part[i], to_sign));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
      });
    }
  };

 private:
  template <class Vector, class Function>
  LANCEBILL_INLINE static Vector each(Function function) {
    return {{function(0), function(1)}};
  }
  // Keeps the compiler from delaying additions until all products exist, which would spill registers.
  static __m256i keep_in_register(__m256i sum) {
#ifdef __x86_64__  // not when emulated
    __asm__ volatile("" : "+x"(sum));
#endif
    return sum;
  }
  static __m256i widened(__m256i sum, __m256i pairs, int16_t factor) {
    return keep_in_register(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(factor))));
  }
  static Codes look_up(Table table, Codes nibbles) {
    return each<Codes>([&](int i) { return _mm256_shuffle_epi8(table, nibbles.part[i]); });
  }
  static __m256i low_nibble(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m256 shifted(__m256i bits, int by) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, by)); }
  static __m256 halves(__m128i bytes, int shift, __m128i mask) {  // sign extension puts the sign in the top bit
    const __m128i wide = _mm_cvtepi8_epi16(bytes);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_sll_epi16(wide, _mm_cvtsi32_si128(shift)), mask));
  }
  static __m256i broadcast4(const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
  }
};

}  // namespace
}  // namespace lancebill
