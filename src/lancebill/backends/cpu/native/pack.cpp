// Packing of weights: small tiles of rows are expanded to bytes in the first-level cache and written in packed order.
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "lancebill.h"
#include "parallel.h"

namespace lancebill {
namespace {

constexpr int kBlock = 16, kTile = 32, kUnits = kTile / 4;  // rows of a block; columns of a tile, in units of 4

typedef uint8_t Bytes __attribute__((vector_size(16)));  // of GCC and Clang, for any machine

Bytes load(const uint8_t* bytes) {
  Bytes v;
  std::memcpy(&v, bytes, sizeof v);
  return v;
}

void store(uint8_t* out, Bytes v) { std::memcpy(out, &v, sizeof v); }

// The bytes of a and b in turn: of their first halves, then of their second halves.
void interleave(Bytes a, Bytes b, Bytes& low, Bytes& high) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  low = __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  high = __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

// Sixteen rows of sixteen bytes to sixteen columns: each of four rounds moves one bit of the row into the column.
void transpose(Bytes (&m)[16]) {
  for (int round = 0; round < 4; round++) {
    Bytes next[16];
    for (int i = 0; i < 8; i++) interleave(m[i], m[i + 8], next[2 * i], next[2 * i + 1]);
    std::memcpy(m, next, sizeof m);
  }
}

struct Invalid {
  const uint8_t* codes;
  int count;
};

// The bytes of packed row `row` of an expert; NULL for padding.
const uint8_t* source_row(const lancebill_rows& m, int64_t expert, int64_t row) {
  const int64_t block = row / kBlock, half = m.rows / 2;
  int64_t logical = row;
  if (m.gated) {
    logical = block / 2 * kBlock + row % kBlock;
    if (logical >= half) return nullptr;
    if (block & 1) logical += half;
  }
  return logical < m.rows ? m.data + expert * m.expert_stride + logical * m.row_stride : nullptr;
}

// Codes [first, first + 32) of a row, one per byte; zeros beyond its end.
template <int kBits>
inline void expand(const uint8_t* row, int64_t first, int64_t columns, uint8_t* __restrict out) {
  const int64_t count = row == nullptr ? 0 : std::min<int64_t>(kTile, columns - first);
  if (count < kTile) std::memset(out, 0, kTile);
  if (count <= 0) return;
  if (kBits == 8) {
    count == kTile ? std::memcpy(out, row + first, kTile) : std::memcpy(out, row + first, count);
    return;
  }
  uint8_t pairs[kTile / 2] = {};
  count == kTile ? std::memcpy(pairs, row + first / 2, kTile / 2) : std::memcpy(pairs, row + first / 2, count / 2);
  const Bytes v = load(pairs);
  Bytes low, high;
  interleave(v & 15, v >> 4, low, high);
  store(out, low);
  store(out + sizeof low, high);
}

// Whether one of the codes of an expanded row is invalid. Padding is zero, which is always valid.
bool has_invalid(const uint8_t* codes, const Invalid& invalid) {
  Bytes bad = {};
  for (int i = 0; i < invalid.count; i++) {
    for (int j = 0; j < kTile; j += sizeof(Bytes)) bad |= (Bytes)(load(codes + j) == invalid.codes[i]);
  }
  uint64_t halves[2];
  std::memcpy(halves, &bad, sizeof halves);
  return (halves[0] | halves[1]) != 0;
}

uint32_t four(const uint8_t* codes) {
  uint32_t word;
  std::memcpy(&word, codes, 4);
  return word;
}

// A tile of 16 rows, or of 32 for TABLE4, to eight units.
template <int kCodes>
void place(const uint8_t (&tile)[2 * kBlock][kTile], uint8_t* out) {
  if (kCodes == LANCEBILL_FLOAT8) {  // column by column
    for (int c = 0; c < kTile; c += kBlock) {
      Bytes square[kBlock];
      for (int r = 0; r < kBlock; r++) square[r] = load(&tile[r][c]);
      transpose(square);
      std::memcpy(out + kBlock * c, square, sizeof square);
    }
    return;
  }
  for (int u = 0; u < kUnits; u++) {
    for (int r = 0; r < kBlock; r++) {
      uint32_t word = four(&tile[r][4 * u]);
      if (kCodes == LANCEBILL_TABLE4) word |= four(&tile[kBlock + r][4 * u]) << 4;
      std::memcpy(out + 64 * u + 4 * r, &word, 4);
    }
  }
}

template <int kBits, int kCodes>
bool pack_codes(const lancebill_rows& m, const uint8_t* map, Invalid invalid) {
  constexpr int kRows = kCodes == LANCEBILL_TABLE4 ? 2 * kBlock : kBlock;
  const int64_t strips = m.padded_rows / kRows, strip_bytes = static_cast<int64_t>(kBlock) * m.padded_columns;
  std::atomic<bool> bad{false};
  parallel(m.threads, m.experts * strips, [&](int64_t task, int) {
    const int64_t expert = task / strips, strip = task % strips;
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = source_row(m, expert, strip * kRows + r);
    uint8_t* out = m.out + task * strip_bytes;
    alignas(64) uint8_t tile[2 * kBlock][kTile];
    for (int64_t first = 0; first < m.padded_columns; first += kTile, out += 64 * kUnits) {
      const int64_t count = std::clamp<int64_t>(m.columns - first, 0, kTile);
      for (int r = 0; r < kRows; r++) {
        expand<kBits>(rows[r], first, m.columns, tile[r]);
        if (has_invalid(tile[r], invalid)) bad = true;
        if (map != nullptr && rows[r] != nullptr) {
          for (int64_t i = 0; i < count; i++) tile[r][i] = map[tile[r][i]];
        }
      }
      place<kCodes>(tile, out);
    }
  });
  return bad;
}

template <class Number>
void pack_groups(const lancebill_rows& m) {
  const int64_t blocks = m.padded_rows / kBlock;
  parallel(m.threads, m.experts * blocks, [&](int64_t task, int) {
    const int64_t expert = task / blocks, block = task % blocks;
    Number tile[kBlock][kBlock];
    Number* out = reinterpret_cast<Number*>(m.out) + task * kBlock * m.padded_columns;
    for (int64_t first = 0; first < m.padded_columns; first += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, m.padded_columns - first);
      for (int r = 0; r < kBlock; r++) {
        const uint8_t* row = source_row(m, expert, block * kBlock + r);
        const int64_t real = row == nullptr ? 0 : std::clamp<int64_t>(m.columns - first, 0, count);
        if (real < kBlock) std::memset(tile[r], 0, sizeof tile[r]);
        if (real == kBlock) {
          std::memcpy(tile[r], row + first * sizeof(Number), sizeof tile[r]);
        } else if (real > 0) {
          std::memcpy(tile[r], row + first * sizeof(Number), real * sizeof(Number));
        }
      }
      for (int64_t g = 0; g < count; g++) {
        for (int r = 0; r < kBlock; r++) out[(first + g) * kBlock + r] = tile[r][g];
      }
    }
  });
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

int32_t lancebill_pack_codes(const lancebill_rows* rows, int32_t bits, int32_t codes, const uint8_t* map,
                             const uint8_t* invalid, int32_t invalids) {
  const Invalid bad{invalid, invalids};
  if (codes == LANCEBILL_TABLE4) {
    return bits == 4 ? pack_codes<4, LANCEBILL_TABLE4>(*rows, map, bad)
                     : pack_codes<8, LANCEBILL_TABLE4>(*rows, map, bad);
  }
  return codes == LANCEBILL_BYTE ? pack_codes<8, LANCEBILL_BYTE>(*rows, map, bad)
                                 : pack_codes<8, LANCEBILL_FLOAT8>(*rows, map, bad);
}

void lancebill_pack_groups(const lancebill_rows* rows, int32_t bytes) {
  if (bytes == 1) {
    pack_groups<uint8_t>(*rows);
  } else if (bytes == 2) {
    pack_groups<uint16_t>(*rows);
  } else {
    pack_groups<uint32_t>(*rows);
  }
}
