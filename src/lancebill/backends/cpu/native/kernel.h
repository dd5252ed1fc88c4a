// The CPU GEMM kernels: a few row blocks times a few input rows, group by group.
//
// Written once over a level's vector type `V`. A vector has `V::lanes` output rows: 16, or 8 or 4, where a row block is
// processed in parts. `V` provides:
//   rows                      largest number of input rows in one kernel call, 2 to 4
//   blocks                    row blocks in one kernel call: as many memory streams, or half as many with TABLE4
//   blocks_at_once(sums)      row blocks that are multiplied together, given the accumulators and other vectors that each
//                             keeps in registers: 1, 2 or 4
//   prefetch_twice            prefetch codes to L2, then to L1 (see kFarBytes); false if compute is slower than memory
//   Codes, I32, F32, Table    four codes per row; one int32 per row; one float per row; a 16-byte lookup table
//   load, table, low, high    load codes; load a table; look up the low or the high nibbles
//   dot(I32, Codes, x)        adds each row's dot product of four codes and the four signed bytes at x
//   lane_inputs               dot takes the four bytes from a lane of a register instead (Inputs, inputs, half_inputs)
//   split_bytes               dot accepts 7-bit codes only, so bytes are split in two planes, like large table entries
//   signed_codes              dot takes signed codes: 128 is subtracted from those of 8 bits (code_bias)
//   biased_sums               sums become floats by from_biased (see kFloatBits)
//   short_sums                small table entries: sum short_products of several columns in 16 bits (add_shorts), then
//                             widen and multiply by a factor (add_widened), which merges both input planes in a sum
//   plain_nibbles             low_nibbles and high_nibbles give 4-bit integers without a table
//   low_six, top_pairs        6-bit codes: the low six bits of bytes; the top two bits of three bytes as one code
//   whole_bytes               with several blocks at once: derive the sums of high nibbles from sums of whole bytes
//   word_rows                 input rows in one call of the kernel for many rows (many_rows.h), 0 if there is none
//   word_blocks               row blocks that it multiplies at once
//   many_rows                 from how many rows on it is faster (ManyRows)
//   even_bytes, odd_bytes     bytes 0 and 2, 1 and 3 of every four, as words of 16 bits
//   dot_words                 adds each row's product of two words, and two of an input from broadcast_pair
//   scales, zeros, floats, signed_bytes, Minifloat  decode per-row numbers from their stored bytes
//   FloatTable                looks up fp32 numbers by the nibbles of codes
#pragma once

#include "float_codes.h"
#include "group_codes.h"
#include "group_sums.h"
#include "inputs.h"
#include "plan.h"
#include "prefetch.h"

namespace lancebill {
namespace {

// Scales of `Blocks` row blocks that are `block` bytes apart. Switches on the kind once for all of them.
template <class V, int Blocks>
LANCEBILL_INLINE void load_scales(int32_t kind, const uint8_t* first, int64_t block, int part,
                                typename V::F32 (&scales)[Blocks]) {
  const auto load = [&](int32_t one_kind) __attribute__((always_inline)) {
    LANCEBILL_EACH(b, Blocks) scales[b] = V::scales(one_kind, first + b * block, part);
  };
  switch (kind) {
    case LANCEBILL_SCALE_BF16: return load(LANCEBILL_SCALE_BF16);
    case LANCEBILL_SCALE_F16: return load(LANCEBILL_SCALE_F16);
    case LANCEBILL_SCALE_F32: return load(LANCEBILL_SCALE_F32);
    case LANCEBILL_SCALE_E8M0: return load(LANCEBILL_SCALE_E8M0);
    case LANCEBILL_SCALE_E4M3: return load(LANCEBILL_SCALE_E4M3);
    default: return load(LANCEBILL_SCALE_NONE);
  }
}

// Input records of the rows of one kernel call.
template <int Rows>
using Records = const uint8_t* const (&)[Rows];

template <class V, int Blocks, int Parts, int Rows>
LANCEBILL_INLINE void clear_totals(typename V::F32 (&total)[Blocks][Parts][Rows]) {
  LANCEBILL_EACH(b, Blocks)
    LANCEBILL_EACH(part, Parts)
      LANCEBILL_EACH(r, Rows) total[b][part][r] = V::zero();
}

template <class V, int Blocks, int Parts, int Rows>
LANCEBILL_INLINE void store_totals(const typename V::F32 (&total)[Blocks][Parts][Rows], float (*out)[Blocks][kRows]) {
  LANCEBILL_EACH(b, Blocks)
    LANCEBILL_EACH(part, Parts)
      LANCEBILL_EACH(r, Rows) V::store(out[r][b] + part * V::lanes, total[b][part][r]);
}

// The factors of a record, in the first row block.
struct Factors {
  const uint8_t *scales, *zeros;
};

// Read positions of the current group; `advance` moves them to the next group.
template <int InputPlanes, int Rows>
struct GroupCursor {
  const uint8_t *codes, *scales, *zeros;
  int64_t scales_read = 0, zeros_read = 0;  // bytes per block
  const int8_t* x[Rows];
  const InputGroup* groups[Rows];

