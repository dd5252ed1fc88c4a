// Transposition of matrices of words, bytes and nibbles: in tiles, so that both sides are read and written by cache line.
#include <algorithm>

#include "bytes.h"
#include "numbers.h"

namespace lancebill {
namespace {

// Squares of 16 bytes a side; the rest element by element.
template <class Word>
void transpose_matrix(const Word* in, Word* out, int64_t rows, int64_t columns) {
  constexpr int kSide = 16 / sizeof(Word);
  const int64_t whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
  for (int64_t c = 0; c < whole_columns; c += kSide) {
    for (int64_t r = 0; r < whole_rows; r += kSide) {
      Bytes square[kSide];
      for (int i = 0; i < kSide; i++) square[i] = load(in + (r + i) * columns + c);
      transpose<sizeof(Word)>(square);
      for (int i = 0; i < kSide; i++) store(out + (c + i) * rows + r, square[i]);
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
  const uint8_t* in;
  uint8_t* out;
  int64_t in_stride, out_stride;  // bytes of a row
  const int32_t* order;

  // Rows [row, row + 32) of sixteen bytes from `byte`. A partial square has fewer rows (an even number) or bytes.
  template <bool kWhole>
  void turn_square(int64_t row, int64_t byte, int64_t rows, int64_t bytes) const {
    Bytes low[16], high[16];  // of pairs of rows: the low nibbles of their bytes, and the high ones
    const uint8_t* first = in + row * in_stride + byte;
    for (int i = 0; i < 16; i++) {
      const uint8_t *even = first + 2 * i * in_stride, *odd = even + in_stride;
      const int64_t inside = 2 * i < rows ? bytes : 0;
      const Bytes a = kWhole ? load(even) : load_some(even, inside), b = kWhole ? load(odd) : load_some(odd, inside);
      low[i] = (a & 15) | (b << 4);
      high[i] = (a >> 4) | (b & 0xF0);
    }
    transpose<1>(low);
    transpose<1>(high);
    for (int i = 0; i < (kWhole ? 16 : bytes); i++) {
      uint8_t* columns = out + (byte + i) / 4 * 8 * out_stride + row / 2;  // eight of them share four bytes
      const int nibble = 2 * (i % 4);
      std::memcpy(columns + order[nibble] * out_stride, &low[i], kWhole ? 16 : rows / 2);
      std::memcpy(columns + order[nibble + 1] * out_stride, &high[i], kWhole ? 16 : rows / 2);
    }
  }

  // In tiles that read and write whole cache lines.
  void turn(int64_t rows) const {
    constexpr int64_t kRows = 128, kBytes = 64;
    for (int64_t top = 0; top < rows; top += kRows) {
      for (int64_t left = 0; left < in_stride; left += kBytes) {
        for (int64_t byte = left; byte < std::min(left + kBytes, in_stride); byte += 16) {
          for (int64_t row = top; row < std::min(top + kRows, rows); row += 32) {
            const int64_t high = std::min<int64_t>(32, rows - row), wide = std::min<int64_t>(16, in_stride - byte);
            high == 32 && wide == 16 ? turn_square<true>(row, byte, 32, 16) : turn_square<false>(row, byte, high, wide);
          }
        }
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
    Nibbles{in + first, out + first, columns / 2, rows / 2, order}.turn(rows);
  }
}
