// Vectors of rows in several registers: ARM NEON with byte dot products.
#pragma once

#include <arm_neon.h>

#include "convert.h"
#include "kernel.h"
#include "plan.h"

namespace lancebill {
namespace {

// Looks up sixteen bytes as the top bytes of sixteen lanes; indices above 15 give zero.
constexpr uint8_t kZero = 255;
constexpr uint8_t kTops[64] = {
    kZero, kZero, kZero, 0,  kZero, kZero, kZero, 1,  kZero, kZero, kZero, 2,  kZero, kZero, kZero, 3,
    kZero, kZero, kZero, 4,  kZero, kZero, kZero, 5,  kZero, kZero, kZero, 6,  kZero, kZero, kZero, 7,
    kZero, kZero, kZero, 8,  kZero, kZero, kZero, 9,  kZero, kZero, kZero, 10, kZero, kZero, kZero, 11,
    kZero, kZero, kZero, 12, kZero, kZero, kZero, 13, kZero, kZero, kZero, 14, kZero, kZero, kZero, 15};

template <int Registers>
struct NeonVectors {
  static constexpr int lanes = 4 * Registers;
  static constexpr int rows = 4;
  static constexpr int blocks = 2;
  static constexpr int blocks_at_once(int sums) { return sums * Registers <= 8 ? 2 : 1; }  // half of all registers
  static constexpr bool prefetch_twice = false;
  static constexpr bool lane_inputs = true;
  static constexpr bool split_bytes = false;
  static constexpr bool signed_codes = true;  // SDOT has signed operands only
  static constexpr bool biased_sums = true;
  static constexpr bool short_sums = false;
  static constexpr bool plain_nibbles = true;
  static constexpr bool whole_bytes = false;
  static constexpr bool tiles = false;
  static constexpr int word_rows = 0;
  struct Codes {
    uint8x16_t part[Registers];
  };
  struct I32 {
    int32x4_t part[Registers];
  };
  struct F32 {
    float32x4_t part[Registers];
  };
  using Table = uint8x16_t;

  using Inputs = int8x16_t;
  static Inputs inputs(const int8_t* x) { return vld1q_s8(x); }
  static Inputs half_inputs(const int8_t* x) { return vcombine_s8(vld1_s8(x), vcreate_s8(0)); }

  // SDOT with four bytes of a lane: broadcasting them takes an instruction of the same unit.
  LANCEBILL_INLINE static I32 dot(I32 sum, Codes codes, Inputs x, int lane) {
    const auto with = [&](auto one) __attribute__((always_inline)) {
      return each<I32>([&](int i) { return one(sum.part[i], vreinterpretq_s8_u8(codes.part[i])); });
    };
    switch (lane) {
      case 0: return with([&](int32x4_t s, int8x16_t c) { return vdotq_laneq_s32(s, c, x, 0); });
      case 1: return with([&](int32x4_t s, int8x16_t c) { return vdotq_laneq_s32(s, c, x, 1); });
      case 2: return with([&](int32x4_t s, int8x16_t c) { return vdotq_laneq_s32(s, c, x, 2); });
      default: return with([&](int32x4_t s, int8x16_t c) { return vdotq_laneq_s32(s, c, x, 3); });
    }
  }

  static Codes load(const uint8_t* p) {
    return each<Codes>([&](int i) { return vld1q_u8(p + 16 * i); });
  }
  static Table table(const uint8_t* entries) { return vld1q_u8(entries); }
  static Codes low(Table table, Codes codes) {
    return each<Codes>([&](int i) { return vqtbl1q_u8(table, vandq_u8(codes.part[i], vdupq_n_u8(15))); });
  }
  static Codes high(Table table, Codes codes) {
    return each<Codes>([&](int i) { return vqtbl1q_u8(table, vshrq_n_u8(codes.part[i], 4)); });
  }
  static Codes low_nibbles(Codes codes) {
    return each<Codes>([&](int i) { return vandq_u8(codes.part[i], vdupq_n_u8(15)); });
  }
  static Codes high_nibbles(Codes codes) {
    return each<Codes>([&](int i) { return vshrq_n_u8(codes.part[i], 4); });
  }
  static Codes low_six(Codes codes) {
    return each<Codes>([&](int i) { return vandq_u8(codes.part[i], vdupq_n_u8(63)); });
  }
  static Codes top_pairs(Codes a, Codes b, Codes c) {
    return each<Codes>([&](int i) {
      const uint8x16_t two = vsriq_n_u8(c.part[i], b.part[i], 2);  // the pair of c, then that of b
      return vshrq_n_u8(vsriq_n_u8(two, a.part[i], 4), 2);
    });
  }
  static Codes to_signed(Codes codes) {
    return each<Codes>([&](int i) { return veorq_u8(codes.part[i], vdupq_n_u8(128)); });
  }

  static I32 broadcast(int32_t value) {
    return each<I32>([&](int) { return vdupq_n_s32(value); });
  }
  static I32 add(I32 a, I32 b) {
    return each<I32>([&](int i) { return vaddq_s32(a.part[i], b.part[i]); });
  }
  static I32 multiply(I32 a, I32 b) {
    return each<I32>([&](int i) { return vmulq_s32(a.part[i], b.part[i]); });
  }
  template <int Bits>
  static I32 shift_left(I32 a) {
    return each<I32>([&](int i) { return vshlq_n_s32(a.part[i], Bits); });
  }
  static I32 zeros(const uint8_t* p, int part) {
    return each<I32>([&](int i) { return vreinterpretq_s32_u32(bytes(p, part * Registers + i)); });
  }

