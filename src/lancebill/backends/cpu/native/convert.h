// Conversions between fp32 and the 16- and 8-bit floats, in plain arithmetic that compilers vectorise.
//
// All code that is compiled per level is in an unnamed namespace. The same source is compiled once per instruction set;
// with external linkage the linker would keep only one copy, and an AVX2 machine might run the AVX-512 one. For the
// same reason per-level code calls no inline functions of the C++ library.
#pragma once

#include <cstdint>
#include <cstring>

// For functions called in inner loops, where arrays of vectors must stay in registers.
#define LANCEBILL_INLINE inline __attribute__((always_inline))
#if defined(__has_feature) && !defined(LANCEBILL_PLAIN_LOOPS)
#if __has_feature(address_sanitizer)  // clang; GCC defines __SANITIZE_ADDRESS__
#define LANCEBILL_PLAIN_LOOPS
#endif
#endif
#if defined(LANCEBILL_PLAIN_LOOPS) || defined(__SANITIZE_ADDRESS__)
#define LANCEBILL_UNROLL
#elif defined(__clang__)
#define LANCEBILL_UNROLL _Pragma("unroll")
#else
#define LANCEBILL_UNROLL _Pragma("GCC unroll 8")
#endif
#define LANCEBILL_EACH(i, count) LANCEBILL_UNROLL for (int i = 0; i < (count); i++)

namespace lancebill {
namespace {

template <class To, class From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <class T>
constexpr T min_of(T a, T b) { return b < a ? b : a; }
template <class T>
constexpr T max_of(T a, T b) { return a < b ? b : a; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr uint32_t kExponentMask = 0x7f800000u;

inline float magnitude(float x) { return bits_as<float>(bits_as<uint32_t>(x) & 0x7fffffffu); }
inline float with_sign(float size, float sign) {
  return bits_as<float>(bits_as<uint32_t>(size) | (bits_as<uint32_t>(sign) & 0x80000000u));
}

// Largest magnitude; NaN counts as the largest. Compares bit patterns, which sort like the numbers.
inline float largest(const float* values, int64_t count) {
  int32_t bits = 0;
  for (int64_t k = 0; k < count; k++) bits = max_of(bits, bits_as<int32_t>(values[k]) & 0x7fffffff);
  return bits_as<float>(bits);
}

inline bool finite(float x) { return (bits_as<uint32_t>(x) & kExponentMask) != kExponentMask; }

// fp32 addition does the rounding, half to even: adding 1.5 * 2^23 leaves no fraction bits.
inline float rint_small(float x) {  // |x| < 2^22
  const float magic = 0x1.8p23f;
  return (x + magic) - magic;
}
inline int32_t to_int(float x) { return bits_as<int32_t>(x + 0x1.8p23f) - 0x4b400000; }  // likewise, |x| < 2^22

// Rounds `size` >= 0 to `mantissa` bits. Below `smallest`, the smallest normal number, the step stays constant
// (subnormals).
inline float round_mantissa(float size, int mantissa, float smallest) {
  const uint32_t exponent = max_of(bits_as<uint32_t>(size) & kExponentMask, bits_as<uint32_t>(smallest));
  const float shifter = bits_as<float>(exponent + (static_cast<uint32_t>(23 - mantissa) << 23));
  return (size + shifter) - shifter;
}

inline float round_e4m3(float x) { return with_sign(round_mantissa(min_of(magnitude(x), 448.0f), 3, 0x1p-6f), x); }

inline float round_f16(float x) {
  const float size = magnitude(x), limit = 65520.0f;  // from here on fp16 rounds to infinity
  const float rounded = size < limit ? round_mantissa(size, 10, 0x1p-14f) : size * __builtin_inff();
  return with_sign(rounded, x);
}

inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > kExponentMask ? (u >> 16) | 0x40u : rounded);  // NaN stays NaN
}

inline float from_bf16(uint16_t h) { return bits_as<float>(static_cast<uint32_t>(h) << 16); }
inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }

inline uint16_t to_f16(float x) {
  const float r = round_f16(x), size = magnitude(r);
  const uint32_t u = bits_as<uint32_t>(size);
  const uint32_t normal = (u - (112u << 23)) >> 13;                       // exponent bias 127 to 15
  const uint32_t small = static_cast<uint32_t>(to_int(min_of(size, 0x1p-14f) * 0x1p24f));
  const uint32_t special = u > kExponentMask ? 0x7e00u : 0x7c00u;            // NaN, infinity
  const uint32_t code = u >= kExponentMask ? special : size < 0x1p-14f ? small : normal;
  return static_cast<uint16_t>(code | ((bits_as<uint32_t>(x) >> 16) & 0x8000u));
}

inline float from_f16(uint16_t h) {
  const uint32_t exponent = h & 0x7c00u, rest = h & 0x7fffu;
  const float small = static_cast<float>(rest) * 0x1p-24f;
  const float normal = bits_as<float>((rest << 13) + (112u << 23));
  const float special = bits_as<float>((rest << 13) | kExponentMask);
  return with_sign(exponent == 0x7c00u ? special : exponent == 0 ? small : normal, bits_as<float>(uint32_t{h} << 16));
}

}  // namespace
}  // namespace lancebill
