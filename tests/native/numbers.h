// Random numbers, and the small float formats in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>

namespace {

thread_local std::mt19937 random_bits;  // each thread has cases of its own
int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }
double normal() { return std::normal_distribution<double>()(random_bits); }
template <class T>
T one_of(std::initializer_list<T> list) { return list.begin()[pick(0, static_cast<int>(list.size()) - 1)]; }

// Rounds to `bits` significant bits, half to even; subnormal below 2^lowest.
double rounded(double x, int bits, int lowest) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const double quantum = std::ldexp(1.0, std::max(exponent - 1, lowest) - (bits - 1));
  return std::nearbyint(x / quantum) * quantum;
}
double bf16(double x) { return rounded(x, 8, -126); }
double f16(double x) { return rounded(x, 11, -14); }
double e4m3(double x) { return std::max(-448.0, std::min(448.0, rounded(x, 4, -6))); }

uint16_t bf16_bits(double x) {
  const float f = static_cast<float>(bf16(x));
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>(u >> 16);
}
uint16_t f16_bits(double x) {
  const double r = f16(x), size = std::fabs(r);
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (size < 0x1p-14) return static_cast<uint16_t>(sign | static_cast<int>(size * 0x1p24));
  int exponent;
  const double mantissa = std::frexp(size, &exponent);
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | (static_cast<int>(mantissa * 2048) - 1024));
}
double minifloat(int code, int mantissa) {
  const int bias = (1 << (6 - mantissa)) - 1, exponent = (code & 127) >> mantissa;
  const int fraction = code & ((1 << mantissa) - 1);
  const double size = exponent ? std::ldexp(1 + std::ldexp(fraction, -mantissa), exponent - bias)
                               : std::ldexp(fraction, 1 - bias - mantissa);
  return code & 128 ? -size : size;
}
double round_up_to(double x, double multiple) { return std::ceil(x / multiple) * multiple; }

}  // namespace
