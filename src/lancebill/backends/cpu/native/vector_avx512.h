// Vectors of sixteen rows in one register, a unit of codes per load: AVX-512, and VNNI, VBMI byte lookup and GFNI bit
// matrices where compiled for them.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // false positives of GCC 12 in its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "plan.h"

namespace lancebill {
namespace {

struct Avx512 {
  static constexpr int lanes = 16;
  static constexpr int rows = 4;
  static constexpr int blocks = 4;
  static constexpr bool prefetch_twice = true;
  static constexpr bool lane_inputs = false;
  static constexpr bool signed_codes = false;
  static constexpr bool biased_sums = false;
  static constexpr bool plain_nibbles = true;
  static constexpr bool tiles = false;
  using Codes = __m512i;
  using Table = __m512i;
  using I32 = __m512i;
  using F32 = __m512;

#ifdef __AVX512VNNI__
  static constexpr int blocks_at_once(int sums) { return sums <= 6 ? 4 : 2; }  // up to 24 of the 32 registers
  static constexpr bool split_bytes = false;
  static constexpr bool short_sums = false;
  static constexpr bool whole_bytes = true;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) {
    return keep_in_register(_mm512_dpbusd_epi32(sum, codes, broadcast4(x)));
  }
#else
  // A sum has as many registers for its 16-bit sums.
  static constexpr int blocks_at_once(int sums) { return sums <= 3 ? 4 : sums <= 8 ? 2 : 1; }
  // vpmaddubsw adds two products in 16 bits, which is exact for codes of at most seven bits.
  static constexpr bool split_bytes = true;
  static constexpr bool short_sums = true;
  static constexpr bool whole_bytes = false;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) { return add_widened(sum, short_products(codes, x), 1); }
  static Codes short_products(Codes codes, const int8_t* x) { return _mm512_maddubs_epi16(codes, broadcast4(x)); }
  static Codes add_shorts(Codes a, Codes b) { return keep_in_register(_mm512_add_epi16(a, b)); }
  static I32 add_widened(I32 sum, Codes shorts, int16_t factor) {
    return keep_in_register(_mm512_add_epi32(sum, _mm512_madd_epi16(shorts, _mm512_set1_epi16(factor))));
  }
#endif

  static Table table(const uint8_t* entries) { return _mm512_broadcast_i32x4(load16(entries)); }
  static Codes load(const uint8_t* p) { return keep_in_register(_mm512_loadu_si512(p)); }
  static Codes low(Table table, Codes codes) { return look_up(table, codes); }
  static Codes high(Table table, Codes codes) { return look_up(table, _mm512_srli_epi16(codes, 4)); }
  static Codes low_nibbles(Codes codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
  static Codes high_nibbles(Codes codes) { return low_nibbles(_mm512_srli_epi16(codes, 4)); }
  static Codes low_bits(Codes codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(127)); }
  static Codes top_bit(Codes codes) { return _mm512_and_si512(_mm512_srli_epi16(codes, 7), _mm512_set1_epi8(1)); }

  static Codes low_six(Codes codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(63)); }
  static Codes top_pairs(Codes a, Codes b, Codes c) {
#ifdef __GFNI__
    // Each takes two bits of every byte and clears the others. A matrix has a byte for each bit of the result, which
    // selects the bits that are added; the most significant byte makes bit 0.
    const __m512i lower = _mm512_gf2p8affine_epi64_epi8(a, _mm512_set1_epi64(0x4080000000000000), 0);
    const __m512i middle = _mm512_gf2p8affine_epi64_epi8(b, _mm512_set1_epi64(0x0000408000000000), 0);
    const __m512i upper = _mm512_gf2p8affine_epi64_epi8(c, _mm512_set1_epi64(0x0000000040800000), 0);
    return _mm512_ternarylogic_epi32(lower, middle, upper, 0xfe);  // or
#else
    constexpr int kChoose = 0xe4;  // by the bits of the third: of the first, else of the second
    const __m512i pair = _mm512_set1_epi8(3), two = _mm512_set1_epi8(15);
    const __m512i lower = _mm512_srli_epi16(a, 6), middle = _mm512_srli_epi16(b, 4), upper = _mm512_srli_epi16(c, 2);
    const __m512i first = _mm512_ternarylogic_epi32(lower, middle, pair, kChoose);
    return low_six(_mm512_ternarylogic_epi32(first, upper, two, kChoose));
#endif
  }

  // Measured on a Cascade Lake, with weights in the second cache and with weights in memory.
#ifdef __AVX512VNNI__
  static constexpr ManyRows many_rows = {32, 16, 64, 24};
#else
  static constexpr ManyRows many_rows = {4, 6, 32, 12};  // bytes in two planes are slow
