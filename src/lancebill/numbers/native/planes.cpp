// Bit fields to bytes: those of GGUF's blocks, by the table of planes that also defines them in Python, and dense bit
// streams. Eight numbers at a time, in a word of 64 bits.
#include <algorithm>
#include <cstring>
#include <utility>

#include "bytes.h"
#include "numbers.h"

namespace lancebill {
namespace {

constexpr uint64_t kEach = 0x0101010101010101;  // times a byte: that byte eight times
constexpr int64_t kChunk = 32;                  // blocks that stay in the first cache while all fields are read

// `kBytes` bytes, followed by zeros.
template <int kBytes>
inline uint64_t read_word(const uint8_t* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, kBytes);
  return word;
}

// The lowest `bits` of each `step` bits, beginning with bit `first`.
constexpr uint64_t every(int step, int first, int bits) {
  uint64_t mask = 0;
  for (int at = first; at < 64; at += step) mask |= ((uint64_t{1} << bits) - 1) << at;
  return mask;
}

// Of each two neighbouring runs of `kRun` numbers of `kBits` bits, the second moves to where its bytes will be.
template <int kBits, int kRun>
inline uint64_t move_apart(uint64_t numbers) {
  constexpr uint64_t first = every(16 * kRun, 0, kRun * kBits), second = every(16 * kRun, 8 * kRun, kRun * kBits);
  return (numbers & first) | (numbers << kRun * (8 - kBits) & second);
}

// Eight numbers of `kBits` bits that follow each other, one per byte.
template <int kBits>
inline uint64_t spread(uint64_t numbers) {
  return move_apart<kBits, 1>(move_apart<kBits, 2>(move_apart<kBits, 4>(numbers)));
}

template <int kBits>
void unpack_bits(const uint8_t* __restrict data, int64_t groups, uint8_t* __restrict out) {
  for (int64_t left = groups; left > 0; left--, data += kBits, out += 8) {
    // Whole words as long as there are some: it takes several loads to read only three bytes.
    const uint64_t numbers = spread<kBits>(left * kBits < 8 ? read_word<kBits>(data) : read_word<8>(data));
    std::memcpy(out, &numbers, 8);
  }
}

struct Blocks {
  const uint8_t* bytes;
  int64_t count, size;  // of blocks, and bytes of each
  uint8_t* out;
  int64_t numbers;  // of each block
};

// The bits of a plane whose bytes each have a piece of numbers that are `kRun` apart, `kBytes` bytes at a time.
template <int kRun>
void add_runs(const Blocks& blocks, const lancebill_plane& p) {
  constexpr int kBytes = std::min(kRun, 8);
  const uint64_t mask = kEach * ((1 << p.width) - 1);
  for (int64_t b = 0; b < blocks.count; b++) {
    const uint8_t* __restrict bytes = blocks.bytes + b * blocks.size + p.start;
    uint8_t* __restrict out = blocks.out + b * blocks.numbers + p.first;
    for (int at = 0; at < p.size; at += kRun, bytes += kRun) {
      for (int lane = 0; lane < p.lanes; lane++, out += kRun) {
        const int down = p.bit + lane * p.width;
        for (int i = 0; i < kRun; i += kBytes) {
          const uint64_t word = read_word<kBytes>(out + i) | ((read_word<kBytes>(bytes + i) >> down) & mask) << p.shift;
          std::memcpy(out + i, &word, kBytes);
        }
      }
    }
  }
}

// The same if the numbers of a byte are neighbours.
template <int kWidth>
void add_neighbours(const Blocks& blocks, const lancebill_plane& p) {
  for (int64_t b = 0; b < blocks.count; b++) {
    const uint8_t* __restrict bytes = blocks.bytes + b * blocks.size + p.start;
    uint8_t* __restrict out = blocks.out + b * blocks.numbers + p.first;
    for (int at = 0; at < p.size; at += kWidth, out += 8) {
      const uint64_t word = read_word<8>(out) | spread<kWidth>(read_word<kWidth>(bytes + at)) << p.shift;
      std::memcpy(out, &word, 8);
    }
  }
}

// Any plane, byte by byte.
void add_pieces(const Blocks& blocks, const lancebill_plane& p) {
  for (int64_t b = 0; b < blocks.count; b++) {
    const uint8_t* __restrict bytes = blocks.bytes + b * blocks.size + p.start;
    for (int i = 0; i < p.size * p.lanes; i++) {
      const int lane = i / p.run % p.lanes, byte = i / (p.run * p.lanes) * p.run + i % p.run;
      const int piece = (bytes[byte] >> (p.bit + lane * p.width)) & ((1 << p.width) - 1);
      blocks.out[b * blocks.numbers + p.first + i] |= static_cast<uint8_t>(piece << p.shift);
    }
  }
}

void add_plane(const Blocks& blocks, const lancebill_plane& p) {
  const bool neighbours = p.run == 1 && p.lanes * p.width == 8 && p.size % p.width == 0;
  if (neighbours && p.width == 1) return add_neighbours<1>(blocks, p);
  if (neighbours && p.width == 2) return add_neighbours<2>(blocks, p);
  if (neighbours && p.width == 4) return add_neighbours<4>(blocks, p);
  switch (p.size % p.run == 0 ? p.run : 0) {
    case 4: return add_runs<4>(blocks, p);
    case 8: return add_runs<8>(blocks, p);
    case 16: return add_runs<16>(blocks, p);
    case 32: return add_runs<32>(blocks, p);
    case 64: return add_runs<64>(blocks, p);
    default: add_pieces(blocks, p);
  }
}

// Neighbouring nibbles share a byte.
Bytes join_pairs(Bytes a, Bytes b) {
  Bytes even, odd;
  separate<1>(a, b, even, odd);
  return even | (odd << 4);
}

// A run of bytes: its low nibbles, then its high nibbles. A run of 8 bytes comes with the next one.
template <int kRun>
void read_nibble_run(const uint8_t* bytes, uint8_t* out) {
  if (kRun <= 16) {
    const Bytes v = load(bytes);
    store(out, join_pairs(v & 15, v >> 4));
    if (kRun == 8) {  // low, low of the next run, high, high of the next
      uint32_t words[4];
      std::memcpy(words, out, sizeof words);
      std::swap(words[1], words[2]);
      std::memcpy(out, words, sizeof words);
    }
    return;
  }
  for (int i = 0; i < kRun; i += 32) {
    const Bytes a = load(bytes + i), b = load(bytes + i + 16);
    store(out + i / 2, join_pairs(a & 15, b & 15));
    store(out + (kRun + i) / 2, join_pairs(a >> 4, b >> 4));
  }
}

template <int kRun>
void read_nibbles(const Blocks& blocks, const lancebill_plane& p) {
  constexpr int kStep = kRun < 16 ? 16 : kRun;
  uint8_t* out = blocks.out;
  for (int64_t b = 0; b < blocks.count; b++) {
    const uint8_t* bytes = blocks.bytes + b * blocks.size + p.start;
    for (int at = 0; at < p.size; at += kStep, out += kStep) read_nibble_run<kRun>(bytes + at, out);
  }
}

// `kSize` whole bytes of each block.
template <int kSize>
void read_bytes(const Blocks& blocks, int start, int flip) {
  uint8_t flipped[kSize] = {};
  for (int i = flip - 1; flip && i < kSize; i += flip) flipped[i] = 0x80;
  const uint8_t* __restrict bytes = blocks.bytes + start;
  uint8_t* __restrict out = blocks.out;
  for (int64_t b = 0; b < blocks.count; b++, out += kSize, bytes += blocks.size) {
    for (int i = 0; i < kSize; i++) out[i] = bytes[i] ^ flipped[i];
  }
}

void read_field(const Blocks& blocks, const lancebill_field& field) {
  const lancebill_plane& first = field.planes[0];
  switch (field.nibbles ? first.run : 0) {
    case 8: return read_nibbles<8>(blocks, first);
    case 16: return read_nibbles<16>(blocks, first);
    case 32: return read_nibbles<32>(blocks, first);
    case 64: return read_nibbles<64>(blocks, first);
  }
  switch (field.plane_count == 1 && first.width == 8 ? field.bytes : 0) {
    case 1: return read_bytes<1>(blocks, first.start, field.flip);
    case 2: return read_bytes<2>(blocks, first.start, field.flip);
    case 4: return read_bytes<4>(blocks, first.start, field.flip);
    case 16: return read_bytes<16>(blocks, first.start, field.flip);
    case 32: return read_bytes<32>(blocks, first.start, field.flip);
  }
  const int64_t bytes = blocks.count * field.bytes;
  std::memset(blocks.out, 0, bytes);
  for (int p = 0; p < field.plane_count; p++) add_plane(blocks, field.planes[p]);
  for (int64_t i = field.flip - 1; field.flip && i < bytes; i += field.flip) blocks.out[i] ^= 0x80;
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

void lancebill_read_fields(const uint8_t* blocks, int64_t count, int64_t size, const lancebill_field* fields,
                           int32_t field_count) {
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t some = std::min(kChunk, count - first);
    for (int f = 0; f < field_count; f++) {
      const int64_t bytes = fields[f].bytes;
      read_field({blocks + first * size, some, size, fields[f].out + first * bytes, bytes}, fields[f]);
    }
  }
}

void lancebill_unpack_bits(const uint8_t* data, int64_t groups, int32_t bits, uint8_t* out) {
  switch (bits) {
    case 1: return unpack_bits<1>(data, groups, out);
    case 2: return unpack_bits<2>(data, groups, out);
    case 3: return unpack_bits<3>(data, groups, out);
    case 4: return unpack_bits<4>(data, groups, out);
    case 5: return unpack_bits<5>(data, groups, out);
    case 6: return unpack_bits<6>(data, groups, out);
    case 7: return unpack_bits<7>(data, groups, out);
  }
}
