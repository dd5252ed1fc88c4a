// The scales and offsets of a group as floats, one per row, for the expansion to tiles.
#pragma once

#include "convert.h"
#include "plan.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

// Numbers of one group of a row block, and the factors of its rows, if there are any.
struct GroupNumbers {
  const uint8_t *numbers, *factors;
};

// `first`: the numbers of the first row block.
LANCEBILL_INLINE GroupNumbers group_numbers(const GroupArray& array, const uint8_t* first, int64_t block, int64_t group) {
  first += block * array.block;
  return {first + array.at(group), first + array.record_of(group)};
}

LANCEBILL_INLINE __m512 with_factors(GroupNumbers at) {
  return _mm512_mul_ps(Avx512::signed_bytes(at.numbers, 0), Avx512::floats(at.factors, 0));
}

LANCEBILL_INLINE __m512 scales_of(int32_t kind, GroupNumbers at) {
  return kind == LANCEBILL_SCALE_I8 ? with_factors(at) : Avx512::scales(kind, at.numbers, 0);
}

LANCEBILL_INLINE __m512 offsets_of(int32_t kind, GroupNumbers at) {
  return kind == LANCEBILL_ZERO_OFFSET_I8 ? with_factors(at) : Avx512::floats(at.numbers, 0);
}

}  // namespace
}  // namespace lancebill
