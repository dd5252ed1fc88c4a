// flags: -ffp-contract=off -ffinite-math-only -fno-signed-zeros
// The errors of several scales for every block: see `_Trial` in numbers/search.py, which sums in the same order.
//
// Clamps are single instructions only if nothing is NaN or minus zero. Where a step is zero, errors may be NaN all the
// same: errors are compared by their bits, or by torch.
#include <vector>

#include "encode.h"
#include "numbers.h"

namespace lancebill {
namespace {

constexpr int kLanes = 16;      // the sum of fewer numbers is written out
constexpr int kRegisters = 64;  // the errors of so many columns stay in registers

int64_t power_of_two_from(int64_t count) {
  int64_t power = kLanes;
  while (power < count) power *= 2;
  return power;
}

typedef float Four __attribute__((vector_size(16)));

LANCEBILL_INLINE Four four_at(const float* numbers) {
  Four four;
  std::memcpy(&four, numbers, sizeof(four));
  return four;
}

// Adds the upper half to the lower one until one number is left. `count` is a power of two of at least kLanes.
LANCEBILL_INLINE float sum_by_halves(float* numbers, int64_t count) {
  for (count /= 2; count >= kLanes; count /= 2) {
    for (int64_t i = 0; i < count; i++) numbers[i] += numbers[i + count];
  }
  // Written with vectors: left alone, compilers take the last sixteen numbers apart.
  const Four sum = (four_at(numbers) + four_at(numbers + 8)) + (four_at(numbers + 4) + four_at(numbers + 12));
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The weighted squared error of one value. Its sign does not matter, so floats are rounded without theirs.
template <int kEncoding>
LANCEBILL_INLINE float squared_error(const lancebill_code_type& type, float value, float inverse, float zero) {
  float position, rounded;
  if (kEncoding == LANCEBILL_INTEGER) {
    position = value * inverse + zero;
    rounded = nearest_integer(type, position);
  } else {
    position = std::fabs(value) * inverse;
    rounded = nearest_magnitude(type, position);
  }
  const float error = (rounded - position) * value;
  return error * error;
}

// The sum of weighted squared errors of a block of kCount columns (0: any number) with one scale.
template <int kEncoding, int kCount>
LANCEBILL_INLINE float try_scale(const lancebill_code_type& type, const float* __restrict values, int64_t count,
                                 float inverse, float zero, float* __restrict scratch) {
  float own[kRegisters];
  float* __restrict errors = kCount && kCount <= kRegisters ? own : scratch;
  const int64_t n = kCount ? kCount : count, padded = kCount ? kCount : power_of_two_from(count);
  for (int64_t i = 0; i < n; i++) errors[i] = squared_error<kEncoding>(type, values[i], inverse, zero);
  for (int64_t i = n; i < padded; i++) errors[i] = 0;
  return sum_by_halves(errors, padded);
}

// Whether an error, a sum of squares, is less than another. NaN is neither less nor more.
LANCEBILL_INLINE bool is_less(float error, float least) {
  constexpr uint32_t kInfinity = 0x7F800000;
  return bits_of(error) < bits_of(least) && bits_of(least) <= kInfinity;
}

template <int kEncoding, int kCount>
LANCEBILL_INLINE void try_scales(const lancebill_trials& t, float* scratch) {
  const lancebill_code_type type = t.type;
  const int64_t blocks = (t.columns + t.side - 1) / t.side, all = t.rows * blocks;
  for (int64_t at = 0, row = 0; row < t.rows; row++) {
    for (int64_t first = 0; first < t.columns; first += t.side, at++) {
      const int64_t count = std::min<int64_t>(t.side, t.columns - first);
      const float* values = t.values + row * t.columns + first;
      const float zero = t.zero.numbers == nullptr ? -0.0f : number_at(t.zero, row, first);
      float least = 0;
      int64_t best = 0;
      for (int64_t c = 0; c < t.candidates; c++) {
        const float step = t.steps[c * all + at];
        const float error =
            try_scale<kEncoding, kCount>(type, values, count, 1 / step, zero, scratch) * (step * step);
        if (t.errors != nullptr) t.errors[c * all + at] = error;
        if (c == 0 || is_less(error, least)) least = error, best = c;
      }
      if (t.best != nullptr) t.best[at] = best;
    }
  }
}

template <int kEncoding>
LANCEBILL_INLINE void try_scales(const lancebill_trials& t, float* scratch) {
  const bool whole = t.columns % t.side == 0;
  if (whole && t.side == 16) return try_scales<kEncoding, 16>(t, scratch);
  if (whole && t.side == 32) return try_scales<kEncoding, 32>(t, scratch);
  if (whole && t.side == 64) return try_scales<kEncoding, 64>(t, scratch);
  if (whole && t.side == 128) return try_scales<kEncoding, 128>(t, scratch);
  try_scales<kEncoding, 0>(t, scratch);
}

LANCEBILL_INLINE void try_scales_of(const lancebill_trials& t, float* scratch) {
  t.type.encoding == LANCEBILL_INTEGER ? try_scales<LANCEBILL_INTEGER>(t, scratch)
                                       : try_scales<LANCEBILL_MINIFLOAT>(t, scratch);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) void with_avx2(const lancebill_trials& t, float* scratch) { try_scales_of(t, scratch); }
#endif

}  // namespace
}  // namespace lancebill

using namespace lancebill;

void lancebill_try_scales(const lancebill_trials* work) {
  std::vector<float> scratch(power_of_two_from(work->side));
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return with_avx2(*work, scratch.data());
#endif
  try_scales_of(*work, scratch.data());
}
