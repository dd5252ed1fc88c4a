// Codes of a unit as the bytes that integer kernels multiply.
//
// A decoder has:
//   blocks       row blocks that share a unit
//   planes       bytes per code value: two where a value needs more than 7 bits
//   step_units   units decoded and multiplied in one loop step
//   step_lines   cache lines that hold them, of which `prefetch_lines` are prefetched at once
//   load         the bytes of one of these units
//   held_lines   lines that stay in registers until their last unit is decoded
//   small_scales scales may be small integers under factors (I8)
//   short_sums   products are first summed in 16 bits
//   whole_bytes  the odd block is not decoded: its sums come from those of the whole bytes (see GroupSums)
#pragma once

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

// Table entries whose products with bytes are summed in 16 bits: those of 16 columns, two at a time, are at most
// 4 * 2 * 31 * 128. Of 4-bit integers so are those of 32 columns: 8 * 2 * 15 * 128.
constexpr int kMostInShorts = 31;

// Whether an entry of the table takes two bytes.
template <class V>
bool two_planes(const Packed& p) {
  return p.top > (V::split_bytes ? 127 : 255);
}

// What is subtracted from every code of eight bits, where the products are of signed bytes.
template <class V>
int32_t code_bias(const Packed& p) {
  return V::signed_codes && (p.matrix->codes == LANCEBILL_BYTE || (p.top > 127 && !two_planes<V>(p))) ? 128 : 0;
}

// The table of a plane. Two planes are 7-bit digits.
template <class V, int Planes>
LANCEBILL_INLINE typename V::Table plane_table(const Packed& p, int plane) {
  uint8_t bytes[16];
  for (int i = 0; i < 16; i++) {
    const int32_t entry = p.matrix->table[i];
    const int32_t digit = plane == 0 ? entry & 127 : entry >> 7;
    bytes[i] = static_cast<uint8_t>(Planes == 1 ? entry - code_bias<V>(p) : digit);
  }
  return V::table(bytes);
}

// Units that are stored as they are.
template <class V, int Units>
struct WholeUnits {
  static constexpr int step_units = Units, step_lines = Units, prefetch_lines = 2, held_lines = 0;

  LANCEBILL_INLINE static typename V::Codes load(const uint8_t* lines, int unit) {
    return V::load(lines + unit * kUnit);
  }
};

// 4-bit codes through a table.
template <class V, int Planes, bool Short = false>
struct Nibbles : WholeUnits<V, Short ? 4 : 2> {
  static constexpr int blocks = 2, planes = Planes;
  static constexpr bool small_scales = true;
  static constexpr bool short_sums = Short, whole_bytes = false;
  typename V::Table tables[Planes];

  explicit Nibbles(const Packed& p) {
    for (int i = 0; i < Planes; i++) tables[i] = plane_table<V, Planes>(p, i);
  }

  LANCEBILL_INLINE typename V::Codes decode(int block, int plane, typename V::Codes unit) const {
    return block == 0 ? V::low(tables[plane], unit) : V::high(tables[plane], unit);
  }
};

// 4-bit integers, whose table is the identity. With 16-bit sums the products of 32 columns fit one sum.
template <class V>
struct PlainNibbles : WholeUnits<V, V::short_sums ? 8 : 2> {
  static constexpr int blocks = 2, planes = 1;
  static constexpr bool small_scales = true;
  static constexpr bool short_sums = V::short_sums, whole_bytes = V::whole_bytes;

  explicit PlainNibbles(const Packed&) {}

  LANCEBILL_INLINE typename V::Codes decode(int block, int, typename V::Codes unit) const {
    if (block == 0) return V::low_nibbles(unit);
    if constexpr (whole_bytes) {
      return unit;
    } else {
      return V::high_nibbles(unit);
    }
  }
};

// Integers of 7 and 8 bits.
template <class V>
struct Bytes : WholeUnits<V, 2> {
  static constexpr int blocks = 1, planes = V::split_bytes ? 2 : 1;
  static constexpr bool small_scales = false;
  static constexpr bool short_sums = false, whole_bytes = false;

  explicit Bytes(const Packed&) {}

  LANCEBILL_INLINE typename V::Codes decode(int, int plane, typename V::Codes unit) const {
    if constexpr (V::split_bytes) return plane == 0 ? V::low_bits(unit) : V::top_bit(unit);
    if constexpr (V::signed_codes) return V::to_signed(unit);
    return unit;
  }
};

// Integers of 5 and 6 bits.
template <class V>
struct SixBits {
  static constexpr int blocks = 1, planes = 1;
  static constexpr bool small_scales = true;
  static constexpr int step_units = kSixBitUnits, step_lines = kSixBitLines, prefetch_lines = kSixBitLines;
  static constexpr int held_lines = kSixBitLines;
  static constexpr bool short_sums = false, whole_bytes = false;

  explicit SixBits(const Packed&) {}

  LANCEBILL_INLINE static typename V::Codes load(const uint8_t* lines, int unit) {
    if (unit < kSixBitLines) return V::low_six(V::load(lines + unit * kUnit));
    return V::top_pairs(V::load(lines), V::load(lines + kUnit), V::load(lines + 2 * kUnit));
  }

  LANCEBILL_INLINE typename V::Codes decode(int, int, typename V::Codes unit) const { return unit; }
};

}  // namespace
}  // namespace lancebill