  static F32 zero() { return spread(0); }
  static F32 spread(float value) {
    return each<F32>([&](int) { return vdupq_n_f32(value); });
  }
  static F32 sum(F32 a, F32 b) {
    return each<F32>([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
  }
  static F32 mul(F32 a, F32 b) {
    return each<F32>([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
  }
  static F32 fma(F32 a, F32 b, F32 c) {
    return each<F32>([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
  }
  static F32 to_float(I32 a) {
    return each<F32>([&](int i) { return vcvtq_f32_s32(a.part[i]); });
  }
  static F32 from_biased(I32 a) {
    return each<F32>([&](int i) { return vsubq_f32(vreinterpretq_f32_s32(a.part[i]), vdupq_n_f32(kFloatBias)); });
  }
  static F32 floats(const uint8_t* p, int part) {
    return each<F32>([&](int i) { return vreinterpretq_f32_u8(vld1q_u8(p + 16 * (part * Registers + i))); });
  }
  static void store(float* p, F32 a) {
    for (int i = 0; i < Registers; i++) vst1q_f32(p + 4 * i, a.part[i]);
  }

  // Each byte goes to the top of a lane, which is then read as a fixed-point number.
  static F32 signed_bytes(const uint8_t* p, int part) {
    const uint8_t* tops = kTops + 16 * part * Registers;
    __asm__("" : "+r"(tops));  // else GCC computes the address of each constant
    const uint8x16_t all = vld1q_u8(p);
    return each<F32>([&](int i) {
      return vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(all, vld1q_u8(tops + 16 * i))), 24);
    });
  }

  static F32 scales(int32_t kind, const uint8_t* p, int part) {
    const int first = part * Registers;
    switch (kind) {
      case LANCEBILL_SCALE_BF16:
        return each<F32>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(four_halves(p, first + i), 16)); });
      case LANCEBILL_SCALE_F16:
        return each<F32>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(four_halves(p, first + i))); });
      case LANCEBILL_SCALE_F32: return floats(p, part);
      case LANCEBILL_SCALE_E8M0:
        return each<F32>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(bytes(p, first + i), 23)); });
      case LANCEBILL_SCALE_E4M3: return halves(p + part * lanes, vdupq_n_s16(7), vdupq_n_u16(0xbfff));
      default: return spread(1);
    }
  }

  // Shifts the bits of a minifloat to their place in fp16; `unit` corrects the exponent bias.
  struct Minifloat {
    int16x8_t shift;
    uint16x8_t mask;
    F32 unit;
    explicit Minifloat(const Packed& p)
        : shift(vdupq_n_s16(static_cast<int16_t>(10 - p.matrix->mantissa))),
          mask(vdupq_n_u16(static_cast<uint16_t>(0x8000 | (0x7f << (10 - p.matrix->mantissa))))),
          unit(spread(p.unit * p.minifloat_unit)) {}
    F32 decode(const uint8_t* p) const { return halves(p, shift, mask); }
  };

  // The fp32 numbers that the `nibble`-th four bits of each lane select: four bytes of a table of 64.
  struct FloatTable {
    uint8x16x4_t bytes;
    explicit FloatTable(const float* values) {
      for (int i = 0; i < 4; i++) bytes.val[i] = vreinterpretq_u8_f32(vld1q_f32(values + 4 * i));
    }
    F32 at(Codes codes, int nibble) const {
      const int32x4_t right = vdupq_n_s32(-4 * nibble);
      return each<F32>([&](int i) {
        const uint32x4_t shifted = vshlq_u32(vreinterpretq_u32_u8(codes.part[i]), right);
        const uint32x4_t index = vandq_u32(shifted, vdupq_n_u32(15));
        const uint32x4_t four = vmlaq_u32(vdupq_n_u32(0x03020100), index, vdupq_n_u32(0x04040404));
        return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(four)));
      });
    }
  };

 private:
  template <class Vector, class Function>
  LANCEBILL_INLINE static Vector each(Function function) {
    if constexpr (Registers == 4) {
      return {{function(0), function(1), function(2), function(3)}};
    } else {
      return {{function(0), function(1)}};
    }
  }
  static uint16x4_t four_halves(const uint8_t* p, int i) { return vreinterpret_u16_u8(vld1_u8(p + 8 * i)); }
  static uint32x4_t bytes(const uint8_t* p, int i) {  // the i-th four of sixteen
    const uint8x16_t all = vld1q_u8(p);
    const uint16x8_t half = vmovl_u8(i < 2 ? vget_low_u8(all) : vget_high_u8(all));
    return vmovl_u16(i % 2 == 0 ? vget_low_u16(half) : vget_high_u16(half));
  }
  static F32 halves(const uint8_t* p, int16x8_t shift, uint16x8_t mask) {  // sign extension puts the sign on top
    const auto eight = [&](int i) {
      const int16x8_t wide = vshlq_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p + 8 * i))), shift);
      return vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(wide), mask));
    };
    return each<F32>([&](int i) {
      const float16x8_t both = eight(i / 2);
      return vcvt_f32_f16(i % 2 == 0 ? vget_low_f16(both) : vget_high_f16(both));
    });
  }
};

using Neon = NeonVectors<4>;

// The sums of three and four input rows stay in registers if there are half as many for each.
template <int Rows>
struct VectorsFor<Neon, Rows> {
  using Type = NeonVectors<(Rows > 2) ? 2 : 4>;
};

}  // namespace
}  // namespace lancebill
