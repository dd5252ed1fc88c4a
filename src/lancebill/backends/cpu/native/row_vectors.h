// Vectors of fp32 for rows.h, in the width of the level, and the stored numbers that they are loaded from.
#pragma once

#include "convert.h"
#include "lancebill.h"
#if defined(__F16C__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // false positives of GCC 12 in its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
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

// Sums that stay in registers, rows of a matrix times rows of x: enough to hide the latency of an addition. Eight rows of
// x do not fit the first cache, so AVX-512 loads each of their vectors for three rows of the matrix. Tasks are of
// kTaskRows rows, or a multiple.
#if defined(__AVX512F__)
constexpr int kManyInputs = 8, kManyRows = 3, kFewRows = 4, kSingleRows = 4;
constexpr int64_t kTaskRows = 12;
constexpr bool kPrefetchRows = true, kLoadPairs = false;
constexpr int kValueSums = 16;  // of attention
constexpr int kQueryVectors = 2, kQuerySums = 8;  // of attention in blocks
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kManyInputs = 8, kManyRows = 2, kFewRows = 3, kSingleRows = 8;
constexpr int64_t kTaskRows = 8;
constexpr bool kPrefetchRows = true;
constexpr bool kLoadPairs = true;  // a register holds two vectors of 16-bit numbers; half as many prefetches
constexpr int kValueSums = 16;
constexpr int kQueryVectors = 4, kQuerySums = 4;
#else
constexpr int kManyInputs = 4, kManyRows = 4, kFewRows = 4, kSingleRows = 4;
constexpr int64_t kTaskRows = 8;
constexpr bool kPrefetchRows = true, kLoadPairs = false;
constexpr int kValueSums = 8;
constexpr int kQueryVectors = 2, kQuerySums = 4;
#endif

template <class Vector>
LANCEBILL_INLINE Vector vector_at(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Not memcpy, for which GCC 12 takes general registers on aarch64.
LANCEBILL_INLINE void store_at(float* p, Floats v) {
  typedef float Anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
  *reinterpret_cast<Anywhere*>(p) = v;
}
LANCEBILL_INLINE Floats spread(float x) { return x - Floats{}; }

// a * b + c, rounded once where the level can. Named, because the compiler may contract an expression in one loop and
// round twice in another, and then a row's bits would depend on the number of rows.
LANCEBILL_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

LANCEBILL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Loads a vector once that several instructions use.
LANCEBILL_INLINE Floats in_register(Floats v) {
#if defined(__AVX512F__) && defined(__x86_64__)  // not when emulated
  __asm__("" : "+v"(v));
#endif
  return v;
}

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
#elif defined(__ARM_FEATURE_DOTPROD)
  return vaddvq_f32((float32x4_t)v);  // neighbours first
#else
  float lanes[kLanes];
  store_at(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// totals[i][n] = lanes_sum(sums[n][i]), whose order of additions it keeps.
template <int N, int M>
LANCEBILL_INLINE void lanes_sums(const Floats (&sums)[N][M], float (&totals)[M][N]) {
#if defined(__AVX512F__)
  if constexpr (N * M == kLanes) {  // all at once: each step halves the vectors
    __m512 fours[4], pairs[2];
    LANCEBILL_EACH(j, 4) {
      __m512 eights[2];
      LANCEBILL_EACH(half, 2) {
        const int lane = 8 * half + j;  // of `totals`
        const __m512 a = (__m512)sums[lane % N][lane / N], b = (__m512)sums[(lane + 4) % N][(lane + 4) / N];
        eights[half] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
      }
      const __m512 even = _mm512_shuffle_f32x4(eights[0], eights[1], 0x88);
      fours[j] = _mm512_add_ps(even, _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
    }
    LANCEBILL_EACH(j, 2) {
      const __m512d a = _mm512_castps_pd(fours[2 * j]), b = _mm512_castps_pd(fours[2 * j + 1]);
      pairs[j] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 even = _mm512_shuffle_ps(pairs[0], pairs[1], 0x88);
    _mm512_storeu_ps(totals[0], _mm512_add_ps(even, _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd)));
    return;
  }
#endif
  LANCEBILL_EACH(n, N) {
    LANCEBILL_EACH(i, M) totals[i][n] = lanes_sum(sums[n][i]);
  }
}

// Stored numbers of each type: a vector of them as fp32, one of them, and how to store one.
struct StoredBf16 {
  using Number = uint16_t;
  static LANCEBILL_INLINE Floats load(const Number* p) {
#if defined(__ARM_FEATURE_DOTPROD)
    const uint16x8_t numbers = vcombine_u16(vld1_u16(p), vcreate_u16(0));
    return (Floats)vzip1q_u16(vdupq_n_u16(0), numbers);  // a shift would have half the rate
#elif defined(__AVX512F__)  // of a vector conversion GCC 12 makes two halves
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(vector_at<__m256i>(p)), 16);
#else
    const Words wide = __builtin_convertvector(vector_at<Halves>(p), Words) << 16;
    return vector_at<Floats>(&wide);
#endif
  }
  static LANCEBILL_INLINE void load_pair(const Number* p, Floats& first, Floats& second) {
#if defined(__ARM_FEATURE_DOTPROD)
    const uint16x8_t numbers = vld1q_u16(p), zero = vdupq_n_u16(0);
    first = (Floats)vzip1q_u16(zero, numbers);
    second = (Floats)vzip2q_u16(zero, numbers);
#else
    first = load(p);
    second = load(p + kLanes);
#endif
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
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    Floats v;
    for (int i = 0; i < kLanes; i++) v[i] = from_f16(p[i]);
    return v;
#endif
  }
  static LANCEBILL_INLINE void load_pair(const Number* p, Floats& first, Floats& second) {
    first = load(p);
    second = load(p + kLanes);
  }
  static float one(Number h) { return from_f16(h); }
  static Number stored(float x) { return to_f16(x); }
};

struct StoredF32 {
  using Number = float;
  static LANCEBILL_INLINE Floats load(const Number* p) { return vector_at<Floats>(p); }
  static LANCEBILL_INLINE void load_pair(const Number* p, Floats& first, Floats& second) {
    first = load(p);
    second = load(p + kLanes);
  }
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

}  // namespace
}  // namespace lancebill
