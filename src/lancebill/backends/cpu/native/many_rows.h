// The integer GEMM for many input rows: expands the codes of two row blocks to 16-bit integers, then multiplies them
// with all rows.
//
// kernel.h decodes each code once for a few rows, and multiplies bytes: two planes of each input. Here a code is
// decoded once for all rows, and a 16-bit input is multiplied as one number. What is expanded at once fits the first
// cache. The sums of a group are the same integers, and floats are added in the same order, so results have the same
// bits: it does not matter how many rows an expert has.
#pragma once

#include "kernel.h"

namespace lancebill {
namespace {

constexpr int kPanelBlocks = 2;       // gate and up of the same columns are finished together
constexpr int64_t kRowsAtOnce = 128;  // input rows that stay in the second cache while all codes pass
constexpr int kStepColumns = 16;      // the smallest group
constexpr int kMostGroups = kPanelColumns / kStepColumns;

typedef float BlockFloats[kPanelBlocks][kRows];

// Some columns of two row blocks. Columns are paired as `V::even_bytes` and `odd_bytes` find them: 0 and 2, 1 and 3 of
// every four. Words are code_value / step, less the zero point.
struct alignas(64) Panel {
  int16_t words[kPanelColumns / 2][kPanelBlocks][kRows][2];
  BlockFloats scales[kMostGroups], offsets[kMostGroups];                // of groups
  BlockFloats scale_factors[kMostGroups], offset_factors[kMostGroups];  // of records
};

// Sixteen columns of one row block. `lines`: their codes.
template <class V, class Code>
LANCEBILL_INLINE void expand_step(const Code& code, const uint8_t* lines, int block, typename V::Codes zero,
                                  int16_t (*words)[kPanelBlocks][kRows][2]) {
  LANCEBILL_EACH(u, kStepColumns / kUnitColumns) {
    typename V::Codes bytes = Code::load(lines, u);
    if constexpr (Code::blocks == 2) bytes = code.decode(block, 0, bytes);
    V::store_words(words[2 * u][block][0], V::subtract_words(V::even_bytes(bytes), zero));
    V::store_words(words[2 * u + 1][block][0], V::subtract_words(V::odd_bytes(bytes), zero));
  }
}

// Expands `groups` groups from `first` on of row block `block` and the one after it.
template <class V, class Code>
void expand_codes(const Packed& p, int64_t block, bool alone, int32_t first, int32_t groups, Panel& panel) {
  constexpr int kStepBytes = kStepColumns / kUnitColumns * kUnit / Code::step_units * Code::step_lines;
  const Code code(p);
  const int32_t steps = p.matrix->group / kStepColumns;
  LANCEBILL_EACH(b, kPanelBlocks) {
    const int64_t own = alone ? block : block + b;
    const uint8_t* lines = p.codes(own) + int64_t{first} * steps * kStepBytes;
    auto* words = panel.words;
    for (int32_t g = 0; g < groups; g++) {
      const bool zeros = p.matrix->zero == LANCEBILL_ZERO_U8;
      const auto zero = zeros ? V::words(p.zeros(own) + p.zero.at(first + g)) : V::broadcast_words(p.matrix->center);
      for (int32_t i = 0; i < steps; i++, lines += kStepBytes, words += kStepColumns / 2) {
        LANCEBILL_EACH(l, kStepBytes / kUnit) {
          prefetch_line(lines + kFarBytes + l * kUnit, lines + kNearBytes + l * kUnit);
        }
        expand_step<V>(code, lines, b, zero, words);
      }
    }
  }
}

// The numbers of groups as floats. `kind`: of scales.
template <class V>
void expand_numbers(const GroupArray& array, const uint8_t* blocks[kPanelBlocks], int32_t kind, bool small,
                    int32_t first, int32_t groups, BlockFloats* numbers, BlockFloats* factors) {
  LANCEBILL_EACH(b, kPanelBlocks) {
    for (int32_t g = 0; g < groups; g++) {
      const uint8_t* stored = blocks[b] + array.at(first + g);
      typename V::F32 values[1];
      if (small) {
        values[0] = V::signed_bytes(stored, 0);
      } else {
        load_scales<V>(kind, stored, 0, 0, values);
      }
      V::store(numbers[g][b], values[0]);
    }
    const int32_t record = 1 << array.record_shift;
    for (int32_t g = 0; small && g < groups; g += record) {
      V::store(factors[g / record][b], V::floats(blocks[b] + array.record_of(first + g), 0));
    }
  }
}

template <class V>
void expand_panel(const Packed& p, int64_t block, bool alone, int32_t first, int32_t groups, Panel& panel) {
  const lancebill_matrix& m = *p.matrix;
  switch (m.codes) {
    case LANCEBILL_TABLE4: expand_codes<V, Nibbles<V, 1>>(p, block, alone, first, groups, panel); break;
    case LANCEBILL_BYTE: expand_codes<V, Bytes<V>>(p, block, alone, first, groups, panel); break;
    default: expand_codes<V, SixBits<V>>(p, block, alone, first, groups, panel);
  }
  const int64_t second = alone ? block : block + 1;
  const uint8_t* scales[] = {p.scales(block), p.scales(second)};
  expand_numbers<V>(p.scale, scales, m.scale, m.scale == LANCEBILL_SCALE_I8, first, groups, panel.scales,
                    panel.scale_factors);
  if (!p.has_offsets()) return;
  const uint8_t* zeros[] = {p.zeros(block), p.zeros(second)};
  expand_numbers<V>(p.zero, zeros, LANCEBILL_SCALE_F32, m.zero == LANCEBILL_ZERO_OFFSET_I8, first, groups,
                    panel.offsets, panel.offset_factors);
}

// The inputs of some rows, from a group on.
template <int Rows>
struct WordInputs {
  const int16_t* x[Rows];
  const InputGroup* groups[Rows];
};

// sums = the products of one group of `Blocks` row blocks, from `block` on.
template <class V, int Blocks, int Rows>
LANCEBILL_INLINE void multiply_group(const int16_t (*words)[kPanelBlocks][kRows][2], int32_t block, int32_t columns,
                                     const int16_t* const (&x)[Rows], int64_t first,
                                     typename V::I32 (&sums)[Blocks][Rows]) {
  LANCEBILL_EACH(b, Blocks)
    LANCEBILL_EACH(r, Rows) sums[b][r] = V::broadcast(0);
  for (const int64_t end = first + columns; first < end; first += kStepColumns, words += kStepColumns / 2) {
    LANCEBILL_EACH(i, kStepColumns / 2) {
      typename V::Codes weights[Blocks];
      LANCEBILL_EACH(b, Blocks) weights[b] = V::load_words(words[i][block + b][0]);
      LANCEBILL_EACH(r, Rows) {
        const auto pair = V::broadcast_pair(x[r] + first + 2 * i);
        LANCEBILL_EACH(b, Blocks) sums[b][r] = V::dot_words(sums[b][r], weights[b], pair);
      }
    }
  }
}

// totals += `Rows` input rows times the panel. `Small`: see integer_gemm, whose order of sums this repeats.
template <class V, bool Small, bool Offsets, int Rows>
__attribute__((noinline)) void multiply_panel(const Packed& p, const Panel& panel, int32_t groups,
                                              const WordInputs<Rows>& inputs, BlockFloats* totals) {
  using F32 = typename V::F32;
  constexpr int kBlocks = V::word_blocks;
  const int32_t columns = p.matrix->group, record = Small ? p.record_groups : groups;
  for (int block = 0; block < kPanelBlocks; block += kBlocks) {
    F32 total[kBlocks][Rows];
    LANCEBILL_EACH(b, kBlocks)
      LANCEBILL_EACH(r, Rows) total[b][r] = V::floats(reinterpret_cast<const uint8_t*>(totals[r][block + b]), 0);
    for (int32_t start = 0, number = 0; start < groups; start += record, number++) {
      F32 record_sums[kBlocks][Rows], record_offsets[kBlocks][Rows];
      if constexpr (Small) {
        LANCEBILL_EACH(b, kBlocks)
          LANCEBILL_EACH(r, Rows) record_sums[b][r] = record_offsets[b][r] = V::zero();
      }
      F32(&scaled)[kBlocks][Rows] = Small ? record_sums : total;
      F32(&shifted)[kBlocks][Rows] = Small ? record_offsets : total;
      for (int32_t g = start; g < min_of(start + record, groups); g++) {
        typename V::I32 sums[kBlocks][Rows];
        multiply_group<V>(panel.words + g * columns / 2, block, columns, inputs.x, g * columns, sums);
        LANCEBILL_EACH(b, kBlocks) {
          const F32 scale = V::floats(reinterpret_cast<const uint8_t*>(panel.scales[g][block + b]), 0);
          LANCEBILL_EACH(r, Rows) {
            const F32 factor = V::mul(scale, V::spread(inputs.groups[r][g].scale));
            scaled[b][r] = V::fma(V::to_float(sums[b][r]), factor, scaled[b][r]);
          }
          if constexpr (Offsets) {
            const F32 offset = V::floats(reinterpret_cast<const uint8_t*>(panel.offsets[g][block + b]), 0);
            LANCEBILL_EACH(r, Rows) {
              shifted[b][r] = V::fma(offset, V::spread(-inputs.groups[r][g].sum), shifted[b][r]);
            }
          }
        }
      }
      if constexpr (Small) {
        add_with_factors<V>(panel.scale_factors[number][block], record_sums, total);
        if constexpr (Offsets) add_with_factors<V>(panel.offset_factors[number][block], record_offsets, total);
      }
    }
    LANCEBILL_EACH(b, kBlocks)
      LANCEBILL_EACH(r, Rows) V::store(totals[r][block + b], total[b][r]);
  }
}

template <class V, int Rows>
void multiply_inputs(const Packed& p, const Panel& panel, int32_t first, int32_t groups, const Inputs& inputs,
                     int64_t slot, BlockFloats* totals) {
  WordInputs<Rows> rows;
  LANCEBILL_EACH(r, Rows) {
    const uint8_t* record = inputs.record(slot + r);
    rows.x[r] = reinterpret_cast<const int16_t*>(record) + int64_t{first} * p.matrix->group;
    rows.groups[r] = reinterpret_cast<const InputGroup*>(record + 2 * p.columns) + first;
  }
  const bool small = p.matrix->scale == LANCEBILL_SCALE_I8;
  if (small && p.has_offsets()) return multiply_panel<V, true, true, Rows>(p, panel, groups, rows, totals);
  if (small) return multiply_panel<V, true, false, Rows>(p, panel, groups, rows, totals);
  if (p.has_offsets()) return multiply_panel<V, false, true, Rows>(p, panel, groups, rows, totals);
  multiply_panel<V, false, false, Rows>(p, panel, groups, rows, totals);
}

// `rows` input rows, at most `Rows`.
template <class V, int Rows>
void multiply_some(int32_t rows, const Packed& p, const Panel& panel, int32_t first, int32_t groups,
                   const Inputs& inputs, int64_t slot, BlockFloats* totals) {
  if constexpr (Rows > V::word_rows / 2) {
    if (rows < Rows) return multiply_some<V, Rows - 1>(rows, p, panel, first, groups, inputs, slot, totals);
  }
  multiply_inputs<V, Rows>(p, panel, first, groups, inputs, slot, totals);
}

// All rows of [slot, end) in calls of about as many.
template <class V>
void multiply_all(const Packed& p, const Panel& panel, int32_t first, int32_t groups, const Inputs& inputs,
                  int64_t slot, int64_t end, BlockFloats* totals) {
  constexpr ManyRows kFrom = V::many_rows;
  constexpr int kFewest = min_of(min_of(kFrom.bytes, kFrom.six_bits), min_of(kFrom.plain, kFrom.others));
  static_assert(V::word_rows / 2 <= kFewest, "no call has fewer than half of the most rows");
  const int32_t all = static_cast<int32_t>(end - slot), calls = (all + V::word_rows - 1) / V::word_rows;
  const int32_t fewest = all / calls, larger = all % calls;
  for (int32_t call = 0; call < calls; call++) {
    const int32_t rows = fewest + (call < larger);
    multiply_some<V, V::word_rows>(rows, p, panel, first, groups, inputs, slot, totals);
    slot += rows;
    totals += rows;
  }
}

// Groups that are expanded at once: whole records, and about as many each time.
inline int32_t groups_of_panel(const Packed& p) {
  const int32_t most = kPanelColumns / p.matrix->group, panels = (p.groups + most - 1) / most;
  const int32_t even = (p.groups + panels - 1) / panels, record = p.matrix->factor == 0 ? 1 : p.record_groups;
  return static_cast<int32_t>(round_up(even, record));
}

// Row blocks [low, high) of one expert times its slots [slot, end), as `multiply_blocks` in layer.h.
template <class V, class Results>
void multiply_many_rows(const Packed& p, const Inputs& inputs, int64_t low, int64_t high, int64_t slot, int64_t end,
                        const Results& results) {
  static_assert(V::lanes == kRows, "a vector has all rows of a block");
  Panel panel;
  alignas(64) BlockFloats totals[kRowsAtOnce];
  const int32_t panel_groups = groups_of_panel(p);
  for (int64_t parts = (end - slot + kRowsAtOnce - 1) / kRowsAtOnce; parts > 0; parts--) {
    const int64_t rows = (end - slot + parts - 1) / parts;
    for (int64_t block = low; block < high; block += kPanelBlocks) {
      const bool alone = block + 1 == high;
      std::memset(totals, 0, sizeof(BlockFloats) * rows);
      for (int32_t first = 0; first < p.groups; first += panel_groups) {
        const int32_t groups = min_of(panel_groups, p.groups - first);
        expand_panel<V>(p, block, alone, first, groups, panel);
        multiply_all<V>(p, panel, first, groups, inputs, slot, slot + rows, totals);
      }
      const auto load = [&](int64_t row, auto& values) __attribute__((always_inline)) {
        std::memcpy(values, totals[row], sizeof values);
      };
      alone ? results.template write<1>(slot, rows, block, load)
            : results.template write<kPanelBlocks>(slot, rows, block, load);
    }
    slot += rows;
  }
}

}  // namespace
}  // namespace lancebill
