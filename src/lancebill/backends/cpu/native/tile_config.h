// What all products in AMX tiles share: the shape of the tile registers and the scale of an input row.
#pragma once

#include "convert.h"

namespace lancebill {
namespace {

constexpr int kTileRows = 16;

// The operand of LDTILECFG. With less than a tile of input rows, their tile (6) and its sums (0 and 1) have only as many
// lines: a product takes as long as it has lines.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(int64_t rows = kTileRows) {
    if (rows < kTileRows) lines[0] = lines[1] = lines[6] = static_cast<uint8_t>(rows);
  }
};

// The compiler's own function says that only the first eight bytes are read, so the others might never be written.
inline void load_tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

// The power of two that brings the largest value of a row to between 2^target and twice that; 1 if it is not finite. Rows
// are scaled because tile products below 2^-126 count as zero.
inline float tile_row_scale(const float* values, int64_t count, uint32_t target) {
  const float peak = largest(values, count);
  const uint32_t exponent = max_of(bits_as<uint32_t>(peak) & kExponentMask, (target + 1) << 23);
  return finite(peak) ? bits_as<float>(((254 + target) << 23) - exponent) : 1;
}

}  // namespace
}  // namespace lancebill
