// Packing of weights: small tiles of rows are expanded to bytes in the first-level cache and written in packed order.
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "bytes.h"
#include "lancebill.h"
#include "parallel.h"

namespace lancebill {
namespace {

constexpr int kBlock = 16, kTile = 32, kUnits = kTile / 4;  // rows of a block; columns of a tile, in units of 4

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
  interleave<1>(v & 15, v >> 4, low, high);
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

// Sixteen rows of sixteen bytes to four units: of each row, four bytes.
void place_units(Bytes (&rows)[kBlock], uint8_t* out) {
  for (int r = 0; r < kBlock; r += 4) {
    Bytes square[4];
    std::memcpy(square, rows + r, sizeof square);
    transpose<4>(square);
    for (int u = 0; u < 4; u++) store(out + 64 * u + 4 * r, square[u]);
  }
}

// Four units of 6-bit codes in the space of three.
void join_six_bits(uint8_t* units) {
  for (int line = 0; line < 3; line++) {
    for (int i = 0; i < 64; i++) units[64 * line + i] |= static_cast<uint8_t>(units[3 * 64 + i] >> (2 * line) << 6);
  }
}

// A tile of 16 rows, or of 32 for TABLE4, to eight units; of BITS6 to six.
template <int kCodes>
void place(const uint8_t (&tile)[2 * kBlock][kTile], uint8_t* out) {
  for (int c = 0; c < kTile; c += kBlock) {
    Bytes rows[kBlock];
    for (int r = 0; r < kBlock; r++) {
      rows[r] = load(&tile[r][c]);
      if (kCodes == LANCEBILL_TABLE4) rows[r] |= load(&tile[kBlock + r][c]) << 4;
    }
    if (kCodes == LANCEBILL_FLOAT8) {  // column by column
      transpose<1>(rows);
      std::memcpy(out + kBlock * c, rows, sizeof rows);
    } else if (kCodes == LANCEBILL_BITS6) {
      uint8_t units[4 * 64];
      place_units(rows, units);
      join_six_bits(units);
      std::memcpy(out + kBlock * c / 4 * 3, units, 3 * 64);
    } else {
      place_units(rows, out + kBlock * c);
    }
  }
}

// A whole tile of two blocks of 16 rows, two codes per byte, straight from both rows that share bytes.
void place_pairs(const uint8_t* const (&rows)[2 * kBlock], int64_t first, uint8_t* out) {
  Bytes left[kBlock], right[kBlock];
  for (int r = 0; r < kBlock; r++) {
    const Bytes low = load(rows[r] + first / 2), high = load(rows[kBlock + r] + first / 2);
    interleave<1>((low & 15) | (high << 4), (low >> 4) | (high & 0xF0), left[r], right[r]);
  }
  place_units(left, out);
  place_units(right, out + 4 * 64);
}

template <int kBits, int kCodes>
int32_t pack_codes(const lancebill_rows& m, const uint8_t* map, Invalid invalid) {
  constexpr int kRows = kCodes == LANCEBILL_TABLE4 ? 2 * kBlock : kBlock;
  constexpr int kTileBytes = kCodes == LANCEBILL_BITS6 ? 48 * kUnits : 64 * kUnits;
  const int64_t strips = m.padded_rows / kRows, strip_bytes = m.padded_columns / kTile * kTileBytes;
  std::atomic<bool> bad{false};
  parallel(m.threads, m.experts * strips, [&](int64_t task, int) {
    const int64_t expert = task / strips, strip = task % strips;
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = source_row(m, expert, strip * kRows + r);
    uint8_t* out = m.out + task * strip_bytes;
    alignas(64) uint8_t tile[2 * kBlock][kTile];
    const bool plain = kBits == 4 && kCodes == LANCEBILL_TABLE4 && map == nullptr && invalid.count == 0 &&
                       std::find(rows, rows + kRows, nullptr) == rows + kRows;
    for (int64_t first = 0; first < m.padded_columns; first += kTile, out += kTileBytes) {
      if constexpr (kCodes == LANCEBILL_TABLE4) {
        if (plain && first + kTile <= m.columns) {
          place_pairs(rows, first, out);
          continue;
        }
      }
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
  const int32_t status = take_loop_status();
  return status != LANCEBILL_OK ? status : int32_t{bad};
}

template <class Number>
void pack_groups(const lancebill_rows& m, int64_t record, int64_t gap) {
  const int64_t blocks = m.padded_rows / kBlock;
  const int64_t block_bytes = m.padded_columns * kBlock * sizeof(Number) + m.padded_columns / record * gap;
  parallel(m.threads, m.experts * blocks, [&](int64_t task, int) {
    const int64_t expert = task / blocks, block = task % blocks;
    Number tile[kBlock][kBlock];
    uint8_t* out = m.out + task * block_bytes;
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
        Number* numbers = reinterpret_cast<Number*>(out);
        for (int r = 0; r < kBlock; r++) numbers[r] = tile[r][g];
        out += sizeof(Number) * kBlock + ((first + g + 1) % record == 0 ? gap : 0);
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
  if (codes == LANCEBILL_BYTE) return pack_codes<8, LANCEBILL_BYTE>(*rows, map, bad);
  if (codes == LANCEBILL_BITS6) return pack_codes<8, LANCEBILL_BITS6>(*rows, map, bad);
  return pack_codes<8, LANCEBILL_FLOAT8>(*rows, map, bad);
}

int32_t lancebill_pack_groups(const lancebill_rows* rows, int32_t bytes, int32_t record, int32_t gap) {
  if (bytes == 1) {
    pack_groups<uint8_t>(*rows, record, gap);
  } else if (bytes == 2) {
    pack_groups<uint16_t>(*rows, record, gap);
  } else {
    pack_groups<uint32_t>(*rows, record, gap);
  }
  return take_loop_status();
}
