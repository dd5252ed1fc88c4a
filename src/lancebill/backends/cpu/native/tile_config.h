// What all products in AMX tiles share: the shape of the tile registers and the scale of an input row.
#pragma once

#include <immintrin.h>

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

// The operand of LDTILECFG: four tiles of sums (0 to 3), two of the first operand (4 and 5) with as many lines, and two
// of the second (6 and 7).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(int64_t first_lines = kTileRows) {
    for (int i = 0; i < 6; i++) lines[i] = static_cast<uint8_t>(first_lines);
  }
};

// The compiler's own function says that only the first eight bytes are read, so the others might never be written.
inline void load_tile_config(const TileConfig& config) {
#ifdef __x86_64__
  asm volatile("ldtilecfg %0" : : "m"(config));
#else  // emulated
  _tile_loadconfig(&config);
#endif
}

// Loads a whole tile that was just written. The compiler's own function does not say that it reads memory, so what it
// reads might be written later.
template <int Tile>
LANCEBILL_INLINE void load_new_tile(const uint16_t* tile) {
  typedef uint16_t Numbers[kTileRows * kTileColumns];
#ifdef __x86_64__
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(tile), "r"(int64_t{kUnit}), "i"(Tile), "m"(*reinterpret_cast<const Numbers*>(tile)));
#else  // emulated
  _tile_loadd(Tile, tile, sizeof(Numbers) / kTileRows);
#endif
}

// The power of two that brings the largest value of a row to between 2^target and twice that; 1 if it is not finite. Rows
// are scaled because tile products below 2^-126 count as zero.
inline float tile_row_scale(float peak, uint32_t target) {
  const uint32_t exponent = max_of(bits_as<uint32_t>(peak) & kExponentMask, (target + 1) << 23);
  return finite(peak) ? bits_as<float>(((254 + target) << 23) - exponent) : 1;
}

}  // namespace
}  // namespace lancebill
