// flags: -ffp-contract=off ?-fopenmp-simd
// Rounding to codes under given scales, and the error it makes: a few columns at a time, in registers.
//
// Each step is the same fp32 operation as in numbers/codec.py and numbers/dtypes.py, in the same order.
#include <algorithm>
#include <cmath>

#include "encode.h"
#include "numbers.h"

namespace lancebill {
namespace {

constexpr int kPiece = 16;  // columns that are rounded together

// The end of the columns that share all numbers of all levels with `first`.
int64_t piece_end(const lancebill_rounding& w, int64_t first) {
  int64_t end = w.columns;
  const auto limit = [&](const lancebill_level& level) {
    if (level.numbers != nullptr && level.side) end = std::min(end, (first / level.side + 1) * level.side);
  };
  limit(w.minimum), limit(w.step), limit(w.zero);
  for (int i = 0; i < w.scale_count; i++) limit(w.scales[i]);
  return end;
}

// The numbers that all columns of a piece share. Missing ones are neutral: x + -0 and x / 1 are x, bit for bit.
struct Numbers {
  float minimum = -0.0f, step = 1, zero = -0.0f;
  float scales[LANCEBILL_MOST_SCALES];

  Numbers(const lancebill_rounding& w, int64_t row, int64_t column) {
    if (w.minimum.numbers != nullptr) minimum = number_at(w.minimum, row, column);
    if (w.step.numbers != nullptr) step = number_at(w.step, row, column);
    if (w.zero.numbers != nullptr) zero = number_at(w.zero, row, column);
    for (int i = 0; i < w.scale_count; i++) scales[i] = number_at(w.scales[i], row, column);
  }
};

struct Error {
  double squares = 0, energy = 0;
  float worst = 0, peak = 0;
  int64_t saturated = 0, flushed = 0;
};

// Columns that share all numbers: kPiece of them, or fewer.
template <bool kWhole, int kEncoding>
inline void round_columns(const lancebill_rounding& w, const Numbers& at, const float* __restrict want, int count,
                          uint8_t* __restrict codes, Error& sum) {
  const int n = kWhole ? kPiece : count;
  float got[kPiece], position[kPiece];
  for (int i = 0; i < n; i++) {
    position[i] = (want[i] + at.minimum) / at.step + at.zero;
    const Encoded e = kEncoding == LANCEBILL_INTEGER ? encode_integer(w.type, position[i]) : encode_minifloat(w.type, position[i]);
    codes[i] = static_cast<uint8_t>(e.code);
    got[i] = e.value - (at.zero == 0 ? 0.0f : at.zero);
  }
  for (int s = 0; s < w.scale_count; s++) {
    if (w.scales[s].divide) {
      for (int i = 0; i < n; i++) got[i] /= at.scales[s];
    } else {
      for (int i = 0; i < n; i++) got[i] *= at.scales[s];
    }
  }
  double squares = sum.squares, energy = sum.energy;
  float worst = sum.worst, peak = sum.peak;
  int32_t saturated = 0, flushed = 0;
#pragma omp simd reduction(+ : squares, energy, saturated, flushed) reduction(max : worst, peak)
  for (int i = 0; i < n; i++) {
    const float value = got[i] - (at.minimum == 0 ? 0.0f : at.minimum);
    const float error = std::fabs(want[i] - value), size = std::fabs(want[i]);
    squares += static_cast<double>(error) * error;
    energy += static_cast<double>(size) * size;
    worst = error > worst ? error : worst;
    peak = size > peak ? size : peak;
    saturated += (position[i] < w.beyond_low) | (position[i] > w.beyond_high);
    flushed += (value == 0) & (size != 0);
  }
  sum = {squares, energy, worst, peak, sum.saturated + saturated, sum.flushed + flushed};
}

template <int kEncoding>
void round_rows(lancebill_rounding& work) {
  const lancebill_rounding w = work;  // a copy, which the codes that are written cannot alias
  Error sum;
  for (int64_t row = 0; row < w.rows; row++) {
    for (int64_t first = 0, end; first < w.columns; first = end) {
      end = piece_end(w, first);
      const Numbers numbers(w, row, first);
      const float* want = w.values + row * w.columns + first;
      uint8_t* codes = w.codes + row * w.columns + first;
      int n = static_cast<int>(end - first);
      for (; n >= kPiece; n -= kPiece, want += kPiece, codes += kPiece) {
        round_columns<true, kEncoding>(w, numbers, want, kPiece, codes, sum);
      }
      if (n > 0) round_columns<false, kEncoding>(w, numbers, want, n, codes, sum);
    }
  }
  work.squares = sum.squares, work.energy = sum.energy;
  work.worst = sum.worst, work.peak = sum.peak;
  work.saturated = sum.saturated, work.flushed = sum.flushed;
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

void lancebill_round(lancebill_rounding* work) {
  work->type.encoding == LANCEBILL_INTEGER ? round_rows<LANCEBILL_INTEGER>(*work) : round_rows<LANCEBILL_MINIFLOAT>(*work);
}
