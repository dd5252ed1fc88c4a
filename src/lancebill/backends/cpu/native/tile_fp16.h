// Expansion of integer codes to bf16 in fp16 arithmetic, 32 weights per instruction.
//
// fp16 bits shifted right by three are a bf16 number, smaller by a power of two (2^-112). A second power of two per row
// brings the row's scales into the range of fp16. The sums are corrected for both; see `Fp16Block`.
#pragma once

#include "convert.h"
#include "plan.h"
#include "tile_scales.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

constexpr int32_t kLargestByte = 255;

// Whether weights are expanded in fp16: all integers and tables, except with offsets that are subtracted after scaling.
inline bool expands_in_fp16(const Packed& p) {
#ifdef __AVX512FP16__
  const lancebill_matrix& m = *p.matrix;
  if (p.has_offsets()) return false;
  return m.codes == LANCEBILL_TABLE4 || (m.codes != LANCEBILL_FLOAT8 && m.center <= kLargestByte);
#else
  return (void)p, false;
#endif
}

// fp16 bits shifted right by kHalfShift are a bf16 number 2^-112 times as large. Inputs are scaled up to compensate.
constexpr int kHalfShift = 3, kInputExponent = 112;

#ifdef __AVX512FP16__
inline __m256i to_half(__m512 a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// Codes in fp16: those of 4 bits are looked up in a table, which is stored twice, multiplied by a power of two that keeps
// it below 16. Bytes become numbers by `kByteBits`; the largest scale of a row is smaller for them, by `peak`.
struct Fp16Table {
  __m512i values = {};
  float factor = 1, peak = 0x1p6f;

  explicit Fp16Table(const Packed& p) {
    if (p.matrix->codes != LANCEBILL_TABLE4) return;
    peak = 0x1p10f;
    const __m512 wide = _mm512_loadu_ps(p.values);
    const float size = _mm512_reduce_max_ps(_mm512_abs_ps(wide));
    factor = size < 16 ? 1 : bits_as<float>((257u << 23) - (bits_as<uint32_t>(size) & kExponentMask));
    values = _mm512_broadcast_i64x4(to_half(_mm512_mul_ps(wide, _mm512_set1_ps(factor))));
  }
};

// The upper byte of fp16 numbers from 1024 on, whose unit is 1: with a byte below it they are 1024 more than the byte.
constexpr int16_t kByteBits = 0x6400;
constexpr float kByteBias = 1024;

// The scales of a row block in fp16. Each row's scales are multiplied by a power of two that brings the largest to
// `peak` .. 2 * `peak`. Weights then stay finite, and are normal fp16 numbers down to 2^-24 of the row's largest.
class Fp16Block {
 public:
  struct Group {
    __m512h scale, zero;
  };

  Fp16Block(const Packed& p, const Fp16Table& table, const uint8_t* scales) : kind_(p.matrix->scale), table_(table) {
    const __m512 bounded = _mm512_min_ps(largest_scales(p, scales), _mm512_set1_ps(0x1p100f));
    const __m512i peaks = _mm512_castps_si512(_mm512_max_ps(bounded, _mm512_set1_ps(0x1p-100f)));
    const __m512i powers = _mm512_and_si512(peaks, _mm512_set1_epi32(kExponentMask));
    const __m512 inverse = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(254 << 23), powers));
    scale_factor_ = _mm512_mul_ps(inverse, _mm512_set1_ps(table.peak));
    const __m512 unit = _mm512_set1_ps(p.unit / table.factor / table.peak);
    correction_ = _mm512_mul_ps(_mm512_castsi512_ps(powers), unit);
    if (p.matrix->codes != LANCEBILL_TABLE4) bias_ = kByteBias;
    center_ = in_both_halves(_mm512_set1_ps(bias_ + static_cast<float>(p.matrix->center)));  // of bytes
  }

  Group group(GroupNumbers scales, const uint8_t* zeros) const {
    // `line` truncates, which biases weights towards zero. The extra factor compensates; it is too small to change
    // weights that bf16 holds exactly.
    const __m512 factor = _mm512_mul_ps(scale_factor_, _mm512_set1_ps(1 + 0x1.4p-9f));
    const __m512h scale = in_both_halves(_mm512_mul_ps(scales_of(kind_, scales), factor));
    if (zeros == nullptr) return {scale, center_};
    const __m512 zero = _mm512_cvtepi32_ps(Avx512::zeros(zeros, 0));
    return {scale, in_both_halves(_mm512_fmadd_ps(zero, _mm512_set1_ps(table_.factor), _mm512_set1_ps(bias_)))};
  }

  // Writes one line of a tile: two columns of each row, with their codes at `Bit` of the two halves of the row's word.
  template <bool Zeros, int Bit>
  LANCEBILL_INLINE void line(__m512i word, Group group, uint16_t* line) const {
    const __m512i index = Bit == 0 ? word : _mm512_srli_epi16(word, Bit);  // five bits index
    const __m512h value = _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, table_.values));
    store(Zeros ? _mm512_sub_ph(value, group.zero) : value, group, line);
  }

  // The same for bytes, those at `Bit` 0 or 8.
  template <int Bit>
  LANCEBILL_INLINE void byte_line(__m512i word, Group group, uint16_t* line) const {
    const __m512i byte = Bit == 0 ? _mm512_and_si512(word, _mm512_set1_epi16(kLargestByte)) : _mm512_srli_epi16(word, 8);
    const __m512i bits = _mm512_or_si512(byte, _mm512_set1_epi16(kByteBits));
    store(_mm512_sub_ph(_mm512_castsi512_ph(bits), group.zero), group, line);
  }

  __m512 correction() const { return correction_; }

 private:
  LANCEBILL_INLINE static void store(__m512h value, Group group, uint16_t* line) {
    const __m512i bits = _mm512_castph_si512(_mm512_mul_ph(value, group.scale));
    const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x8fff));
    _mm512_storeu_si512(line, _mm512_and_si512(_mm512_srai_epi16(bits, kHalfShift), kept));
  }
  static __m512h in_both_halves(__m512 a) {  // each fp16 number in both halves of its 32-bit word
    const __m512i words = _mm512_cvtepu16_epi32(to_half(a));
    return _mm512_castsi512_ph(_mm512_or_si512(words, _mm512_slli_epi32(words, 16)));
  }

  static __m512 largest_with_factors(const Packed& p, const uint8_t* scales) {
    __m512 top = _mm512_setzero_ps();
    for (int32_t g = 0; g < p.groups; g++) {
      top = _mm512_max_ps(top, _mm512_abs_ps(with_factors(group_numbers(p.scale, scales, 0, g))));
    }
    return top;
  }

  // The largest scale of each row. Bits of magnitudes sort like the numbers, so scales are compared as integers.
  static __m512 largest_scales(const Packed& p, const uint8_t* scales) {
    const int32_t kind = p.matrix->scale;
    if (kind == LANCEBILL_SCALE_NONE) return _mm512_set1_ps(1);
    if (kind == LANCEBILL_SCALE_I8) return largest_with_factors(p, scales);
    alignas(64) uint8_t line[64];
    const auto over_lines = [&](__m512i magnitude, auto larger) __attribute__((always_inline)) {
      __m512i top = _mm512_setzero_si512();
      for (int64_t at = 0; at < p.scale.block; at += 64) {
        const int64_t left = p.scale.block - at;
        const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
        top = larger(top, _mm512_and_si512(_mm512_maskz_loadu_epi8(mask, scales + at), magnitude));
      }
      // One line holds several groups: the other half, then the other quarter.
      if (p.scale.row <= 2 * kRows) top = larger(top, _mm512_shuffle_i32x4(top, top, 0x4e));
      if (p.scale.row <= kRows) top = larger(top, _mm512_shuffle_i32x4(top, top, 0xb1));
      _mm512_store_si512(line, top);
    };
    if (p.scale.row == kRows) {
      const int magnitude = kind == LANCEBILL_SCALE_E8M0 ? 0xff : 0x7f;
      const __m512i mask = _mm512_set1_epi8(static_cast<char>(magnitude));
      over_lines(mask, [](__m512i a, __m512i b) { return _mm512_max_epu8(a, b); });
    } else if (p.scale.row == 2 * kRows) {
      over_lines(_mm512_set1_epi16(0x7fff), [](__m512i a, __m512i b) { return _mm512_max_epu16(a, b); });
    } else {
      over_lines(_mm512_set1_epi32(0x7fffffff), [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); });
    }
    return Avx512::scales(kind, line, 0);
  }

  int32_t kind_;
  Fp16Table table_;
  __m512 scale_factor_, correction_;
  __m512h center_;
  float bias_ = 0;
};
#endif

}  // namespace
}  // namespace lancebill