  LANCEBILL_INLINE GroupCursor(const Packed& p, const Streams& s, Records<Rows> records)
      : codes(s.codes), scales(s.scales), zeros(s.zeros) {
    LANCEBILL_EACH(r, Rows) {
      x[r] = reinterpret_cast<const int8_t*>(records[r]);
      groups[r] = reinterpret_cast<const InputGroup*>(records[r] + InputPlanes * p.columns);
    }
  }

  template <int Blocks>
  LANCEBILL_INLINE void prefetch_scales(const Packed& p, const Streams& s) const {
    if (scales_read % kUnit == 0 && p.matrix->scale != LANCEBILL_SCALE_NONE) {  // once per cache line
      const uint8_t* later = prefetch_address(s.scales, s.next_scales, scales_read, kScalePrefetch, p.scale.block);
      LANCEBILL_EACH(b, Blocks) __builtin_prefetch(later + b * p.scale.block);
    }
    if (zeros_read % kUnit == 0 && p.matrix->zero != LANCEBILL_ZERO_NONE) {
      const uint8_t* later = prefetch_address(s.zeros, s.next_zeros, zeros_read, kScalePrefetch, p.zero.block);
      LANCEBILL_EACH(b, Blocks) __builtin_prefetch(later + b * p.zero.block);
    }
  }

  LANCEBILL_INLINE void advance(const Packed& p, int64_t code_bytes) {
    codes += code_bytes;
    scales += p.scale.row;
    scales_read += p.scale.row;
    zeros += p.zero.row;
    zeros_read += p.zero.row;
    LANCEBILL_EACH(r, Rows) {
      x[r] += InputPlanes * p.matrix->group;
      groups[r]++;
    }
  }

