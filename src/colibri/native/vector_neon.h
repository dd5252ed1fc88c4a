// Vectors of four rows on ARM: NEON with dot products of bytes.
#pragma once

#include <arm_neon.h>

#include "vector_portable.h"

namespace colibri {
namespace {

struct Neon : Portable {
  using Codes = uint8x16_t;
  using Table = uint8x16_t;

  // SDOT takes both sides as signed.
  static constexpr bool split_bytes = true;
  static I32 dot(I32 sum, Codes codes, const int8_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return vdotq_s32(sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_s32(vdupq_n_s32(word)));
  }

  static Codes load(const uint8_t* p) { return vld1q_u8(p); }
  static Table table(const uint8_t* entries) { return vld1q_u8(entries); }
  static Codes low(Table table, Codes codes) { return vqtbl1q_u8(table, vandq_u8(codes, vdupq_n_u8(15))); }
  static Codes high(Table table, Codes codes) { return vqtbl1q_u8(table, vshrq_n_u8(codes, 4)); }
  static Codes low_bits(Codes codes) { return vandq_u8(codes, vdupq_n_u8(127)); }
  static Codes top_bit(Codes codes) { return vshrq_n_u8(codes, 7); }

  static F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }

  static F32 scales(int32_t kind, const uint8_t* p, int part) {
    switch (kind) {
      case COLIBRI_SCALE_BF16: return vreinterpretq_f32_u32(vshll_n_u16(four_halves(p + 8 * part), 16));
      case COLIBRI_SCALE_F16: return vcvt_f32_f16(vreinterpret_f16_u16(four_halves(p + 8 * part)));
      case COLIBRI_SCALE_F32: return floats(p, part);
      case COLIBRI_SCALE_E8M0: return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_s32(zeros(p, part)), 23));
      case COLIBRI_SCALE_E4M3: return halves(p + 4 * part, vdupq_n_s16(7), vdup_n_u16(0xbfff));
      default: return spread(1);
    }
  }

  // The bits of a minifloat moved to where fp16 has them; the difference of biases is part of `unit`.
  struct Minifloat {
    int16x8_t shift;
    uint16x4_t mask;
    F32 unit;
    explicit Minifloat(const Packed& p)
        : shift(vdupq_n_s16(static_cast<int16_t>(10 - p.matrix->mantissa))),
          mask(vdup_n_u16(static_cast<uint16_t>(0x8000 | (0x7f << (10 - p.matrix->mantissa))))),
          unit(spread(p.unit * p.minifloat_unit)) {}
    F32 decode(const uint8_t* p) const { return halves(p, shift, mask); }
  };

 private:
  static uint16x4_t four_halves(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
  static F32 halves(const uint8_t* p, int16x8_t shift, uint16x4_t mask) {  // sign-extended: the sign is already the top bit
    uint32_t word;
    std::memcpy(&word, p, 4);
    const int16x8_t wide = vshlq_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(word))), shift);
    return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(vreinterpret_u16_s16(vget_low_s16(wide)), mask)));
  }
};

}  // namespace
}  // namespace colibri
