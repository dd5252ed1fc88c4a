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
constexpr int kPanelVectors = 3, kPanelInputs = 8;  // of panel_dense.h: vectors of matrix rows times rows of x
constexpr int64_t kPanelNumbers = 132 << 10;        // so that a panel stays in the second cache
constexpr int64_t kPanelsFrom = 20;                 // rows of x from which panels are faster, as measured
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kManyInputs = 8, kManyRows = 2, kFewRows = 3, kSingleRows = 8;
constexpr int64_t kTaskRows = 8;
constexpr bool kPrefetchRows = true;
constexpr bool kLoadPairs = true;  // a register holds two vectors of 16-bit numbers; half as many prefetches
constexpr int kValueSums = 16;
constexpr int kQueryVectors = 4, kQuerySums = 4;
constexpr int kPanelVectors = 4, kPanelInputs = 4;
constexpr int64_t kPanelNumbers = 66 << 10;
constexpr int64_t kPanelsFrom = 16;  // not measured
#else
constexpr int kManyInputs = 4, kManyRows = 4, kFewRows = 4, kSingleRows = 4;
constexpr int64_t kTaskRows = 8;
constexpr bool kPrefetchRows = true, kLoadPairs = false;
constexpr int kValueSums = 8;
constexpr int kQueryVectors = 2, kQuerySums = 4;
constexpr int kPanelVectors = kLanes == 8 ? 3 : 2, kPanelInputs = 4;
constexpr int64_t kPanelNumbers = 66 << 10;
constexpr int64_t kPanelsFrom = kLanes == 8 ? 16 : 24;
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

// The order in which lanes_sum adds: places 2i and 2i + 1 first, then these sums likewise.
constexpr int place_in_sum(int lane) {
#if defined(__ARM_FEATURE_DOTPROD)
  return lane;
#else
  int place = 0;
  for (int bit = 1; bit < kLanes; bit *= 2) place = 2 * place + (lane & bit ? 1 : 0);
  return place;
#endif
}

#if defined(__AVX512F__)
// Each joins vectors in the order of lanes_sum: `a` and `b` have 1, 2, 4 or 8 sums of 16, 8, 4 or 2 lanes.
LANCEBILL_INLINE __m512 join_sixteens(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
LANCEBILL_INLINE __m512 join_eights(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
LANCEBILL_INLINE __m512 join_fours(__m512 a, __m512 b) {
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
LANCEBILL_INLINE __m512 join_twos(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// totals[j] = lanes_sum(of(j)) of sixteen vectors.
template <class Of>
LANCEBILL_INLINE void sixteen_sums(const Of& of, float* totals) {
  __m512 fours[4];
  LANCEBILL_EACH(j, 4) fours[j] = join_eights(join_sixteens(of(j), of(j + 4)), join_sixteens(of(j + 8), of(j + 12)));
  _mm512_storeu_ps(totals, join_twos(join_fours(fours[0], fours[1]), join_fours(fours[2], fours[3])));
}

// Likewise of eight.
template <class Of>
LANCEBILL_INLINE void eight_sums(const Of& of, float* totals) {
  const __m512 even = join_eights(join_sixteens(of(0), of(2)), join_sixteens(of(4), of(6)));
  const __m512 odd = join_eights(join_sixteens(of(1), of(3)), join_sixteens(of(5), of(7)));
  const __m512 both = join_fours(even, odd), twice = join_twos(both, both);
  const __m512i quarters = _mm512_set_epi64(6, 4, 2, 0, 6, 4, 2, 0);
  const __m512d once = _mm512_permutexvar_pd(quarters, _mm512_castps_pd(twice));
  _mm256_storeu_ps(totals, _mm512_castps512_ps256(_mm512_castpd_ps(once)));
}
#endif

// totals[i][n] = lanes_sum(sums[n][i]), whose order of additions it keeps.
template <int N, int M>
LANCEBILL_INLINE void lanes_sums(const Floats (&sums)[N][M], float (&totals)[M][N]) {
  float* to = totals[0];
  const auto sum = [&](int j) __attribute__((always_inline)) { return sums[j % N][j / N]; };
#if defined(__AVX512F__)  // many at once: each step halves the vectors
  constexpr int kSixteens = N * M / 16 * 16, kJoined = N * M / 8 * 8;
  static_assert(kSixteens <= 16, "of any number");
  if constexpr (kSixteens > 0) {
    sixteen_sums([&](int j) __attribute__((always_inline)) { return (__m512)sum(j); }, to);
  }
  if constexpr (kJoined > kSixteens) {
    eight_sums([&](int j) __attribute__((always_inline)) { return (__m512)sum(kSixteens + j); }, to + kSixteens);
  }
#else
  constexpr int kJoined = 0;
#endif
  LANCEBILL_EACH(j, N * M - kJoined) to[kJoined + j] = lanes_sum(sum(kJoined + j));
}

// Stored numbers of each type: a vector of them as fp32, one of them, and how to store one. With kPairs also the two
// numbers of each word of a vector.
struct StoredBf16 {
  using Number = uint16_t;
  static constexpr bool kPairs = true;
  static LANCEBILL_INLINE Floats first_of_pair(Words pairs) { return (Floats)(pairs << 16); }
  static LANCEBILL_INLINE Floats second_of_pair(Words pairs) { return (Floats)(pairs & 0xffff0000u); }
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
  static constexpr bool kPairs = false;
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
  static constexpr bool kPairs = false;
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
