// The AMX GEMM for many input rows: expands weights to bf16 tiles with scales applied, then multiplies tiles.
//
// Expanded weights never leave the caches. With up to kPassRows input rows there is one pass over a small ring of tiles
// in L1, expanded one step ahead of the multiplication so that the vector and the tile unit both stay busy. With more
// rows, both row blocks stay expanded in L2 for the later passes.
#pragma once

#include "inputs.h"
#include "prefetch.h"
#include "tile_config.h"
#include "tile_expand.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

// sums[input tile][block] = up to 48 input rows times two row blocks. With `Expand` the pass also expands the weights.
template <int InputTiles, bool Expand>
void tile_pass(const Expander& weights, int64_t tiles, const uint8_t* inputs, int64_t stride,
               float (*sums)[kPair][256]) {
  const uint8_t *inputs1 = inputs + kTileRows * stride, *inputs2 = inputs + 2 * kTileRows * stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (InputTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if constexpr (InputTiles > 2) {
    _tile_zero(4);
    _tile_zero(5);
  }
  if (Expand) weights.expand(0, 0);
  if (Expand) weights.expand(0, 1);
  for (int64_t k = 0; k < tiles; k++) {
    const bool more = Expand && k + 1 < tiles;
    const int64_t at = k * kTileColumns * 2;
    _tile_loadd(7, weights.tile(k, 0), 64);
    if constexpr (InputTiles > 2) {  // the second block starts with the last input tile, which is still loaded
      _tile_loadd(6, inputs + at, stride);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(6, inputs1 + at, stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(6, inputs2 + at, stride);
      _tile_dpbf16ps(4, 6, 7);
      if (more) weights.expand(k + 1, 0);
      _tile_loadd(7, weights.tile(k, 1), 64);
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(6, inputs1 + at, stride);
      _tile_dpbf16ps(3, 6, 7);
      _tile_loadd(6, inputs + at, stride);
      _tile_dpbf16ps(1, 6, 7);
    } else {
      _tile_loadd(6, inputs + at, stride);
      _tile_dpbf16ps(0, 6, 7);
      if constexpr (InputTiles > 1) {
        _tile_loadd(5, inputs1 + at, stride);
        _tile_dpbf16ps(2, 5, 7);
      }
      if (more) weights.expand(k + 1, 0);
      _tile_loadd(7, weights.tile(k, 1), 64);
      _tile_dpbf16ps(1, 6, 7);
      if constexpr (InputTiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
    if (more) weights.expand(k + 1, 1);
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  if constexpr (InputTiles > 1) {
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  }
  if constexpr (InputTiles > 2) {
    _tile_stored(4, sums[2][0], 64);
    _tile_stored(5, sums[2][1], 64);
  }
}

template <bool Expand>
void tile_pass(int64_t input_tiles, const Expander& weights, int64_t tiles, const uint8_t* inputs, int64_t stride,
               float (*sums)[kPair][256]) {
  if (input_tiles == 1) {
    tile_pass<1, Expand>(weights, tiles, inputs, stride, sums);
  } else if (input_tiles == 2) {
    tile_pass<2, Expand>(weights, tiles, inputs, stride, sums);
  } else {
    tile_pass<3, Expand>(weights, tiles, inputs, stride, sums);
  }
}

struct Amx : Avx512 {
  static constexpr bool tiles = true;

  // Writes an input row as bf16: the upper halves of the scaled fp32 values, which are exact. For TABLE4 the columns are
  // permuted to match the pairs of `table_unit`. Returns the factor for the sums of this row.
  static float write_tile_row(const Packed& p, const float* values, uint8_t* record) {
    const float scale = tile_row_scale(values, p.columns, expands_in_fp16(p) ? kInputExponent : 1);
    const __m512 input_scale = _mm512_set1_ps(scale);
    const __m512i natural = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i paired = _mm512_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m512i order = p.matrix->codes == LANCEBILL_TABLE4 ? paired : natural;
    for (int64_t k = 0; k < p.columns; k += 16) {
      const __m512i numbers = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(values + k), input_scale));
      const __m512i words = _mm512_permutexvar_epi32(order, numbers);
      const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(record + 2 * k), halves);
    }
    return (expands_in_fp16(p) ? 0x1p112f : 1) / scale;
  }

  // Implements `multiply_blocks` in layer.h.
  template <class Results>
  static void tile_gemm(const Call& call, const Packed& p, int64_t low, int64_t high, int64_t next, int64_t slot,
                           int64_t end, int thread, const Results& results) {
    const Inputs& inputs = call.inputs_of(p);
    uint16_t* buffer = reinterpret_cast<uint16_t*>(row_buffers(call, thread).values + 3 * call.row_floats);
    const int64_t count = p.columns / kTileColumns;
    const TileConfig config(end - slot);
    load_tile_config(config);
    alignas(64) float sums[kPassRows / kTileRows][kPair][kTileRows * kRows];
    for (int64_t block = low; block < high; block += kPair) {
      const int64_t blocks = min_of<int64_t>(kPair, high - block);
      const Streams s = streams(p, block, block + kPair < high ? block + kPair : next);
      const Expander weights(p, s, blocks == 1, buffer, end - slot <= kPassRows ? kRing - 1 : INT64_MAX);
      for (int64_t first = slot; first < end; first += kPassRows) {
        const int64_t rows = min_of<int64_t>(end - first, kPassRows), input_tiles = (rows + kTileRows - 1) / kTileRows;
        first == slot ? tile_pass<true>(input_tiles, weights, count, inputs.own_record(first), inputs.stride, sums)
                      : tile_pass<false>(input_tiles, weights, count, inputs.own_record(first), inputs.stride, sums);
        const auto write = [&](auto count) __attribute__((always_inline)) {  // a constant: loops without counters
          for (int64_t r = 0; r < rows; r++) {
            alignas(64) float values[count][kRows];
            for (int b = 0; b < count; b++) {
              const float* own = sums[r / kTileRows][b] + r % kTileRows * kRows;
              weights.finish(b, own, inputs.factors[first + r], values[b]);
            }
            results.write(first + r, block, count, values[0]);
          }
        };
        blocks == kPair ? write(Constant<kPair>()) : write(Constant<1>());
      }
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace lancebill