#endif
  static constexpr int word_rows = 6, word_blocks = 2;
  static Codes even_bytes(Codes codes) { return _mm512_and_si512(codes, _mm512_set1_epi16(255)); }
  static Codes odd_bytes(Codes codes) { return _mm512_srli_epi16(codes, 8); }
  static Codes subtract_words(Codes a, Codes b) { return _mm512_sub_epi16(a, b); }
  static Codes broadcast_words(int32_t value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }
  static Codes words(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(load16(p));
    return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
  }
  static Codes load_words(const int16_t* p) { return keep_in_register(_mm512_load_si512(p)); }
  static void store_words(int16_t* p, Codes words) { _mm512_store_si512(p, words); }
  static Codes broadcast_pair(const int16_t* x) {
    return keep_in_register(broadcast4(reinterpret_cast<const int8_t*>(x)));
  }
  static I32 dot_words(I32 sum, Codes words, Codes pair) {
#ifdef __AVX512VNNI__
    return keep_in_register(_mm512_dpwssd_epi32(sum, words, pair));
#else
    return keep_in_register(_mm512_add_epi32(sum, _mm512_madd_epi16(words, pair)));
#endif
  }

  static I32 broadcast(int32_t value) { return _mm512_set1_epi32(value); }
  static I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
  static I32 subtract(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
  static I32 multiply(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
  template <int Bits>
  static I32 shift_left(I32 a) { return _mm512_slli_epi32(a, Bits); }
  static I32 zeros(const uint8_t* p, int) { return _mm512_cvtepu8_epi32(load16(p)); }

  static F32 zero() { return _mm512_setzero_ps(); }
  static F32 spread(float value) { return _mm512_set1_ps(value); }
  static F32 sum(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  static F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
  static F32 floats(const uint8_t* p, int) { return _mm512_loadu_ps(p); }
  static void store(float* p, F32 a) { _mm512_storeu_ps(p, a); }

  static F32 signed_bytes(const uint8_t* p, int) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p))); }

  static F32 scales(int32_t kind, const uint8_t* p, int) {
    switch (kind) {
      case LANCEBILL_SCALE_BF16: return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16));
      case LANCEBILL_SCALE_F16: return _mm512_cvtph_ps(load32(p));
      case LANCEBILL_SCALE_F32: return _mm512_loadu_ps(p);
      case LANCEBILL_SCALE_E8M0: return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(load16(p)), 23));
      case LANCEBILL_SCALE_E4M3: return halves(load16(p), 7, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
      default: return spread(1);
    }
  }

  // Shifts the bits of a minifloat to their place in fp16; `unit` corrects the exponent bias.
  struct Minifloat {
    int shift;
    __m256i mask;
    F32 unit;
    explicit Minifloat(const Packed& p)
        : shift(10 - p.matrix->mantissa),
          mask(_mm256_set1_epi16(static_cast<int16_t>(0x8000 | (0x7f << shift)))),
          unit(spread(p.unit * p.minifloat_unit)) {}
    F32 decode(const uint8_t* p) const { return halves(load16(p), shift, mask); }
  };

  // The fp32 numbers that the `nibble`-th four bits of each lane select. vpermps ignores all other bits of a lane.
  struct FloatTable {
    F32 entries;
    explicit FloatTable(const float* values) : entries(_mm512_loadu_ps(values)) {}
    LANCEBILL_INLINE F32 at(Codes codes, int nibble) const {
      return _mm512_permutexvar_ps(_mm512_srl_epi32(codes, _mm_cvtsi32_si128(4 * nibble)), entries);
    }
  };

 private:
  // Pins a value to a register. Otherwise GCC copies all sums to other registers and back in every loop step, and
  // reloads codes for each use. With VNNI it still copies sums, unless -fno-tree-coalesce-vars keeps it from giving one
  // register to all versions of a sum: that is a third fewer instructions.
  static __m512i keep_in_register(__m512i value) {
#ifdef __x86_64__  // not when emulated
    __asm__("" : "+v"(value));
#endif
    return value;
  }
  // Looks up the low nibble of each byte. vpermb uses six index bits; the table is repeated four times, so the upper
  // two do not matter and no mask is needed.
  static Codes look_up(Table table, Codes bytes) {
#ifdef __AVX512VBMI__
    return _mm512_permutexvar_epi8(bytes, table);
#else
    return _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
#endif
  }
  static __m512i broadcast4(const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
  }
  static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static F32 halves(__m128i bytes, int shift, __m256i mask) {  // sign extension puts the sign in the top bit
    const __m256i wide = _mm256_cvtepi8_epi16(bytes);
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_sll_epi16(wide, _mm_cvtsi32_si128(shift)), mask));
  }
};

}  // namespace
}  // namespace lancebill
