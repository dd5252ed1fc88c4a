// Integer dot products of one column group: a few row blocks times a few input rows.
#pragma once

#include "group_codes.h"
#include "inputs.h"
#include "plan.h"
#include "prefetch.h"

namespace lancebill {
namespace {

constexpr int kPlane = 256;  // weight of a plane of an input, in units of the next
constexpr int kRunUnits = kPlaneRun / kUnitColumns;

// Eight columns of one input row, in all planes: where they are, or in registers.
template <class V, int Planes, bool InRegisters = V::lane_inputs>
struct StepInputs {
  const int8_t* at;

  LANCEBILL_INLINE void load(const int8_t* x) { at = x; }
  LANCEBILL_INLINE typename V::I32 dot(typename V::I32 sum, typename V::Codes codes, int unit, int plane) const {
    return V::dot(sum, codes, at + plane_offset(unit * kUnitColumns, plane, Planes));
  }
};

template <class V, int Planes>
struct StepInputs<V, Planes, true> {
  typename V::Inputs pairs[(Planes + 1) / 2];  // of planes

  LANCEBILL_INLINE void load(const int8_t* x) {
    LANCEBILL_EACH(i, Planes / 2) pairs[i] = V::inputs(x + 2 * i * kPlaneRun);
    if constexpr (Planes % 2) pairs[Planes / 2] = V::half_inputs(x + (Planes - 1) * kPlaneRun);
  }
  LANCEBILL_INLINE typename V::I32 dot(typename V::I32 sum, typename V::Codes codes, int unit, int plane) const {
    return V::dot(sum, codes, pairs[plane / 2], plane % 2 * kRunUnits + unit);
  }
};

// The accumulators of one group: `BlocksAtOnce` row blocks, starting at block `First` of a strip, times `Rows` input
// rows. Where a block has more rows than a vector has lanes, `part` selects the lanes. Each input is loaded once for
// all blocks, and each code is decoded once for all rows.
//
// With `whole_bytes`, a byte is low + 16 * high, where low and high belong to two blocks. The sum over whole bytes
// minus the sum over low nibbles is then 16 times the sum over high nibbles.
template <class V, class Code, int InputPlanes, int First, int BlocksAtOnce, int Rows>
struct GroupSums {
  using I32 = typename V::I32;
  static constexpr int kPartBytes = kUnit * V::lanes / kRows;
  static constexpr int kStepUnits = Code::step_units;  // every group has a multiple of this many units
  // Widening 16-bit sums also merges two planes. Three would not fit 32 bits.
  static constexpr int kSums = Code::short_sums && InputPlanes < 3 ? 1 : InputPlanes;
  static constexpr bool kBiased = V::biased_sums && Code::planes == 1;  // see kFloatBits
  static_assert(kStepUnits % kRunUnits == 0, "a step starts at the start of a plane run");
  static_assert(!Code::whole_bytes || (First == 0 && BlocksAtOnce % 2 == 0), "a whole byte belongs to both blocks");
  I32 sums[BlocksAtOnce][Rows][kSums][Code::planes];

  // Starts each sum at minus center (or zero point) times the sum of the inputs.
  LANCEBILL_INLINE void start(const Packed& p, const uint8_t* zeros, int part,
                              const InputGroup* const (&groups)[Rows]) {
    LANCEBILL_EACH(b, BlocksAtOnce)
      LANCEBILL_EACH(r, Rows)
        LANCEBILL_EACH(i, kSums) {
          I32* sum = sums[b][r][i];
          const int32_t start = kSums == InputPlanes ? groups[r]->start[i] : groups[r]->both;
          sum[0] = zeros == nullptr ? V::broadcast(is_whole(b) ? start + 16 * start : start)
                                    : from_zero(zero(p, zeros, b, part), start);
          if constexpr (Code::planes == 2) sum[1] = V::broadcast(0);
        }
  }

  static constexpr bool is_whole(int b) { return Code::whole_bytes && b % 2 == 1; }

  static LANCEBILL_INLINE I32 from_zero(I32 zero, int32_t start) {
    const I32 product = V::multiply(zero, V::broadcast(start));
    return kBiased ? V::add(product, V::broadcast(kFloatBits)) : product;
  }

  static LANCEBILL_INLINE I32 zero(const Packed& p, const uint8_t* zeros, int b, int part) {
    I32 own = V::zeros(zeros + b * p.zero.block, part);
    if constexpr (V::signed_codes) own = V::add(own, V::broadcast(-code_bias<V>(p)));
    return is_whole(b) ? V::add(V::zeros(zeros + (b - 1) * p.zero.block, part), V::template shift_left<4>(own)) : own;
  }

