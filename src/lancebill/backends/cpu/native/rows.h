// What a decode step computes outside quantised matrices, on rows of fp32: norms, dense products, rotary positions,
// attention. Few rows at a time, so every function reads its weights once and keeps the rows in the first cache.
//
// The order of a sum depends neither on the number of rows nor on the threads, nor is it another in panels
// (panel_dense.h). Tiles and blocks of queries have other orders: tile_dense.h, attend_block.h.
#pragma once

#include "activate.h"
#include "attend_block.h"
#include "panel_dense.h"
#include "row_kernels.h"
#include "row_vectors.h"

namespace lancebill {
namespace {

constexpr int64_t kPiece = 64;  // keys that are attended to at once

// N rows of the matrix times M rows of x.
template <class Stored, int N, int M>
LANCEBILL_INLINE void dense_block(const lancebill_dense& m, int64_t row, const float* x, int64_t x_stride, float* out,
                                  int64_t out_stride) {
  const auto* w = static_cast<const typename Stored::Number*>(m.weights) + row * m.columns;
  const int64_t columns = m.columns, ahead = N * columns;  // the next block
  Floats sums[N][M] = {};
  const auto add = [&](int64_t k, const Floats (&weights)[N]) __attribute__((always_inline)) {
    LANCEBILL_EACH(i, M) {
      const Floats input = in_register(vector_at<Floats>(x + i * x_stride + k));
      LANCEBILL_EACH(n, N) sums[n][i] = multiply_add(weights[n], input, sums[n][i]);
    }
  };
  int64_t k = 0;
  if constexpr (kLoadPairs) {
    for (; k + 2 * kLanes <= columns; k += 2 * kLanes) {
      Floats first[N], second[N];
      LANCEBILL_EACH(n, N) {
        if (kPrefetchRows) __builtin_prefetch(w + n * columns + k + ahead, 0, 3);
        Stored::load_pair(w + n * columns + k, first[n], second[n]);
      }
      add(k, first);
      add(k + kLanes, second);
    }
  }
  for (; k + kLanes <= columns; k += kLanes) {
    Floats weights[N];
    LANCEBILL_EACH(n, N) {
      if (kPrefetchRows) __builtin_prefetch(w + n * columns + k + ahead, 0, 3);
      weights[n] = Stored::load(w + n * columns + k);
    }
    add(k, weights);
  }
  float totals[M][N];
  lanes_sums(sums, totals);
  LANCEBILL_EACH(i, M) {
    LANCEBILL_EACH(n, N) {
      float total = totals[i][n];
      for (int64_t j = k; j < columns; j++) {
        total = multiply_add(Stored::one(w[n * columns + j]), x[i * x_stride + j], total);
      }
      out[i * out_stride + row + n] = total + (m.bias == nullptr ? 0 : m.bias[row + n]);
    }
  }
}

// Rows [first, end) of the matrix, N at a time, times M rows of x.
template <class Stored, int N, int M>
LANCEBILL_INLINE void dense_rows(const lancebill_dense& m, int64_t first, int64_t end, const float* x,
                                 int64_t x_stride, float* out, int64_t out_stride) {
  int64_t row = first;
  for (; row + N <= end; row += N) dense_block<Stored, N, M>(m, row, x, x_stride, out, out_stride);
  for (; row < end; row++) dense_block<Stored, 1, M>(m, row, x, x_stride, out, out_stride);
}

// Rows [first, end) of the matrix times all rows of x. A few rows of x stay in the first cache while all rows of the
// matrix pass.
template <class Stored>
LANCEBILL_INLINE void dense_of(const lancebill_dense& m, int64_t first, int64_t end, const float* x, int64_t x_stride,
                               int64_t count, float* out, int64_t out_stride) {
  int64_t i = 0;
  for (; i + kManyInputs <= count; i += kManyInputs) {
    dense_rows<Stored, kManyRows, kManyInputs>(m, first, end, x + i * x_stride, x_stride, out + i * out_stride,
                                               out_stride);
  }
  for (; i + 4 <= count; i += 4) {
    dense_rows<Stored, kFewRows, 4>(m, first, end, x + i * x_stride, x_stride, out + i * out_stride, out_stride);
  }
  x += i * x_stride;
  out += i * out_stride;
  switch (count - i) {
    case 1: return dense_rows<Stored, kSingleRows, 1>(m, first, end, x, x_stride, out, out_stride);
    case 2: return dense_rows<Stored, 4, 2>(m, first, end, x, x_stride, out, out_stride);
    case 3: return dense_rows<Stored, 4, 3>(m, first, end, x, x_stride, out, out_stride);
  }
}

void dense(const lancebill_dense& m, int64_t first, int64_t end, const float* x, int64_t x_stride, int64_t count,
           float* out, int64_t out_stride) {
  with_type(m.type, [&](auto stored) {
    dense_of<decltype(stored)>(m, first, end, x, x_stride, count, out, out_stride);
  });
}

LANCEBILL_INLINE float sum_of_squares(const float* x, int64_t width) {
  constexpr int kSums = 4;
  Floats sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes) {
    LANCEBILL_EACH(n, kSums) {
      const Floats v = vector_at<Floats>(x + i + n * kLanes);
      sums[n] += v * v;
    }
  }
  float total = lanes_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < width; i++) total += x[i] * x[i];
  return total;
}

// Root mean square norm of one row; `out` may be `x`.
void norm(const float* x, const float* weights, int64_t width, float eps, float* out) {
  const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor * weights[i];
}

void add(const float* x, float factor, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i++) out[i] += factor * x[i];
}

