// Vectors of 16 bytes, for any machine: the vector extension of GCC and Clang.
#pragma once

#include <cstdint>
#include <cstring>

namespace lancebill {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Bytes load(const void* bytes) {
  Bytes v;
  std::memcpy(&v, bytes, sizeof v);
  return v;
}

// Eight bytes, followed by zeros.
inline Bytes load_half(const void* bytes) {
  typedef uint64_t Halves __attribute__((vector_size(16)));
  Halves v = {};
  std::memcpy(&v, bytes, sizeof v / 2);
  return (Bytes)v;
}

inline void store(void* out, Bytes v) { std::memcpy(out, &v, sizeof v); }

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define LANCEBILL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANCEBILL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bytes{__VA_ARGS__})
#endif

// The elements of a and b in turn, of `kSize` bytes each: of their first halves, then of their second halves.
template <int kSize>
inline void interleave(Bytes a, Bytes b, Bytes& low, Bytes& high) {
  if (kSize == 1) {
    low = LANCEBILL_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = LANCEBILL_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  } else if (kSize == 2) {
    low = LANCEBILL_SHUFFLE(a, b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
    high = LANCEBILL_SHUFFLE(a, b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
  } else {
    low = LANCEBILL_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    high = LANCEBILL_SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }
}

// The even and the odd elements of a, of `kSize` bytes each, followed by those of b.
template <int kSize>
inline void separate(Bytes a, Bytes b, Bytes& even, Bytes& odd) {
  static_assert(kSize == 1 || kSize == 4, "the shuffles below");
  if (kSize == 1) {
    even = LANCEBILL_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    odd = LANCEBILL_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  } else {
    even = LANCEBILL_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    odd = LANCEBILL_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}
#undef LANCEBILL_SHUFFLE

// A square of elements of `kSize` bytes, rows to columns: each round moves one bit of the row into the column.
template <int kSize>
inline void transpose(Bytes (&rows)[16 / kSize]) {
  constexpr int kRows = 16 / kSize;
#pragma GCC unroll 4
  for (int side = 1; side < kRows; side *= 2) {
    Bytes next[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; i++) {
      interleave<kSize>(rows[i], rows[i + kRows / 2], next[2 * i], next[2 * i + 1]);
    }
    std::memcpy(rows, next, sizeof rows);
  }
}

}  // namespace
}  // namespace lancebill
