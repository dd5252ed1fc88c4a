// The table of functions in rows.h, which is compiled once for each width of vectors.
#pragma once

#include <cstdint>

#include "lancebill.h"

namespace lancebill {

// Rows of x as tiles read them (tile_dense.h), in blocks of kDenseBlock rows.
struct DenseInputs {
  uint16_t* numbers;  // kDenseParts for each number of x
  float* factors;     // one for each row
};
constexpr int64_t kDenseBlock = 16, kDenseParts = 2;

// Dense bf16 matrices in tiles. The number of columns and all rows `first` and `end` are multiples of these.
constexpr int64_t kDenseTileRows = 16, kDenseTileColumns = 32;
struct DenseTiles {
  // One block of x, which may have fewer rows.
  void (*write)(const float* x, int64_t x_stride, int64_t rows, int64_t columns, const DenseInputs& block);
  void (*multiply)(const lancebill_dense& matrix, int64_t first, int64_t end, const DenseInputs& inputs, int64_t count,
                   float* out, int64_t out_stride);
};

// Dense matrices in panels (panel_dense.h). Rows of x are in blocks of `block`: [block][columns_of(columns)][row].
struct DensePanels {
  // One block of x, which may have fewer rows; all of the block is written.
  void (*write)(const float* x, int64_t x_stride, int64_t rows, int64_t columns, float* block);
  // Rows [first, end) of the matrix, a multiple of `block`; those from `next` on are prefetched.
  void (*multiply)(const lancebill_dense& matrix, int64_t first, int64_t end, int64_t next, const float* inputs,
                   int64_t count, float* out, int64_t out_stride);
  int64_t (*rows)(int64_t columns);        // of a matrix that are multiplied at once; 0: too many columns
  int64_t (*columns_of)(int64_t columns);  // that a block has room for, at most `block` more
  int64_t (*from)(int64_t columns);        // rows of x from which panels are faster
  int64_t block;
};

// Neighbouring tokens of one sequence, in heads that have the same keys and values: [token][heads][dim].
struct QueryBlock {
  const float* q;
  float* out;
  int64_t q_stride, out_stride;  // of tokens
  int64_t tokens, heads, dim;
  int64_t position, window;  // of the first token; how many tokens each sees, itself included
  float scale;
  const void *keys, *values;  // of the whole sequence
  int32_t type;
};
constexpr int64_t kAttendRows = 96, kAttendDim = 256;  // at most, of queries

struct RowKernels {
  void (*dense)(const lancebill_dense& matrix, int64_t first, int64_t end, const float* x, int64_t x_stride,
                int64_t count, float* out, int64_t out_stride);
  void (*norm)(const float* x, const float* weights, int64_t width, float eps, float* out);
  void (*add)(const float* x, float factor, int64_t width, float* out);
  void (*gate)(const lancebill_layer& how, const float* x, int64_t width, float* out);
  void (*rotate)(const float* cos, const float* sin, int64_t angles, float* x);
  void (*store)(const float* x, int64_t count, int32_t type, void* out, int64_t first);
  // `heads` neighbouring heads that have the same keys and values.
  void (*attend)(const float* q, int64_t heads, const void* keys, const void* values, int32_t type, int64_t dim,
                 int64_t first, int64_t end, float scale, float* out);
  void (*attend_block)(const QueryBlock& block);
  float (*sigmoid)(float x);
  const DenseTiles* tiles;  // null: none
  const DensePanels* panels;
  int64_t dense_rows;  // of a dense matrix: a multiple of those that are read at once
};

// Null where they were not built.
__attribute__((weak)) const RowKernels* rows_portable();
__attribute__((weak)) const RowKernels* rows_neon();
__attribute__((weak)) const RowKernels* rows_avx2();
__attribute__((weak)) const RowKernels* rows_avx512();
__attribute__((weak)) const RowKernels* rows_amx();

}  // namespace lancebill