  // At the start of a record: moves to its first group, and returns where the factors are.
  LANCEBILL_INLINE Factors skip_factors(const Packed& p) {
    const Factors factors = {scales, zeros};
    scales += p.scale.factors;
    scales_read += p.scale.factors;
    zeros += p.zero.factors;
    zeros_read += p.zero.factors;
    return factors;
  }
};

// total -= offset * sum of the group's inputs.
template <class V, bool SmallOffsets, class Cursor, int Blocks, int Parts, int Rows>
LANCEBILL_INLINE void subtract_offsets(const Packed& p, const Cursor& at,
                                       typename V::F32 (&total)[Blocks][Parts][Rows]) {
  LANCEBILL_EACH(b, Blocks)
    LANCEBILL_EACH(part, Parts) {
      const uint8_t* stored = at.zeros + b * p.zero.block;
      const typename V::F32 offset = SmallOffsets ? V::signed_bytes(stored, part) : V::floats(stored, part);
      LANCEBILL_EACH(r, Rows) {
        typename V::F32& sum = total[b][part][r];
        sum = V::fma(offset, V::spread(-at.groups[r]->sum), sum);
      }
    }
}

// total += factor * sum; sum = 0. `factors`: those of the first row block; others are `block` bytes apart.
template <class V, int Blocks, int Parts, int Rows>
LANCEBILL_INLINE void add_with_factors(const uint8_t* factors, int64_t block,
                                       typename V::F32 (&sums)[Blocks][Parts][Rows],
                                       typename V::F32 (&total)[Blocks][Parts][Rows]) {
  LANCEBILL_EACH(b, Blocks)
    LANCEBILL_EACH(part, Parts) {
      const typename V::F32 factor = V::floats(factors + b * block, part);
      LANCEBILL_EACH(r, Rows) {
        total[b][part][r] = V::fma(sums[b][part][r], factor, total[b][part][r]);
        sums[b][part][r] = V::zero();
      }
    }
}

// The same for vectors of whole row blocks, whose factors follow each other.
template <class V, int Blocks, int Rows>
LANCEBILL_INLINE void add_with_factors(const float* factors, typename V::F32 (&sums)[Blocks][Rows],
                                       typename V::F32 (&total)[Blocks][Rows]) {
  LANCEBILL_EACH(b, Blocks) {
    const typename V::F32 factor = V::floats(reinterpret_cast<const uint8_t*>(factors + b * kRows), 0);
    LANCEBILL_EACH(r, Rows) total[b][r] = V::fma(sums[b][r], factor, total[b][r]);
  }
}

// A compile-time number as a lambda argument.
template <int Value>
struct Constant {
  constexpr operator int() const { return Value; }
};

// out[row][block][16] = `Blocks` row blocks times `Rows` input rows, before row scales. `Small`: scales and offsets are
// small integers; the sums of a record are multiplied with the factors of their rows.
template <class V, class Code, int InputPlanes, bool Small, int Blocks, int Rows>
__attribute__((noinline)) void integer_gemm(const Packed& p, const Streams& s, Records<Rows> records,
                                            float (*out)[Blocks][kRows]) {
  using F32 = typename V::F32;
  constexpr int kParts = kRows / V::lanes, kStrips = Blocks / Code::blocks;
  constexpr int kRegisters = Rows * InputPlanes * Code::planes + Code::held_lines;  // of a block
  constexpr int kBlocksAtOnce = min_of(V::blocks_at_once(kRegisters), Blocks);
  const lancebill_matrix& m = *p.matrix;
  const int64_t piece = m.group / kUnitColumns * kUnit / Code::step_units * Code::step_lines;
  const PrefetchCursor prefetch(p, s, piece);
  const Code code(p);
  F32 total[Blocks][kParts][Rows], sums[Blocks][kParts][Rows], offsets[Blocks][kParts][Rows];  // the last two: if Small
  clear_totals<V>(total);
  if constexpr (Small) clear_totals<V>(sums), clear_totals<V>(offsets);
  F32(&scaled)[Blocks][kParts][Rows] = Small ? sums : total;
  PrefetchPoint point = prefetch.at(0);
  GroupCursor<InputPlanes, Rows> at(p, s, records);
  // The products of one group.
  const auto add_group = [&]() __attribute__((always_inline)) {
    at.template prefetch_scales<Blocks>(p, s);
    // Multiplies `kBlocksAtOnce` blocks from block `b` on, which is block `in_strip` of its strip.
    const auto multiply_from = [&](int b, auto in_strip) __attribute__((always_inline)) {
      for (int part = 0; part < kParts; part++) {
        using Group = GroupSums<V, Code, InputPlanes, in_strip, kBlocksAtOnce, Rows>;
        constexpr int kLines = Code::prefetch_lines * kBlocksAtOnce / Code::blocks;
        Group group;
        group.start(p, m.zero == LANCEBILL_ZERO_U8 ? at.zeros + b * p.zero.block : nullptr, part, at.groups);
        const uint8_t* lines = at.codes + b / Code::blocks * p.strip_bytes + part * Group::kPartBytes;
        const PrefetchSteps<V, kStrips, kLines> steps(point, p.strip_bytes, b / kBlocksAtOnce,
                                                      piece / (Code::prefetch_lines * kUnit));
        group.add(p, code, lines, piece, steps, part == 0, at.x);
        F32 scale[kBlocksAtOnce];
        const uint8_t* scales = at.scales + b * p.scale.block;
        if constexpr (Small) {
          LANCEBILL_EACH(i, kBlocksAtOnce) scale[i] = V::signed_bytes(scales + i * p.scale.block, part);
        } else {
          load_scales<V>(m.scale, scales, p.scale.block, part, scale);
        }
        LANCEBILL_EACH(i, kBlocksAtOnce)
          LANCEBILL_EACH(r, Rows) {
            F32& sum = scaled[b + i][part][r];
            sum = V::fma(group.value(i, r), V::mul(scale[i], V::spread(at.groups[r]->scale)), sum);
          }
      }
    };
    LANCEBILL_UNROLL
    for (int b = 0; b < Blocks; b += max_of(kBlocksAtOnce, Code::blocks)) {
      multiply_from(b, Constant<0>());
      if constexpr (kBlocksAtOnce < Code::blocks) multiply_from(b + 1, Constant<1>());
    }
    if (p.has_offsets()) subtract_offsets<V, Small>(p, at, Small ? offsets : total);
    point = prefetch.next(point);
    at.advance(p, piece);
  };
  for (int32_t first = 0; first < p.groups; first += p.record_groups) {
    if constexpr (Small) at.template prefetch_scales<Blocks>(p, s);  // the factors
    const Factors factors = at.skip_factors(p);
    const int32_t end = min_of(first + p.record_groups, p.groups);
    for (int32_t g = first; g < end; g++) add_group();
    if constexpr (Small) {
      add_with_factors<V>(factors.scales, p.scale.block, sums, total);
      if (p.has_offsets()) add_with_factors<V>(factors.zeros, p.zero.block, offsets, total);
    }
  }
  store_totals<V>(total, out);
}

// The same with fp32 weights and inputs. Two accumulators per row halve the length of the dependency chain.
template <class V, class Code, int Blocks, int Rows>
__attribute__((noinline)) void float_gemm(const Packed& p, const Streams& s, Records<Rows> records,
                                          float (*out)[Blocks][kRows]) {
  using F32 = typename V::F32;
  constexpr int kParts = kRows / V::lanes, kStrips = Blocks / Code::blocks;
  constexpr int kBlocksAtOnce = min_of(V::blocks_at_once(2 * Rows), Blocks);
  constexpr int kLines = 2 * kBlocksAtOnce / Code::blocks;  // of eight columns
  const lancebill_matrix& m = *p.matrix;
  const int64_t piece = int64_t{m.group} * kRows;
  const PrefetchCursor prefetch(p, s, piece);
  const Code code(p);
  F32 total[Blocks][kParts][Rows];
  clear_totals<V>(total);
  for (int32_t g = 0; g < p.groups; g++) {
    const int64_t first = int64_t{g} * m.group, at = g * piece;
    const PrefetchPoint point = prefetch.at(at);
    // Multiplies `kBlocksAtOnce` blocks from block `b` on, which is block `in_strip` of its strip.
    const auto multiply_from = [&](int b, auto in_strip) __attribute__((always_inline)) {
      for (int part = 0; part < kParts; part++) {
        F32 sums[kBlocksAtOnce][Rows][2];
        LANCEBILL_EACH(j, kBlocksAtOnce)
          LANCEBILL_EACH(r, Rows) sums[j][r][0] = sums[j][r][1] = V::zero();
        const uint8_t* codes = s.codes + b / Code::blocks * p.strip_bytes + at + part * Code::part_bytes;
        PrefetchSteps<V, kStrips, kLines> steps(point, p.strip_bytes, b / kBlocksAtOnce, m.group / 8);
        for (int k = 0; k < m.group; k += 8) {
          if (part == 0) steps.step();
          LANCEBILL_EACH(i, 8)
            LANCEBILL_EACH(j, kBlocksAtOnce) {
              const int block = in_strip + j;
              const uint8_t* strip = codes + block / Code::blocks * p.strip_bytes;
              const F32 weight = code.decode(strip + k * kRows, i, block % Code::blocks);
              LANCEBILL_EACH(r, Rows) {
                const float x = reinterpret_cast<const float*>(records[r])[first + k + i];
                sums[j][r][i % 2] = V::fma(weight, V::spread(x), sums[j][r][i % 2]);
              }
            }
        }
        LANCEBILL_EACH(j, kBlocksAtOnce) {
          const uint8_t* scales = s.scales + (b + j) * p.scale.block + g * p.scale.row;
          const uint8_t* offsets = s.zeros + (b + j) * p.zero.block + g * p.zero.row;
          const F32 scale = V::mul(V::scales(m.scale, scales, part), code.unit());
          LANCEBILL_EACH(r, Rows) {
            F32& sum = total[b + j][part][r];
            sum = V::fma(V::sum(sums[j][r][0], sums[j][r][1]), scale, sum);
            if (!p.has_offsets()) continue;
            const float x = reinterpret_cast<const float*>(records[r])[p.columns + g];
            sum = V::fma(V::floats(offsets, part), V::spread(-x), sum);
          }
        }
      }
    };
    for (int b = 0; b < Blocks; b += max_of(kBlocksAtOnce, Code::blocks)) {
      multiply_from(b, Constant<0>());
      if constexpr (kBlocksAtOnce < Code::blocks) multiply_from(b + 1, Constant<1>());
    }
  }
  store_totals<V>(total, out);
}

template <class V, class Code, bool Small, int Blocks, int Rows>
void gemm_of_scales(const Packed& p, const Streams& s, Records<Rows> records, float (*out)[Blocks][kRows]) {
  switch (planes_of(p)) {
    case 1: return integer_gemm<V, Code, 1, Small, Blocks, Rows>(p, s, records, out);
    case 2: return integer_gemm<V, Code, 2, Small, Blocks, Rows>(p, s, records, out);
    default: return integer_gemm<V, Code, 3, Small, Blocks, Rows>(p, s, records, out);
  }
}

template <class V, class Code, int Blocks, int Rows>
void gemm_of_codes(const Packed& p, const Streams& s, Records<Rows> records, float (*out)[Blocks][kRows]) {
  if constexpr (Code::small_scales) {
    if (p.matrix->scale == LANCEBILL_SCALE_I8) return gemm_of_scales<V, Code, true, Blocks>(p, s, records, out);
  }
  gemm_of_scales<V, Code, false, Blocks>(p, s, records, out);
}

// The vectors of a level for a number of input rows.
template <class V, int Rows>
struct VectorsFor {
  using Type = V;
};

// Selects the kernel by the codes of the matrix and the planes of its input. 4-bit codes always have at least two
// blocks.
template <class Level, int Blocks, int Rows>
void gemm(const Packed& p, const Streams& s, Records<Rows> records, float (*out)[Blocks][kRows]) {
  using V = typename VectorsFor<Level, Rows>::Type;
  if (p.matrix->codes == LANCEBILL_FLOAT8) return float_gemm<V, FloatBytes<V>, Blocks>(p, s, records, out);
  if (p.matrix->codes == LANCEBILL_BYTE) return gemm_of_codes<V, Bytes<V>, Blocks, Rows>(p, s, records, out);
  if (p.matrix->codes == LANCEBILL_BITS6) return gemm_of_codes<V, SixBits<V>, Blocks, Rows>(p, s, records, out);
  if constexpr (Blocks > 1) {
    if (p.in_floats) return float_gemm<V, FloatNibbles<V>, Blocks>(p, s, records, out);
    if (two_planes<V>(p)) return gemm_of_codes<V, Nibbles<V, 2>, Blocks, Rows>(p, s, records, out);
    if constexpr (V::plain_nibbles) {
      const bool whole_steps = p.matrix->group % (PlainNibbles<V>::step_units * kUnitColumns) == 0;
      if (p.plain_entries && whole_steps) return gemm_of_codes<V, PlainNibbles<V>, Blocks, Rows>(p, s, records, out);
    }
    if constexpr (V::short_sums) {
      if (p.top <= kMostInShorts) return gemm_of_codes<V, Nibbles<V, 1, true>, Blocks, Rows>(p, s, records, out);
    }
    gemm_of_codes<V, Nibbles<V, 1>, Blocks, Rows>(p, s, records, out);
  }
}

}  // namespace
}  // namespace lancebill
