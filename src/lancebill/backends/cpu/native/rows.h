// What a decode step computes outside quantised matrices, on rows of fp32: norms, dense products, rotary positions,
// attention. Few rows at a time, so every function reads its weights once and keeps the rows in the first cache.
//
// The order of a sum depends neither on the number of rows nor on the threads.
#pragma once

#include "activate.h"
#include "convert.h"
#include "row_kernels.h"
#if defined(__F16C__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // false positives of GCC 12 in its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace lancebill {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <class Vector>
LANCEBILL_INLINE Vector vector_at(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

LANCEBILL_INLINE void store_at(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof v); }
LANCEBILL_INLINE Floats spread(float x) { return x - Floats{}; }

// The second half of the lanes is added to the first until one is left.
LANCEBILL_INLINE float lanes_sum(Floats v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 eight = (__m256)v;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[kLanes];
  store_at(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// Stored numbers of each type: a vector of them as fp32, one of them, and how to store one.
struct StoredBf16 {
  using Number = uint16_t;
  static LANCEBILL_INLINE Floats load(const Number* p) {
    const Words wide = __builtin_convertvector(vector_at<Halves>(p), Words) << 16;
    return vector_at<Floats>(&wide);
  }
  static float one(Number h) { return from_bf16(h); }
  static Number stored(float x) { return to_bf16(x); }
};

struct StoredF16 {
  using Number = uint16_t;
  static LANCEBILL_INLINE Floats load(const Number* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(vector_at<__m256i>(p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(vector_at<__m128i>(p));
#else
    Floats v;
    for (int i = 0; i < kLanes; i++) v[i] = from_f16(p[i]);
    return v;
#endif
  }
  static float one(Number h) { return from_f16(h); }
  static Number stored(float x) { return to_f16(x); }
};

struct StoredF32 {
  using Number = float;
  static LANCEBILL_INLINE Floats load(const Number* p) { return vector_at<Floats>(p); }
  static float one(Number x) { return x; }
  static Number stored(float x) { return x; }
};

template <class Function>
LANCEBILL_INLINE void with_type(int32_t type, const Function& function) {
  switch (type) {
    case LANCEBILL_BF16: return function(StoredBf16{});
    case LANCEBILL_F16: return function(StoredF16{});
    default: return function(StoredF32{});
  }
}

template <class Stored>
LANCEBILL_INLINE float dot(const typename Stored::Number* w, const float* x, int64_t count) {
  Floats sum = {};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) sum += Stored::load(w + k) * vector_at<Floats>(x + k);
  float total = lanes_sum(sum);
  for (; k < count; k++) total += Stored::one(w[k]) * x[k];
  return total;
}

// N rows of the matrix times M rows of x.
template <class Stored, int N, int M>
LANCEBILL_INLINE void dense_block(const lancebill_dense& m, int64_t row, const float* x, int64_t x_stride, float* out,
                                  int64_t out_stride) {
  const auto* w = static_cast<const typename Stored::Number*>(m.weights) + row * m.columns;
  const int64_t columns = m.columns, ahead = N * columns;  // the next block
  Floats sums[N][M] = {};
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    Floats weights[N];
    LANCEBILL_EACH(n, N) {
      __builtin_prefetch(w + n * columns + k + ahead, 0, 3);
      weights[n] = Stored::load(w + n * columns + k);
    }
    LANCEBILL_EACH(i, M) {
      const Floats input = vector_at<Floats>(x + i * x_stride + k);
      LANCEBILL_EACH(n, N) sums[n][i] += weights[n] * input;
    }
  }
  LANCEBILL_EACH(n, N) {
    LANCEBILL_EACH(i, M) {
      float total = lanes_sum(sums[n][i]);
      for (int64_t j = k; j < columns; j++) total += Stored::one(w[n * columns + j]) * x[i * x_stride + j];
      out[i * out_stride + row + n] = total + (m.bias == nullptr ? 0 : m.bias[row + n]);
    }
  }
}

template <class Stored, int N>
LANCEBILL_INLINE void dense_rows(const lancebill_dense& m, int64_t row, const float* x, int64_t x_stride, int64_t count,
                                 float* out, int64_t out_stride) {
  int64_t i = 0;
  for (; kLanes == 16 && N % 2 == 0 && i + 8 <= count; i += 8) {  // sixteen sums: where there are enough registers
    for (int n = 0; n < N; n += 2) {
      dense_block<Stored, 2, 8>(m, row + n, x + i * x_stride, x_stride, out + i * out_stride, out_stride);
    }
  }
  for (; i + 4 <= count; i += 4) {
    dense_block<Stored, N, 4>(m, row, x + i * x_stride, x_stride, out + i * out_stride, out_stride);
  }
  for (; i + 2 <= count; i += 2) {
    dense_block<Stored, N, 2>(m, row, x + i * x_stride, x_stride, out + i * out_stride, out_stride);
  }
  if (i < count) dense_block<Stored, N, 1>(m, row, x + i * x_stride, x_stride, out + i * out_stride, out_stride);
}

// Rows [first, end) of the matrix times all rows of x.
void dense(const lancebill_dense& m, int64_t first, int64_t end, const float* x, int64_t x_stride, int64_t count,
           float* out, int64_t out_stride) {
  with_type(m.type, [&](auto stored) {
    using Stored = decltype(stored);
    int64_t row = first;
    for (; row + kDenseRows <= end; row += kDenseRows) {
      dense_rows<Stored, kDenseRows>(m, row, x, x_stride, count, out, out_stride);
    }
    for (; row < end; row++) dense_rows<Stored, 1>(m, row, x, x_stride, count, out, out_stride);
  });
}

// Root mean square norm of one row; `out` may be `x`.
void norm(const float* x, const float* weights, int64_t width, float eps, float* out) {
  const float factor = 1.0f / __builtin_sqrtf(dot<StoredF32>(x, x, width) / static_cast<float>(width) + eps);
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

// One head's attention to the tokens [first, end) of its sequence. Softmax in pieces, each relative to the largest
// score so far.
void attend(const float* q, const void* keys, const void* values, int32_t type, int64_t dim, int64_t first, int64_t end,
            float scale, float* __restrict out) {
  constexpr int64_t kPiece = 64;
  with_type(type, [&](auto stored) {
    using Stored = decltype(stored);
    const auto* k = static_cast<const typename Stored::Number*>(keys);
    const auto* v = static_cast<const typename Stored::Number*>(values);
    float scores[kPiece], largest = -__builtin_inff(), total = 0;
    for (int64_t i = 0; i < dim; i++) out[i] = 0;
    for (int64_t start = first; start < end; start += kPiece) {
      const int64_t count = min_of(kPiece, end - start);
      float top = largest;
      for (int64_t t = 0; t < count; t++) {
        scores[t] = scale * dot<Stored>(k + (start + t) * dim, q, dim);
        top = max_of(top, scores[t]);
      }
      for (int64_t t = count; t < kPiece; t++) scores[t] = top - 87;  // no token: next to nothing, and not summed
      for (int64_t t = 0; t < kPiece; t++) scores[t] = exponential(scores[t] - top);
      const float before = start == first ? 0 : exponential(largest - top);
      total *= before;
      for (int64_t t = 0; t < count; t++) total += scores[t];
      int64_t i = 0;
      for (; i + kLanes <= dim; i += kLanes) {
        Floats sum = vector_at<Floats>(out + i) * spread(before);
        for (int64_t t = 0; t < count; t++) sum += Stored::load(v + (start + t) * dim + i) * spread(scores[t]);
        store_at(out + i, sum);
      }
      for (; i < dim; i++) {
        float sum = out[i] * before;
        for (int64_t t = 0; t < count; t++) sum += Stored::one(v[(start + t) * dim + i]) * scores[t];
        out[i] = sum;
      }
      largest = top;
    }
    for (int64_t i = 0; i < dim; i++) out[i] /= total;
  });
}

float gated(float x) { return sigmoid(x); }

constexpr RowKernels kRowKernels = {dense, norm, add, gate, rotate, store, attend, gated};

}  // namespace
}  // namespace lancebill
