// Transposition of matrices of words, bytes and nibbles: in tiles, so that both sides are read and written by cache line.
#include <algorithm>

#include "bytes.h"
#include "numbers.h"

namespace lancebill {
namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line; rows are often a power of two apart and share cache sets

// Squares of 16 bytes a side, in tiles of whole cache lines; the rest element by element.
template <class Word>
void transpose_matrix(const Word* in, Word* out, int64_t rows, int64_t columns) {
  constexpr int kSide = 16 / sizeof(Word);
  const int64_t whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
  constexpr int64_t kTile = kLine / sizeof(Word);
  for (int64_t left = 0; left < whole_columns; left += kTile) {
    for (int64_t r = 0; r < whole_rows; r += kSide) {
      for (int64_t c = left; c < std::min(left + kTile, whole_columns); c += kSide) {
        Bytes square[kSide];
        for (int i = 0; i < kSide; i++) square[i] = load(in + (r + i) * columns + c);
        transpose<sizeof(Word)>(square);
        for (int i = 0; i < kSide; i++) store(out + (c + i) * rows + r, square[i]);
      }
    }
  }
  for (int64_t c = 0; c < columns; c++) {
    for (int64_t r = c < whole_columns ? whole_rows : 0; r < rows; r++) out[c * rows + r] = in[r * columns + c];
  }
}

template <class Word>
void transpose_all(const void* in, void* out, int64_t batch, int64_t rows, int64_t columns) {
  for (int64_t b = 0; b < batch; b++) {
    const int64_t first = b * rows * columns;
    transpose_matrix(static_cast<const Word*>(in) + first, static_cast<Word*>(out) + first, rows, columns);
  }
}

// Sixteen bytes, of which `count` exist; zeros beyond.
Bytes load_some(const uint8_t* bytes, int64_t count) {
  uint8_t some[16] = {};
  if (count > 0) std::memcpy(some, bytes, count);
  return load(some);
}

struct Nibbles {
  static constexpr int64_t kRows = 2 * kLine, kColumns = 2 * kLine;  // of a tile

  const uint8_t* in;
  uint8_t* out;
  int64_t in_stride, out_stride;  // bytes of a row
  const int32_t* order;

  // Thirty-two rows of sixteen bytes to columns of a tile. A partial square has fewer rows (an even number) or bytes.
  template <bool kWhole>
  void turn_square(const uint8_t* first, int64_t rows, int64_t bytes, uint8_t (*columns)[kLine]) const {
    Bytes low[16], high[16];  // of pairs of rows: the low nibbles of their bytes, and the high ones
    for (int i = 0; i < 16; i++) {
      const uint8_t *even = first + 2 * i * in_stride, *odd = even + in_stride;
      const int64_t inside = 2 * i < rows ? bytes : 0;
      const Bytes a = kWhole ? load(even) : load_some(even, inside), b = kWhole ? load(odd) : load_some(odd, inside);
      low[i] = (a & 15) | (b << 4);
      high[i] = (a >> 4) | (b & 0xF0);
    }
    transpose<1>(low);
    transpose<1>(high);
    for (int i = 0; i < 16; i++) {  // eight columns share four bytes
      store(columns[i / 4 * 8 + order[2 * (i % 4)]], low[i]);
      store(columns[i / 4 * 8 + order[2 * (i % 4) + 1]], high[i]);
    }
  }

  // The tile at (top, left): squares to a buffer that shares no cache sets, then whole lines to their columns.
  void turn_tile(int64_t top, int64_t left, int64_t rows, int64_t columns) const {
    alignas(64) uint8_t tile[kColumns][kLine];
    for (int64_t row = 0; row < rows; row += 32) {
      for (int64_t byte = 0; byte < columns / 2; byte += 16) {
        const uint8_t* first = in + (top + row) * in_stride + left / 2 + byte;
        const int64_t high = std::min<int64_t>(32, rows - row), wide = std::min<int64_t>(16, columns / 2 - byte);
        auto* corner = reinterpret_cast<uint8_t(*)[kLine]>(&tile[2 * byte][row / 2]);
        high == 32 && wide == 16 ? turn_square<true>(first, 32, 16, corner)
                                 : turn_square<false>(first, high, wide, corner);
      }
    }
    for (int64_t c = 0; c < columns; c++) {
      uint8_t* column = out + (left + c) * out_stride + top / 2;
      rows == kRows ? std::memcpy(column, tile[c], kLine) : std::memcpy(column, tile[c], rows / 2);
    }
  }

  void turn(int64_t rows, int64_t columns) const {
    for (int64_t top = 0; top < rows; top += kRows) {
      for (int64_t left = 0; left < columns; left += kColumns) {
        turn_tile(top, left, std::min(kRows, rows - top), std::min(kColumns, columns - left));
      }
    }
  }
};

}  // namespace
}  // namespace lancebill

using namespace lancebill;

void lancebill_transpose(const void* in, void* out, int64_t batch, int64_t rows, int64_t columns, int32_t bytes) {
  if (bytes == 1) {
    transpose_all<uint8_t>(in, out, batch, rows, columns);
  } else if (bytes == 2) {
    transpose_all<uint16_t>(in, out, batch, rows, columns);
  } else {
    transpose_all<uint32_t>(in, out, batch, rows, columns);
  }
}

void lancebill_turn_nibbles(const uint8_t* in, uint8_t* out, int64_t batch, int64_t rows, int64_t columns,
                            const int32_t* order) {
  for (int64_t b = 0; b < batch; b++) {
    const int64_t first = b * rows * columns / 2;
    Nibbles{in + first, out + first, columns / 2, rows / 2, order}.turn(rows, columns);
  }
}
