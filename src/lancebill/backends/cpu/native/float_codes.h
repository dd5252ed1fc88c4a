// Codes as the fp32 weights that `float_gemm` multiplies.
//
// A decoder has:
//   blocks      row blocks that share a strip
//   part_bytes  from the rows of one vector to those of the next
//   decode      the weights of one of the eight columns at `codes`, of a block of the strip
//   unit        what they are multiplied with
#pragma once

#include "plan.h"

namespace lancebill {
namespace {

// Minifloats, which are stored column by column.
template <class V>
struct FloatBytes {
  static constexpr int blocks = 1, part_bytes = V::lanes;
  typename V::Minifloat minifloat;

  explicit FloatBytes(const Packed& p) : minifloat(p) {}

  LANCEBILL_INLINE typename V::F32 unit() const { return minifloat.unit; }
  LANCEBILL_INLINE typename V::F32 decode(const uint8_t* codes, int column, int) const {
    return minifloat.decode(codes + column * kRows);
  }
};

// 4-bit codes through a table whose entries are too long for bytes.
template <class V>
struct FloatNibbles {
  static constexpr int blocks = 2, part_bytes = kUnit / kRows * V::lanes;
  typename V::FloatTable table;
  float step;

  explicit FloatNibbles(const Packed& p) : table(p.values), step(p.unit) {}

  LANCEBILL_INLINE typename V::F32 unit() const { return V::spread(step); }
  LANCEBILL_INLINE typename V::F32 decode(const uint8_t* codes, int column, int block) const {
    const int byte = column % kUnitColumns;
    return table.at(V::load(codes + column / kUnitColumns * kUnit), 2 * byte + block);
  }
};

}  // namespace
}  // namespace lancebill
