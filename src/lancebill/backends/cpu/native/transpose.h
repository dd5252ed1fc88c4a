// Transposes a square of 32-bit words that has as many lines as a vector has lanes.
#pragma once

#include "row_vectors.h"

namespace lancebill {
namespace {

// `load(i)` gives line i; `store(i, words)` takes word i of every line. No line is stored before all are loaded.
template <class Load, class Store>
LANCEBILL_INLINE void transpose(const Load& load, const Store& store) {
#if defined(__AVX512F__)
  __m512i pairs[16], fours[16];
  LANCEBILL_EACH(i, 8) {
    const __m512i a = (__m512i)load(2 * i), b = (__m512i)load(2 * i + 1);
    pairs[2 * i] = _mm512_unpacklo_epi32(a, b);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(a, b);
  }
  LANCEBILL_EACH(i, 4) {
    LANCEBILL_EACH(j, 2) {
      fours[4 * i + 2 * j] = _mm512_unpacklo_epi64(pairs[4 * i + j], pairs[4 * i + 2 + j]);
      fours[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[4 * i + j], pairs[4 * i + 2 + j]);
    }
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // quarters of both operands
  LANCEBILL_EACH(j, 4) {
    const __m512i even0 = _mm512_shuffle_i32x4(fours[j], fours[4 + j], kEven);
    const __m512i even1 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], kEven);
    const __m512i odd0 = _mm512_shuffle_i32x4(fours[j], fours[4 + j], kOdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], kOdd);
    store(j, (Words)_mm512_shuffle_i32x4(even0, even1, kEven));
    store(4 + j, (Words)_mm512_shuffle_i32x4(odd0, odd1, kEven));
    store(8 + j, (Words)_mm512_shuffle_i32x4(even0, even1, kOdd));
    store(12 + j, (Words)_mm512_shuffle_i32x4(odd0, odd1, kOdd));
  }
#elif defined(__AVX2__)
  __m256i pairs[8], fours[8];
  LANCEBILL_EACH(i, 4) {
    const __m256i a = (__m256i)load(2 * i), b = (__m256i)load(2 * i + 1);
    pairs[2 * i] = _mm256_unpacklo_epi32(a, b);
    pairs[2 * i + 1] = _mm256_unpackhi_epi32(a, b);
  }
  LANCEBILL_EACH(i, 2) {
    LANCEBILL_EACH(j, 2) {
      fours[4 * i + 2 * j] = _mm256_unpacklo_epi64(pairs[4 * i + j], pairs[4 * i + 2 + j]);
      fours[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[4 * i + j], pairs[4 * i + 2 + j]);
    }
  }
  LANCEBILL_EACH(j, 4) {
    store(j, (Words)_mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20));
    store(4 + j, (Words)_mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31));
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  uint64x2_t low[2], high[2];  // words 0 and 2, 1 and 3 of two lines
  LANCEBILL_EACH(i, 2) {
    const uint32x4_t a = (uint32x4_t)load(2 * i), b = (uint32x4_t)load(2 * i + 1);
    low[i] = vreinterpretq_u64_u32(vtrn1q_u32(a, b));
    high[i] = vreinterpretq_u64_u32(vtrn2q_u32(a, b));
  }
  store(0, (Words)vtrn1q_u64(low[0], low[1]));
  store(1, (Words)vtrn1q_u64(high[0], high[1]));
  store(2, (Words)vtrn2q_u64(low[0], low[1]));
  store(3, (Words)vtrn2q_u64(high[0], high[1]));
#else
  Words lines[kLanes], words;
  for (int i = 0; i < kLanes; i++) lines[i] = load(i);
  for (int i = 0; i < kLanes; i++) {
    for (int j = 0; j < kLanes; j++) words[j] = lines[j][i];
    store(i, words);
  }
#endif
}

}  // namespace
}  // namespace lancebill
