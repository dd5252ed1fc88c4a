// Rounding of a position to the nearest code of a type: the same fp32 operations as in numbers/dtypes.py.
#ifndef LANCEBILL_ENCODE_H
#define LANCEBILL_ENCODE_H

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.h"

namespace lancebill {

// Inlined into functions for several instruction sets.
#define LANCEBILL_INLINE inline __attribute__((always_inline))

// The number of a level for a column of a row.
inline float number_at(const lancebill_level& level, int64_t row, int64_t column) {
  return level.numbers[row * level.stride + (level.side ? column / level.side : 0)];
}

LANCEBILL_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

LANCEBILL_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Encoded {
  uint32_t code;
  float value;  // of the code: the position, rounded
};

// Half to even: adding 1.5 * 2**23 leaves an integer in the low bits of the mantissa.
LANCEBILL_INLINE Encoded encode_integer(const lancebill_code_type& type, float position) {
  constexpr float kRounder = 12582912.0f;
  const float shifted = std::min(std::max(position, type.low), type.high) + kRounder;
  const uint32_t rounded = bits_of(shifted) - bits_of(kRounder);
  return {(rounded - static_cast<uint32_t>(type.offset)) & static_cast<uint32_t>(type.mask), shifted - kRounder};
}

// As `_encode_minifloat` in numbers/dtypes.py.
LANCEBILL_INLINE Encoded encode_minifloat(const lancebill_code_type& type, float position) {
  const uint32_t smallest = static_cast<uint32_t>(128 - type.bias) << 23;
  const uint32_t shift = static_cast<uint32_t>(23 - type.mantissa), sign = bits_of(position) & 0x80000000;
  const float magnitude = std::min(std::fabs(position), type.high);
  const uint32_t exponent = std::max(bits_of(magnitude) & 0x7F800000, smallest);
  const float shifter = float_of(exponent + (shift << 23)), shifted = magnitude + shifter;
  const uint32_t code = bits_of(shifted) - bits_of(shifter) + ((exponent - smallest) >> shift);
  const uint32_t kept = type.low == 0 && sign ? 0 : 0xFFFFFFFF;  // types without a sign: negative values become 0
  return {((code | sign >> (32 - type.bits)) & kept), float_of((bits_of(shifted - shifter) | sign) & kept)};
}

// Only the value, as `nearest` in numbers/dtypes.py: with vector units several times as fast.
LANCEBILL_INLINE float nearest_integer(const lancebill_code_type& type, float position) {
  constexpr float kRounder = 12582912.0f;
  return (std::min(std::max(position, type.low), type.high) + kRounder) - kRounder;
}

// Of a magnitude, which is not negative.
LANCEBILL_INLINE float nearest_magnitude(const lancebill_code_type& type, float magnitude) {
  const uint32_t smallest = static_cast<uint32_t>(128 - type.bias) << 23;
  const uint32_t shift = static_cast<uint32_t>(23 - type.mantissa) << 23;
  const float clamped = std::min(magnitude, type.high);
  const float shifter = float_of(std::max(bits_of(clamped) & 0x7F800000, smallest) + shift);
  return (clamped + shifter) - shifter;
}

}  // namespace lancebill

#endif
