// Vectors of four rows with the vector extensions of the compiler, for every machine.
#pragma once

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

struct Portable {
  static constexpr int lanes = 4;
  static constexpr int rows = 2;  // each number of rows and blocks has kernels of its own: few are built faster
  static constexpr int blocks = 2;
  static constexpr int blocks_at_once(int) { return 1; }
  static constexpr bool prefetch_twice = true;
  static constexpr bool lane_inputs = false;
  static constexpr bool split_bytes = false;
  static constexpr bool signed_codes = false;
  static constexpr bool biased_sums = false;
  static constexpr bool short_sums = false;
  static constexpr bool plain_nibbles = false;
  static constexpr bool tiles = false;
  static constexpr int word_rows = 0;
  typedef int32_t I32 __attribute__((vector_size(16)));
  typedef float F32 __attribute__((vector_size(16)));
  typedef uint32_t Codes __attribute__((vector_size(16)));  // the four codes of a row are the bytes of its lane
  struct Table {
    uint8_t entries[16];
  };

  static Codes load(const uint8_t* p) { return read<Codes>(p); }
  static Table table(const uint8_t* entries) { return read<Table>(entries); }
  static Codes low(const Table& table, Codes codes) { return look_up(table, codes & 0x0f0f0f0fu); }
  static Codes high(const Table& table, Codes codes) { return look_up(table, (codes >> 4) & 0x0f0f0f0fu); }

  static Codes low_six(Codes codes) { return codes & 0x3f3f3f3fu; }
  static Codes top_pairs(Codes a, Codes b, Codes c) {
    return ((a >> 6) & 0x03030303u) | ((b >> 4) & 0x0c0c0c0cu) | ((c >> 2) & 0x30303030u);
  }

  static I32 dot(I32 sum, Codes codes, const int8_t* x) {
    for (int i = 0; i < 4; i++) sum += (I32)((codes >> (8 * i)) & 255u) * int32_t{x[i]};
    return sum;
  }

  static I32 broadcast(int32_t value) { return I32{} + value; }
  static I32 add(I32 a, I32 b) { return a + b; }
  static I32 multiply(I32 a, I32 b) { return a * b; }
  template <int Bits>
  static I32 shift_left(I32 a) { return a * (1 << Bits); }
  static I32 zeros(const uint8_t* p, int part) {
    p += part * lanes;
    return I32{p[0], p[1], p[2], p[3]};
  }

  static F32 zero() { return F32{}; }
  static F32 spread(float value) { return F32{} + value; }
  static F32 sum(F32 a, F32 b) { return a + b; }
  static F32 mul(F32 a, F32 b) { return a * b; }
  static F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
  static F32 to_float(I32 a) { return __builtin_convertvector(a, F32); }
  static F32 floats(const uint8_t* p, int part) { return read<F32>(p + 16 * part); }
  static void store(float* p, F32 a) { std::memcpy(p, &a, sizeof a); }

  static F32 signed_bytes(const uint8_t* p, int part) {
    F32 result;
    for (int i = 0; i < lanes; i++) result[i] = static_cast<int8_t>(p[part * lanes + i]);
    return result;
  }

  static F32 scales(int32_t kind, const uint8_t* p, int part) {
    F32 result;
    for (int i = 0; i < lanes; i++) result[i] = scale(kind, p, part * lanes + i);
    return result;
  }

  struct Minifloat {
    const float* values;
    F32 unit;
    explicit Minifloat(const Packed& p) : values(p.minifloats), unit(spread(p.unit)) {}
    F32 decode(const uint8_t* p) const { return F32{values[p[0]], values[p[1]], values[p[2]], values[p[3]]}; }
  };

  // The fp32 numbers that the `nibble`-th four bits of each lane select.
  struct FloatTable {
    const float* entries;
    explicit FloatTable(const float* values) : entries(values) {}
    F32 at(Codes codes, int nibble) const {
      const Codes index = (codes >> (4 * nibble)) & 15u;
      return F32{entries[index[0]], entries[index[1]], entries[index[2]], entries[index[3]]};
    }
  };

 private:
  template <class T>
  static T read(const uint8_t* p) {
    T result;
    std::memcpy(&result, p, sizeof result);
    return result;
  }

  static Codes look_up(const Table& table, Codes codes) {
    uint8_t bytes[16];
    std::memcpy(bytes, &codes, 16);
    for (uint8_t& byte : bytes) byte = table.entries[byte];
    return read<Codes>(bytes);
  }

  static float scale(int32_t kind, const uint8_t* p, int i) {
    switch (kind) {
      case LANCEBILL_SCALE_BF16: return from_bf16(read<uint16_t>(p + 2 * i));
      case LANCEBILL_SCALE_F16: return from_f16(read<uint16_t>(p + 2 * i));
      case LANCEBILL_SCALE_F32: return read<float>(p + 4 * i);
      case LANCEBILL_SCALE_E8M0: return bits_as<float>(uint32_t{p[i]} << 23);
      case LANCEBILL_SCALE_E4M3: return from_f16(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
      default: return 1;
    }
  }
};

}  // namespace
}  // namespace lancebill