  // Adds the products of a group. `lines`: its first codes, `bytes` of them per strip; `x`: each row's inputs of this
  // group; `prefetch`: the prefetches to issue meanwhile, if `prefetching`.
  template <class Prefetch>
  LANCEBILL_INLINE void add(const Packed& p, const Code& code, const uint8_t* lines, int64_t bytes, Prefetch prefetch,
                            bool prefetching, const int8_t* const (&x)[Rows]) {
    const int8_t* at[Rows];
    LANCEBILL_EACH(r, Rows) at[r] = x[r];
    const uint8_t* end = lines + bytes;
    do {  // a group has at least one step
      if constexpr (Code::short_sums) {
        add_shorts(p, code, lines, prefetch, prefetching, at);
      } else {
        static_assert(Code::step_lines == Code::prefetch_lines, "one prefetch step");
        if (prefetching) prefetch.step();
        add_dots(p, code, lines, at);
      }
      LANCEBILL_EACH(r, Rows) at[r] += InputPlanes * kStepUnits * kUnitColumns;
      lines += Code::step_lines * kUnit;
    } while (lines != end);
  }

  LANCEBILL_INLINE void add_dots(const Packed& p, const Code& code, const uint8_t* lines,
                                 const int8_t* const (&x)[Rows]) {
    LANCEBILL_EACH(run, kStepUnits / kRunUnits) {
      StepInputs<V, InputPlanes> inputs[Rows];
      LANCEBILL_EACH(r, Rows) inputs[r].load(x[r] + run * InputPlanes * kPlaneRun);
      LANCEBILL_EACH(u, kRunUnits) {
        typename V::Codes decoded[BlocksAtOnce][Code::planes];
        decode(p, code, lines, run * kRunUnits + u, decoded);
        LANCEBILL_EACH(r, Rows)
          LANCEBILL_EACH(i, InputPlanes)
            LANCEBILL_EACH(b, BlocksAtOnce)
              LANCEBILL_EACH(plane, Code::planes) {
                I32& sum = sums[b][r][i][plane];
                sum = inputs[r].dot(sum, decoded[b][plane], u, i);
              }
      }
    }
  }

  template <class Prefetch>
  LANCEBILL_INLINE void add_shorts(const Packed& p, const Code& code, const uint8_t* lines, Prefetch& prefetch,
                                   bool prefetching, const int8_t* const (&x)[Rows]) {
    typename V::Codes shorts[BlocksAtOnce][Rows][InputPlanes];
    LANCEBILL_EACH(u, kStepUnits) {
      if (prefetching && u % Code::prefetch_lines == 0) prefetch.step();
      typename V::Codes decoded[BlocksAtOnce][Code::planes];
      decode(p, code, lines, u, decoded);
      LANCEBILL_EACH(r, Rows)
        LANCEBILL_EACH(i, InputPlanes)
          LANCEBILL_EACH(b, BlocksAtOnce) {
            const int8_t* at = x[r] + plane_offset(u * kUnitColumns, i, InputPlanes);
            const typename V::Codes more = V::short_products(decoded[b][0], at);
            typename V::Codes& sum = shorts[b][r][i];
            sum = u == 0 ? more : V::add_shorts(sum, more);
            if (u + 1 == kStepUnits) {
              I32& wide = sums[b][r][kSums == 1 ? 0 : i][0];
              wide = V::add_widened(wide, sum, kSums == 1 && i + 1 < InputPlanes ? kPlane : 1);
            }
          }
    }
  }

  static LANCEBILL_INLINE void decode(const Packed& p, const Code& code, const uint8_t* lines, int unit,
                                      typename V::Codes (&decoded)[BlocksAtOnce][Code::planes]) {
    LANCEBILL_EACH(b, BlocksAtOnce) {
      const int block = First + b;
      const typename V::Codes codes = Code::load(lines + block / Code::blocks * p.strip_bytes, unit);
      LANCEBILL_EACH(plane, Code::planes) decoded[b][plane] = code.decode(block % Code::blocks, plane, codes);
    }
  }

  LANCEBILL_INLINE I32 sum(int b, int r, int plane) const {
    const I32* sum = sums[b][r][plane];
    if constexpr (Code::planes == 2) return V::add(sum[0], V::template shift_left<7>(sum[1]));
    if constexpr (Code::whole_bytes) return is_whole(b) ? V::subtract(sum[0], sums[b - 1][r][plane][0]) : sum[0];
    return sum[0];
  }

  static LANCEBILL_INLINE typename V::F32 to_float(I32 sum) {
    if constexpr (kBiased) return V::from_biased(sum);
    return V::to_float(sum);
  }

  // The sum in units of the input's low plane.
  LANCEBILL_INLINE typename V::F32 value(int b, int r) const {
    typename V::F32 value = to_float(sum(b, r, 0));
    LANCEBILL_EACH(i, kSums - 1) value = V::fma(value, V::spread(kPlane), to_float(sum(b, r, i + 1)));
    // Not the scale: a sixteenth of it may be too small to be exact.
    return is_whole(b) ? V::mul(value, V::spread(1.0f / 16)) : value;
  }
};

}  // namespace
}  // namespace lancebill
