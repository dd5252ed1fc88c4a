// Products of dense bf16 matrices and several rows of fp32, in AMX tiles.
//
// The matrix is read as torch stores it: sixteen of its rows are the lines of the first operand. The lines of the second
// are pairs of columns of sixteen input rows, so the inputs are transposed first, once for the whole matrix. A number of
// the input becomes the sum of two bf16 numbers, which keep 16 of its 24 bits.
#pragma once

#include <immintrin.h>

#include "row_kernels.h"
#include "rows.h"
#include "tile_config.h"
#include "transpose.h"

namespace lancebill {
namespace {

static_assert(kDenseBlock == kTileRows && kDenseTileRows == kTileRows && kDenseTileColumns == kTileColumns, "");
constexpr int kParts = kDenseParts;
constexpr int kInputTile = kTileRows * kTileColumns;  // numbers
constexpr int kInputStep = kParts * kInputTile;       // all tiles of the same columns

// Word j of line i becomes word i of line j, in memory.
LANCEBILL_INLINE void transpose_tile(const void* from, void* to) {
  const auto* in = static_cast<const char*>(from);
  auto* out = static_cast<char*>(to);
  transpose([&](int i) __attribute__((always_inline)) { return vector_at<Words>(in + 64 * i); },
            [&](int i, Words words) __attribute__((always_inline)) {
              _mm512_storeu_si512(out + 64 * i, (__m512i)words);
            });
}

// Up to sixteen rows of x: [columns / 32][parts][16 pairs of columns][16 rows][2]. Missing rows are zero.
void write_dense_inputs(const float* x, int64_t x_stride, int64_t rows, int64_t columns, const DenseInputs& block) {
  float scales[kTileRows];
  for (int64_t r = 0; r < rows; r++) {
    scales[r] = tile_row_scale(largest(x + r * x_stride, columns), 1);
    block.factors[r] = 1 / scales[r];
  }
  uint16_t* tiles = block.numbers;
  alignas(64) uint16_t parts[kParts][kTileRows][kTileColumns] = {};
  for (int64_t k = 0; k < columns; k += kTileColumns, tiles += kInputStep) {
    for (int64_t r = 0; r < rows; r++) {
      const float* values = x + r * x_stride + k;
      for (int i = 0; i < kTileColumns; i++) {
        const float value = values[i] * scales[r];
        const uint16_t high = to_bf16(value);
        const float rest = value - from_bf16(high);
        parts[0][r][i] = high;
        parts[1][r][i] = rest == rest ? to_bf16(rest) : 0;  // infinity has no rest
      }
    }
    for (int p = 0; p < kParts; p++) transpose_tile(parts[p], tiles + p * kInputTile);
  }
}

typedef float Sums[kTileRows][kTileRows];  // of matrix rows and input rows

// sums[2 * block + input tile] = `Blocks` blocks of sixteen matrix rows times `Inputs` tiles of sixteen input rows.
template <int Blocks, int Inputs>
void dense_pass(const uint16_t* weights, int64_t columns, const uint16_t* inputs, Sums (&sums)[4]) {
  const int64_t stride = 2 * columns, next = kParts * kTileRows * columns;  // the second tile of input rows
  _tile_zero(0);
  if constexpr (Inputs > 1) _tile_zero(1);
  if constexpr (Blocks > 1) _tile_zero(2);
  if constexpr (Blocks > 1 && Inputs > 1) _tile_zero(3);
  for (int64_t k = 0; k < columns; k += kTileColumns, inputs += kInputStep) {
    _tile_loadd(4, weights + k, stride);
    if constexpr (Blocks > 1) _tile_loadd(5, weights + kTileRows * columns + k, stride);
    for (int p = 0; p < kParts; p++) {
      _tile_loadd(6, inputs + p * kInputTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (Blocks > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (Inputs > 1) {
        _tile_loadd(7, inputs + next + p * kInputTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Blocks > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (Inputs > 1) _tile_stored(1, sums[1], 64);
  if constexpr (Blocks > 1) _tile_stored(2, sums[2], 64);
  if constexpr (Blocks > 1 && Inputs > 1) _tile_stored(3, sums[3], 64);
}

// Writes the sums of sixteen matrix rows and up to sixteen input rows.
LANCEBILL_INLINE void write_sums(const Sums& sums, const float* bias, const float* factors, int64_t rows, float* out,
                                 int64_t out_stride) {
  alignas(64) Sums by_input;
  transpose_tile(sums, by_input);
  const Floats added = bias == nullptr ? Floats{} : vector_at<Floats>(bias);
  for (int64_t r = 0; r < rows; r++) {
    store_at(out + r * out_stride, multiply_add(vector_at<Floats>(by_input[r]), spread(factors[r]), added));
  }
}

template <int Blocks>
LANCEBILL_INLINE void dense_blocks(const lancebill_dense& m, int64_t row, const DenseInputs& inputs, int64_t count,
                                   float* out, int64_t out_stride) {
  const uint16_t* weights = static_cast<const uint16_t*>(m.weights) + row * m.columns;
  alignas(64) Sums sums[4];
  for (int64_t i = 0; i < count; i += 2 * kTileRows) {
    const uint16_t* tiles = inputs.numbers + i * kParts * m.columns;
    const bool both = count - i > kTileRows;
    both ? dense_pass<Blocks, 2>(weights, m.columns, tiles, sums)
         : dense_pass<Blocks, 1>(weights, m.columns, tiles, sums);
    for (int b = 0; b < Blocks; b++) {
      const int64_t column = row + b * kTileRows;
      const float* bias = m.bias == nullptr ? nullptr : m.bias + column;
      for (int t = 0; t < 1 + both; t++) {
        const int64_t first = i + t * kTileRows;
        write_sums(sums[2 * b + t], bias, inputs.factors + first, min_of<int64_t>(kTileRows, count - first),
                   out + first * out_stride + column, out_stride);
      }
    }
  }
}

// Rows [first, end) of the matrix, in pairs of blocks.
void tile_dense(const lancebill_dense& m, int64_t first, int64_t end, const DenseInputs& inputs, int64_t count,
                float* out, int64_t out_stride) {
  const TileConfig config;
  load_tile_config(config);
  int64_t row = first;
  for (; row + 2 * kTileRows <= end; row += 2 * kTileRows) dense_blocks<2>(m, row, inputs, count, out, out_stride);
  if (row < end) dense_blocks<1>(m, row, inputs, count, out, out_stride);
  _tile_release();
}

}  // namespace
}  // namespace lancebill
