// Reading the fields of GGUF's blocks, by the table of planes that also defines them in Python.
#include <cstring>
#include <utility>

#include "bytes.h"
#include "numbers.h"

namespace lancebill {
namespace {

// The lanes of one run of bytes, each lane `run` numbers further.
inline void read_run(const uint8_t* __restrict bytes, const lancebill_plane& p, int run, uint8_t* __restrict out) {
  const uint8_t mask = (1 << p.width) - 1;
  for (int lane = 0; lane < p.lanes; lane++, out += run) {
    const int down = p.bit + lane * p.width;
    for (int i = 0; i < run; i++) out[i] |= static_cast<uint8_t>(((bytes[i] >> down) & mask) << p.shift);
  }
}

// With the run's length known to the compiler where it is long.
void read_plane(const uint8_t* block, const lancebill_plane& p, uint8_t* out) {
  const uint8_t* bytes = block + p.start;
  out += p.first;
  if (p.width == 8) {
    std::memcpy(out, bytes, p.size);
    return;
  }
  for (int at = 0; at < p.size; at += p.run, bytes += p.run, out += p.run * p.lanes) {
    switch (p.run) {
      case 16: read_run(bytes, p, 16, out); break;
      case 32: read_run(bytes, p, 32, out); break;
      case 64: read_run(bytes, p, 64, out); break;
      default: read_run(bytes, p, p.run, out);
    }
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
void read_nibbles(const uint8_t* blocks, int64_t count, int64_t size, const lancebill_plane& p, uint8_t* out) {
  constexpr int kStep = kRun < 16 ? 16 : kRun;
  for (int64_t b = 0; b < count; b++) {
    const uint8_t* bytes = blocks + b * size + p.start;
    for (int at = 0; at < p.size; at += kStep, out += kStep) read_nibble_run<kRun>(bytes + at, out);
  }
}

// `kSize` whole bytes of each block.
template <int kSize>
void read_bytes(const uint8_t* blocks, int64_t count, int64_t size, int flip, uint8_t* __restrict out) {
  uint8_t flipped[kSize] = {};
  for (int i = flip - 1; flip && i < kSize; i += flip) flipped[i] = 0x80;
  for (int64_t b = 0; b < count; b++, out += kSize) {
    for (int i = 0; i < kSize; i++) out[i] = blocks[b * size + i] ^ flipped[i];
  }
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

void lancebill_read_planes(const uint8_t* blocks, int64_t count, int64_t size, const lancebill_plane* planes,
                           int32_t plane_count, int32_t flip, uint8_t* out, int64_t numbers) {
  if (plane_count == 1 && planes[0].width == 8 && (numbers == 2 || numbers == 32)) {  // fp16 scales, Q8_0
    const uint8_t* bytes = blocks + planes[0].start;
    numbers == 2 ? read_bytes<2>(bytes, count, size, flip, out) : read_bytes<32>(bytes, count, size, flip, out);
    return;
  }
  for (int64_t b = 0; b < count; b++, out += numbers) {
    if (planes[0].width != 8) std::memset(out, 0, numbers);
    for (int p = 0; p < plane_count; p++) read_plane(blocks + b * size, planes[p], out);
    if (flip == 1) {
      for (int64_t i = 0; i < numbers; i++) out[i] ^= 0x80;
    } else if (flip > 1) {
      for (int64_t i = flip - 1; i < numbers; i += flip) out[i] ^= 0x80;
    }
  }
}

void lancebill_read_nibbles(const uint8_t* blocks, int64_t count, int64_t size, const lancebill_plane* plane,
                            uint8_t* out) {
  switch (plane->run) {
    case 8: read_nibbles<8>(blocks, count, size, *plane, out); break;
    case 16: read_nibbles<16>(blocks, count, size, *plane, out); break;
    case 32: read_nibbles<32>(blocks, count, size, *plane, out); break;
    default: read_nibbles<64>(blocks, count, size, *plane, out);
  }
}
