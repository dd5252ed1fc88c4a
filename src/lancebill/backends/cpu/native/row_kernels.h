// The table of functions in rows.h, which is compiled once for each width of vectors.
#pragma once

#include <cstdint>

#include "lancebill.h"

namespace lancebill {

constexpr int kDenseRows = 8;  // rows of a dense matrix that are read at once, at most

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
  float (*sigmoid)(float x);
};

// Null where they were not built.
__attribute__((weak)) const RowKernels* rows_portable();
__attribute__((weak)) const RowKernels* rows_neon();
__attribute__((weak)) const RowKernels* rows_avx2();
__attribute__((weak)) const RowKernels* rows_avx512();

}  // namespace lancebill