// act(gate) * up of one row: `x` has `width` columns of each.
void gate(const lancebill_layer& how, const float* x, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + kRows <= width; i += kRows) activate(how, x + i, x + width + i, out + i);
  if (i == width) return;
  float part[3][kRows] = {};
  __builtin_memcpy(part[0], x + i, sizeof(float) * (width - i));
  __builtin_memcpy(part[1], x + width + i, sizeof(float) * (width - i));
  activate(how, part[0], part[1], part[2]);
  __builtin_memcpy(out + i, part[2], sizeof(float) * (width - i));
}

// Rotates one head: column i of the first half of `angles` columns with the same column of the second half.
void rotate(const float* cos, const float* sin, int64_t angles, float* x) {
  const int64_t half = angles / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

void store(const float* x, int64_t count, int32_t type, void* out, int64_t first) {
  with_type(type, [&](auto stored) {
    using Stored = decltype(stored);
    auto* to = static_cast<typename Stored::Number*>(out) + first;
    for (int64_t i = 0; i < count; i++) to[i] = Stored::stored(x[i]);
  });
}

// Adds `count` values of one column of vectors, weighted by the scores of Q queries: V vectors from column `i` on.
template <class Stored, int Q, int V>
LANCEBILL_INLINE void add_values(const typename Stored::Number* values, int64_t dim, int64_t i, int64_t count,
                                 const float (*scores)[kPiece], const float* before, float* out) {
  Floats sums[Q][V];
  LANCEBILL_EACH(q, Q) {
    LANCEBILL_EACH(v, V) sums[q][v] = vector_at<Floats>(out + q * dim + i + v * kLanes) * spread(before[q]);
  }
  for (int64_t t = 0; t < count; t++) {
    LANCEBILL_EACH(v, V) {
      const Floats value = Stored::load(values + t * dim + i + v * kLanes);
      LANCEBILL_EACH(q, Q) sums[q][v] += value * spread(scores[q][t]);
    }
  }
  LANCEBILL_EACH(q, Q) {
    LANCEBILL_EACH(v, V) store_at(out + q * dim + i + v * kLanes, sums[q][v]);
  }
}

// Q neighbouring heads with the same keys and values, attending to the tokens [first, end) of their sequence. Softmax
// in pieces, each relative to the largest score so far.
template <class Stored, int Q>
LANCEBILL_INLINE void attend_heads(const float* q, const typename Stored::Number* keys,
                                   const typename Stored::Number* values, int64_t dim, int64_t first, int64_t end,
                                   float scale, float* __restrict out) {
  constexpr int kVectors = min_of(8, kValueSums / Q);
  float scores[Q][kPiece], largest[Q], total[Q] = {}, before[Q];
  for (int64_t i = 0; i < Q * dim; i++) out[i] = 0;
  for (int h = 0; h < Q; h++) largest[h] = -__builtin_inff();
  for (int64_t start = first; start < end; start += kPiece) {
    const int64_t count = min_of(kPiece, end - start);
    const lancebill_dense piece = {keys + start * dim, nullptr, 0, kPiece, static_cast<int32_t>(dim)};
    dense_of<Stored>(piece, 0, count, q, dim, Q, scores[0], kPiece);
    for (int h = 0; h < Q; h++) {
      float top = largest[h];
      for (int64_t t = 0; t < count; t++) top = max_of(top, scores[h][t] *= scale);
      const int64_t whole = round_up(count, kLanes);                    // in vectors
      for (int64_t t = count; t < whole; t++) scores[h][t] = top - 87;  // no token: next to nothing, and not summed
      for (int64_t t = 0; t < whole; t += kLanes) {
        for (int i = 0; i < kLanes; i++) scores[h][t + i] = exponential(scores[h][t + i] - top);
      }
      before[h] = start == first ? 0 : exponential(largest[h] - top);
      total[h] *= before[h];
      for (int64_t t = 0; t < count; t++) total[h] += scores[h][t];
      largest[h] = top;
    }
    const auto* own = values + start * dim;
    int64_t i = 0;
    for (; i + kVectors * kLanes <= dim; i += kVectors * kLanes) {
      add_values<Stored, Q, kVectors>(own, dim, i, count, scores, before, out);
    }
    for (; i + kLanes <= dim; i += kLanes) add_values<Stored, Q, 1>(own, dim, i, count, scores, before, out);
    for (; i < dim; i++) {
      for (int h = 0; h < Q; h++) {
        float sum = out[h * dim + i] * before[h];
        for (int64_t t = 0; t < count; t++) sum += Stored::one(own[t * dim + i]) * scores[h][t];
        out[h * dim + i] = sum;
      }
    }
  }
  for (int h = 0; h < Q; h++) {
    for (int64_t i = 0; i < dim; i++) out[h * dim + i] /= total[h];
  }
}

void attend(const float* q, int64_t heads, const void* keys, const void* values, int32_t type, int64_t dim,
            int64_t first, int64_t end, float scale, float* out) {
  with_type(type, [&](auto stored) {
    using Stored = decltype(stored);
    const auto* k = static_cast<const typename Stored::Number*>(keys);
    const auto* v = static_cast<const typename Stored::Number*>(values);
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) attend_heads<Stored, 4>(q + h * dim, k, v, dim, first, end, scale, out + h * dim);
    q += h * dim;
    out += h * dim;
    switch (heads - h) {
      case 1: return attend_heads<Stored, 1>(q, k, v, dim, first, end, scale, out);
      case 2: return attend_heads<Stored, 2>(q, k, v, dim, first, end, scale, out);
      case 3: return attend_heads<Stored, 3>(q, k, v, dim, first, end, scale, out);
    }
  });
}

float gated(float x) { return sigmoid(x); }

constexpr RowKernels kRowKernels = {dense,        norm,  add,     gate,          rotate,   store, attend,
                                    attend_block, gated, nullptr, &kDensePanels, kTaskRows};

}  // namespace
}  // namespace lancebill
