// 4-bit codes in words that lie across the rows, to units of TABLE4 codes: nothing is transposed in memory before.
#pragma once

#include <cstdint>

#include "bytes.h"
#include "pack.h"

namespace lancebill {
namespace {

constexpr int kBlock = 16, kTile = 32, kUnits = kTile / 4;  // rows of a block; columns of a tile, in units of 4

// The nibble of a word that has row r % 8, where a word has rows of one column.
constexpr int kNibbleOfRow[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Two codes per byte of rows that share packed bytes: their low nibbles, and their high ones.
inline void pair_nibbles(Bytes even, Bytes odd, Bytes& low, Bytes& high) {
  low = (even & 15) | (odd << 4);
  high = (even >> 4) | (odd & 0xF0);
}

// A tile of two blocks, whose words have eight columns of a row, those of sixteen rows side by side.
inline void place_words(const uint8_t* even, const uint8_t* odd, int64_t stride, uint8_t* out) {
  for (int word = 0; word < kTile / 8; word++, even += stride, odd += stride, out += 2 * 64) {
    for (int r = 0; r < kBlock; r += 4) {
      Bytes low, high, first, second, left, right;
      pair_nibbles(load(even + 4 * r), load(odd + 4 * r), low, high);
      interleave<1>(low, high, first, second);  // of two rows each
      separate<4>(first, second, left, right);
      store(out + 4 * r, left);
      store(out + 64 + 4 * r, right);
    }
  }
}

// Four columns of sixteen rows: for each byte of a column's two words, four bytes.
inline void gather_columns(const uint8_t* words, int64_t stride, Bytes (&out)[2]) {
  Bytes columns[4], pairs[2], rest;
  for (int c = 0; c < 4; c++) columns[c] = load_half(words + c * stride);
  for (int i = 0; i < 2; i++) interleave<1>(columns[2 * i], columns[2 * i + 1], pairs[i], rest);
  interleave<2>(pairs[0], pairs[1], out[0], out[1]);
}

// A tile of two blocks, whose words have eight rows of a column.
inline void place_columns(const uint8_t* even, const uint8_t* odd, int64_t stride, uint8_t* out) {
  for (int unit = 0; unit < kUnits; unit++, even += 4 * stride, odd += 4 * stride, out += 64) {
    Bytes evens[2], odds[2];
    gather_columns(even, stride, evens);
    gather_columns(odd, stride, odds);
    for (int word = 0; word < 2; word++) {
      Bytes low, high, first, second;
      pair_nibbles(evens[word], odds[word], low, high);  // rows 0, 4, 1, 5 and 2, 6, 3, 7
      separate<4>(low, high, first, second);
      store(out + 32 * word, first);
      store(out + 32 * word + 16, second);
    }
  }
}

}  // namespace
}  // namespace lancebill
