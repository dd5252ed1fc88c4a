// Packing of weights: small tiles of rows are expanded to bytes in the first-level cache and written in packed order.
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "bytes.h"
#include "lancebill.h"
#include "pack_words.h"
#include "parallel.h"

namespace lancebill {
namespace {

constexpr int kSharedLines = 8;  // strips that are packed together if they share cache lines of words

struct Invalid {
  const uint8_t* codes;
  int count;
};

// What becomes of codes: those of a table, or some bits are inverted (two's complement to offset binary).
struct Map {
  const uint8_t* table = nullptr;
  uint8_t flip = 0;

  Map(const uint8_t* codes, int count) {
    if (codes == nullptr) return;
    flip = codes[0];
    for (int c = 0; c < count; c++) {
      if (codes[c] != (c ^ flip)) table = codes;
    }
  }

  uint8_t of(uint8_t code) const { return table == nullptr ? code ^ flip : table[code]; }
};

// A packed row: where its part has it. No part: padding.
struct Row {
  const uint8_t* part;
  int64_t number;

  const uint8_t* bytes(int64_t stride) const { return part == nullptr ? nullptr : part + number * stride; }
};

Row find_row(const lancebill_rows& m, int64_t expert, int64_t row) {
  if (!m.gated) return row < m.rows ? Row{m.parts[expert], row} : Row{};
  const int64_t block = row / kBlock, logical = block / 2 * kBlock + row % kBlock;
  return logical < m.rows / 2 ? Row{m.parts[2 * expert + (block & 1)], logical} : Row{};
}

// Codes [first, first + count) of a row, one per byte.
template <int kBits, int kOrder>
inline void read_codes(const Row& row, int64_t stride, int64_t first, int64_t count, uint8_t* __restrict out) {
  if constexpr (kOrder != LANCEBILL_BY_ROW) {
    for (int64_t i = 0; i < count; i++) {
      const int64_t c = first + i, word = kOrder == LANCEBILL_BY_WORD ? row.number : row.number / 8;
      const int64_t line = kOrder == LANCEBILL_BY_WORD ? c / 8 : c;
      const int nibble = kOrder == LANCEBILL_BY_WORD ? c % 8 : kNibbleOfRow[row.number % 8];
      out[i] = row.part[line * stride + 4 * word + nibble / 2] >> 4 * (nibble & 1) & 15;
    }
  } else if constexpr (kBits == 8) {
    count == kTile ? std::memcpy(out, row.bytes(stride) + first, kTile)
                   : std::memcpy(out, row.bytes(stride) + first, count);
  } else {
    const uint8_t* bytes = row.bytes(stride) + first / 2;
    uint8_t pairs[kTile / 2] = {};
    count == kTile ? std::memcpy(pairs, bytes, kTile / 2) : std::memcpy(pairs, bytes, count / 2);
    const Bytes v = load(pairs);
    Bytes low, high;
    interleave<1>(v & 15, v >> 4, low, high);
    store(out, low);
    store(out + sizeof low, high);
  }
}

// Where codes are invalid. Padding is zero, which is always valid.
inline Bytes find_invalid(Bytes codes, const Invalid& invalid) {
  Bytes bad = {};
  for (int i = 0; i < invalid.count; i++) bad |= (Bytes)(codes == invalid.codes[i]);
  return bad;
}

bool any(Bytes found) {
  uint64_t halves[2];
  std::memcpy(halves, &found, sizeof halves);
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

// Sixteen columns of a block, or of two for TABLE4, to four units; of BITS6 to three.
template <int kCodes>
void place_block(Bytes (&rows)[kBlock], uint8_t* out) {
  if (kCodes == LANCEBILL_FLOAT8) {  // column by column
    transpose<1>(rows);
    std::memcpy(out, rows, sizeof rows);
  } else if (kCodes == LANCEBILL_BITS6) {
    uint8_t units[4 * 64];
    place_units(rows, units);
    join_six_bits(units);
    std::memcpy(out, units, 3 * 64);
  } else {
    place_units(rows, out);
  }
}

// A tile whose rows are given by their codes, one per byte.
template <int kCodes, class CodesOf>
void place(const CodesOf& codes_of, uint8_t* out) {
  for (int c = 0; c < kTile; c += kBlock, out += kBlock * kBlock * (kCodes == LANCEBILL_BITS6 ? 3 : 4) / 4) {
    Bytes rows[kBlock];
    for (int r = 0; r < kBlock; r++) {
      rows[r] = codes_of(r, c);
      if (kCodes == LANCEBILL_TABLE4) rows[r] |= codes_of(kBlock + r, c) << 4;
    }
    place_block<kCodes>(rows, out);
  }
}

// A whole tile of two blocks of 16 rows, two codes per byte, straight from both rows that share bytes.
void place_pairs(const Row* rows, int64_t stride, int64_t first, uint8_t* out) {
  Bytes left[kBlock], right[kBlock];
  for (int r = 0; r < kBlock; r++) {
    Bytes low, high;
    pair_nibbles(load(rows[r].bytes(stride) + first / 2), load(rows[kBlock + r].bytes(stride) + first / 2), low, high);
    interleave<1>(low, high, left[r], right[r]);
  }
  place_units(left, out);
  place_units(right, out + 4 * 64);
}

// A whole tile without unpacking it.
template <int kOrder>
void place_nibbles(const Row* rows, int64_t stride, int64_t first, uint8_t* out) {
  const Row even = rows[0], odd = rows[kBlock];
  if constexpr (kOrder == LANCEBILL_BY_ROW) {
    place_pairs(rows, stride, first, out);
  } else if constexpr (kOrder == LANCEBILL_BY_WORD) {
    const int64_t line = first / 8 * stride;
    place_words(even.part + line + 4 * even.number, odd.part + line + 4 * odd.number, stride, out);
  } else {
    const int64_t line = first * stride;
    place_columns(even.part + line + even.number / 2, odd.part + line + odd.number / 2, stride, out);
  }
}

// Blocks that share bytes, or a single block.
struct Strip {
  Row rows[2 * kBlock];
  bool whole;  // without padding
  uint8_t* out;
};

template <int kBits, int kCodes, int kOrder>
class CodePacker {
 public:
  CodePacker(const lancebill_rows& m, const Map& map, Invalid invalid) : m_(m), map_(map), invalid_(invalid) {}

  int32_t pack() {
    constexpr int64_t kTogether = kOrder == LANCEBILL_BY_ROW ? 1 : kSharedLines;
    const int64_t strips = m_.padded_rows / kRows, tasks = (strips + kTogether - 1) / kTogether;
    parallel(m_.threads, m_.experts * tasks, [&](int64_t task, int) {
      const int64_t expert = task / tasks, top = task % tasks * kTogether, count = std::min(kTogether, strips - top);
      Strip found[kTogether];
      for (int64_t s = 0; s < count; s++) found[s] = find_strip(expert, top + s);
      const bool prefetches = kOrder == LANCEBILL_BY_ROW && top + 1 < strips;
      const Strip next = prefetches ? find_strip(expert, top + 1) : Strip{};
      for (int64_t first = 0; first < m_.padded_columns; first += kTile) {
        if (prefetches) prefetch(next, first);
        for (int64_t s = 0; s < count; s++) pack_tile(found[s], first);
      }
    });
    const int32_t status = take_loop_status();
    return status != LANCEBILL_OK ? status : int32_t{bad_};
  }

 private:
  static constexpr int kRows = kCodes == LANCEBILL_TABLE4 ? 2 * kBlock : kBlock;
  static constexpr int kTileBytes = (kCodes == LANCEBILL_BITS6 ? 48 : 64) * kUnits;
  static constexpr int64_t kColumnsOfLine = 64 * 8 / kBits;

  Strip find_strip(int64_t expert, int64_t strip) const {
    Strip found = {};
    found.whole = true;
    for (int r = 0; r < kRows; r++) {
      found.rows[r] = find_row(m_, expert, strip * kRows + r);
      if (found.rows[r].part == nullptr) found.whole = false;
    }
    found.out = m_.out + (expert * (m_.padded_rows / kRows) + strip) * (m_.padded_columns / kTile) * kTileBytes;
    return found;
  }

  // The processor does not guess where so many short rows go on.
  void prefetch(const Strip& strip, int64_t first) const {
    if (!strip.whole || first % kColumnsOfLine != 0 || first >= m_.columns) return;
    for (int r = 0; r < kRows; r++) __builtin_prefetch(strip.rows[r].bytes(m_.stride) + first * kBits / 8, 0, 2);
  }

  void pack_tile(const Strip& strip, int64_t first) {
    uint8_t* out = strip.out + first / kTile * kTileBytes;
    const bool whole = strip.whole && first + kTile <= m_.columns;
    if constexpr (kBits == 4) {
      if (whole && map_.table == nullptr && invalid_.count == 0) {
        place_nibbles<kOrder>(strip.rows, m_.stride, first, out);
        return;
      }
    } else if (whole && map_.table == nullptr) {
      Bytes bad = {};
      place<kCodes>([&](int r, int c) {
        const Bytes codes = load(strip.rows[r].bytes(m_.stride) + first + c);
        bad |= find_invalid(codes, invalid_);
        return codes ^ map_.flip;
      }, out);
      if (any(bad)) bad_ = true;
      return;
    }
    alignas(64) uint8_t tile[2 * kBlock][kTile];
    for (int r = 0; r < kRows; r++) {
      const Row& row = strip.rows[r];
      const int64_t count = row.part == nullptr ? 0 : std::clamp<int64_t>(m_.columns - first, 0, kTile);
      if (count < kTile) std::memset(tile[r], 0, kTile);
      if (count > 0) read_codes<kBits, kOrder>(row, m_.stride, first, count, tile[r]);
      if (any(find_invalid(load(tile[r]), invalid_) | find_invalid(load(tile[r] + kBlock), invalid_))) bad_ = true;
      for (int64_t i = 0; i < count; i++) tile[r][i] = map_.of(tile[r][i]);
    }
    place<kCodes>([&](int r, int c) { return load(&tile[r][c]); }, out);
  }

  const lancebill_rows& m_;
  const Map map_;
  const Invalid invalid_;
  std::atomic<bool> bad_{false};
};

template <int kBits, int kCodes, int kOrder = LANCEBILL_BY_ROW>
int32_t pack_codes(const lancebill_rows& m, const Map& map, Invalid invalid) {
  return CodePacker<kBits, kCodes, kOrder>(m, map, invalid).pack();
}

// Sixteen rows of sixteen numbers to columns.
template <class Number>
void turn(const Number (&rows)[kBlock][kBlock], Number (&columns)[kBlock][kBlock]) {
  constexpr int kSide = sizeof(Bytes) / sizeof(Number);
  for (int r = 0; r < kBlock; r += kSide) {
    for (int c = 0; c < kBlock; c += kSide) {
      Bytes square[kSide];
      for (int i = 0; i < kSide; i++) square[i] = load(&rows[r + i][c]);
      transpose<sizeof(Number)>(square);
      for (int i = 0; i < kSide; i++) store(&columns[c + i][r], square[i]);
    }
  }
}

template <class Number>
void pack_groups(const lancebill_rows& m, int64_t record, int64_t gap) {
  const int64_t blocks = m.padded_rows / kBlock;
  const int64_t block_bytes = m.padded_columns * kBlock * sizeof(Number) + m.padded_columns / record * gap;
  parallel(m.threads, m.experts * blocks, [&](int64_t task, int) {
    Number tile[kBlock][kBlock], columns[kBlock][kBlock];
    const uint8_t* rows[kBlock];
    for (int r = 0; r < kBlock; r++) rows[r] = find_row(m, task / blocks, task % blocks * kBlock + r).bytes(m.stride);
    uint8_t* out = m.out + task * block_bytes;
    for (int64_t first = 0; first < m.padded_columns; first += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, m.padded_columns - first);
      for (int r = 0; r < kBlock; r++) {
        const int64_t real = rows[r] == nullptr ? 0 : std::clamp<int64_t>(m.columns - first, 0, count);
        if (real < kBlock) std::memset(tile[r], 0, sizeof tile[r]);
        if (real == kBlock) {
          std::memcpy(tile[r], rows[r] + first * sizeof(Number), sizeof tile[r]);
        } else if (real > 0) {
          std::memcpy(tile[r], rows[r] + first * sizeof(Number), real * sizeof(Number));
        }
      }
      turn(tile, columns);
      for (int64_t g = 0; g < count; g++) {
        std::memcpy(out, columns[g], sizeof columns[g]);
        out += sizeof columns[g] + ((first + g + 1) % record == 0 ? gap : 0);
      }
    }
  });
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

int32_t lancebill_pack_codes(const lancebill_rows* rows, int32_t bits, int32_t codes, const uint8_t* table,
                             int32_t table_size, const uint8_t* invalid, int32_t invalids) {
  const Invalid bad{invalid, invalids};
  const Map map(table, table_size);
  const lancebill_rows& m = *rows;
  if (codes == LANCEBILL_TABLE4) {
    if (bits == 8) return pack_codes<8, LANCEBILL_TABLE4>(m, map, bad);
    if (m.order == LANCEBILL_BY_WORD) return pack_codes<4, LANCEBILL_TABLE4, LANCEBILL_BY_WORD>(m, map, bad);
    if (m.order == LANCEBILL_BY_COLUMN) return pack_codes<4, LANCEBILL_TABLE4, LANCEBILL_BY_COLUMN>(m, map, bad);
    return pack_codes<4, LANCEBILL_TABLE4>(m, map, bad);
  }
  if (codes == LANCEBILL_BYTE) return pack_codes<8, LANCEBILL_BYTE>(m, map, bad);
  if (codes == LANCEBILL_BITS6) return pack_codes<8, LANCEBILL_BITS6>(m, map, bad);
  return pack_codes<8, LANCEBILL_FLOAT8>(m, map, bad);
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
