// Many input rows: weights are expanded to bf16 tiles, scales applied, and AMX multiplies.
//
// A tile of weights has 32 columns of a row block, as the instruction wants it: a line for each pair of columns, in it
// the pairs of the 16 output rows. Expanded weights never leave the caches: few input rows pass by a ring of tiles in L1,
// expanded one step ahead of the products so that both kinds of units stay busy; for more rows the two row blocks are
// kept whole, in L2, for the passes that follow.
//
// Tables are looked up and scaled in fp16, 32 weights at once: its exponent then stands where bf16 has its own, which
// only differs by a power of two. A row's scales are brought into fp16's range by another. Both are taken back from the
// sums; see `Halves`.
#pragma once

#include "kernel.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

constexpr int kTileRows = 16, kTileBytes = 1024, kPair = 2;
constexpr int kTileHalves = kTileBytes / 2;
constexpr int kPassRows = 3 * kTileRows;  // input rows of one pass: six of the eight tiles are its sums
constexpr int64_t kRing = 4;              // pairs of weight tiles that are alive while few rows pass

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Whether weights are made in fp16: those of tables, but for offsets that are subtracted after scaling.
inline bool in_halves(const Packed& p) {
#ifdef __AVX512FP16__
  return p.matrix->codes == LANCEBILL_TABLE4 && p.matrix->zero != LANCEBILL_ZERO_OFFSET_F32;
#else
  return (void)p, false;
#endif
}

// Bits of fp16 moved down by three are a bf16 number 2^-112 times as large. Inputs are made larger by as much.
constexpr int kHalfShift = 3, kInputExponent = 112;

#ifdef __AVX512FP16__
// A row block's scales and the table in fp16. Rows are multiplied by powers of two that bring their largest scale to
// 2^10 .. 2^11, tables by one that keeps them below 16: products stay finite, and down to 2^-24 of a row's largest exact.
class Halves {
 public:
  struct Group {
    __m512h scale, zero;
  };

  Halves(const Packed& p, const uint8_t* scales) : p_(p) {
    const __m512 values = _mm512_loadu_ps(p.values);
    const float size = _mm512_reduce_max_ps(_mm512_abs_ps(values));
    const float shrink = size < 16 ? 1 : bits_as<float>((257u << 23) - (bits_as<uint32_t>(size) & kExponentMask));
    table_ = _mm512_broadcast_i64x4(to_half(_mm512_mul_ps(values, _mm512_set1_ps(shrink))));
    const __m512 bounded = _mm512_min_ps(largest_scales(p, scales), _mm512_set1_ps(0x1p100f));
    const __m512i peaks = _mm512_castps_si512(_mm512_max_ps(bounded, _mm512_set1_ps(0x1p-100f)));
    const __m512i powers = _mm512_and_si512(peaks, _mm512_set1_epi32(kExponentMask));
    const __m512 inverse = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(254 << 23), powers));
    grow_ = _mm512_mul_ps(inverse, _mm512_set1_ps(0x1p10f));
    _mm512_store_ps(back_, _mm512_mul_ps(_mm512_castsi512_ps(powers), _mm512_set1_ps(p.unit / shrink * 0x1p-10f)));
    shrink_ = shrink;
  }

  Group group(const uint8_t* scales, const uint8_t* zeros) const {
    // What is cut off later would make weights smaller: a little more makes up for it, too little to change exact ones.
    const __m512 more = _mm512_mul_ps(grow_, _mm512_set1_ps(1 + 0x1.4p-9f));
    const __m512h scale = twice(_mm512_mul_ps(Avx512::scales(p_.matrix->scale, scales, 0), more));
    if (zeros == nullptr) return {scale, scale};
    return {scale, twice(_mm512_mul_ps(_mm512_cvtepi32_ps(Avx512::zeros(zeros, 0)), _mm512_set1_ps(shrink_)))};
  }

  // A line of a tile: two columns of each row, whose codes are at `Bit` of either half of its word.
  template <bool Zeros, int Bit>
  LANCEBILL_INLINE void line(__m512i word, Group group, uint16_t* line) const {
    const __m512i index = Bit == 0 ? word : _mm512_srli_epi16(word, Bit);  // five bits of it are looked at, four matter
    __m512h value = _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, table_));
    if (Zeros) value = _mm512_sub_ph(value, group.zero);
    const __m512i bits = _mm512_castph_si512(_mm512_mul_ph(value, group.scale));
    const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x8fff));
    _mm512_storeu_si512(line, _mm512_and_si512(_mm512_srai_epi16(bits, kHalfShift), kept));
  }

  const float* back() const { return back_; }

 private:
  static __m256i to_half(__m512 a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m512h twice(__m512 a) {  // each number in both halves of its word
    const __m512i words = _mm512_cvtepu16_epi32(to_half(a));
    return _mm512_castsi512_ph(_mm512_or_si512(words, _mm512_slli_epi32(words, 16)));
  }

  // Of each row. Bits of magnitudes order like the numbers, so that a line of scales is compared as it lies.
  static __m512 largest_scales(const Packed& p, const uint8_t* scales) {
    const int32_t kind = p.matrix->scale;
    if (kind == LANCEBILL_SCALE_NONE) return _mm512_set1_ps(1);
    alignas(64) uint8_t line[64];
    const auto over_lines = [&](__m512i magnitude, auto larger) __attribute__((always_inline)) {
      __m512i top = _mm512_setzero_si512();
      for (int64_t at = 0; at < p.scale_block; at += 64) {
        const int64_t left = p.scale_block - at;
        const __mmask64 here = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
        top = larger(top, _mm512_and_si512(_mm512_maskz_loadu_epi8(here, scales + at), magnitude));
      }
      for (int bytes = 32; bytes >= p.scale_row; bytes /= 2) {  // several groups lie in one line
        _mm512_store_si512(line, top);
        top = larger(top, _mm512_maskz_loadu_epi8((__mmask64{1} << bytes) - 1, line + bytes));
      }
      _mm512_store_si512(line, top);
    };
    if (p.scale_row == kRows) {
      const int magnitude = kind == LANCEBILL_SCALE_E8M0 ? 0xff : 0x7f;
      over_lines(_mm512_set1_epi8(static_cast<char>(magnitude)), [](__m512i a, __m512i b) { return _mm512_max_epu8(a, b); });
    } else if (p.scale_row == 2 * kRows) {
      over_lines(_mm512_set1_epi16(0x7fff), [](__m512i a, __m512i b) { return _mm512_max_epu16(a, b); });
    } else {
      over_lines(_mm512_set1_epi32(0x7fffffff), [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); });
    }
    return Avx512::scales(kind, line, 0);
  }

  const Packed& p_;
  __m512i table_;
  __m512 grow_;
  float shrink_;
  alignas(64) float back_[kRows];
};
#endif

// Turns row blocks into tiles.
class Expander {
 public:
  // Tiles are kept at their number & `mask`. Of an odd number of blocks the last is `alone`: it is then both of a pair.
  Expander(const Packed& p, const Streams& s, bool alone, uint16_t* buffer, int64_t mask)
      : p_(p), s_(s), second_(alone ? 0 : 1), buffer_(buffer), mask_(mask),
        reach_(p, s, kTileColumns * kRows), minifloat_(p)
#ifdef __AVX512FP16__
        ,
        halves_{Halves(p, s.scales), Halves(p, s.scales + second_ * p.scale_block)}
#endif
  {
  }

  uint16_t* tile(int64_t k, int block) const { return buffer_ + ((k & mask_) * kPair + block) * kTileHalves; }

  // Sixteen sums of one block and one input row in the units of the weights.
  LANCEBILL_INLINE void finish(int block, float factor, float* values) const {
    __m512 scaled = _mm512_mul_ps(_mm512_load_ps(values), _mm512_set1_ps(factor));
#ifdef __AVX512FP16__
    if (in_halves(p_)) scaled = _mm512_mul_ps(scaled, _mm512_load_ps(halves_[block].back()));
#endif
    (void)block;
    _mm512_store_ps(values, scaled);
  }

  // Columns 32k .. 32k + 31 of one of the two blocks.
  LANCEBILL_INLINE void expand(int64_t k, int block) const {
    const lancebill_matrix& m = *p_.matrix;
    uint16_t* out = tile(k, block);
    block *= second_;
    constexpr int kBytes = kTileColumns * kRows;  // of a strip's codes
    const int64_t strip = block / p_.strip * p_.strip_bytes;
    const uint8_t* codes = s_.codes + strip + k * kBytes;
    const Ahead soon = reach_.from(k * kBytes);
    for (int i = block % p_.strip * kUnit; i < kBytes; i += p_.strip * kUnit) soon.fetch(strip + i);
    const int columns = least(m.group, kTileColumns);
#ifdef __AVX512FP16__
    if (in_halves(p_)) return expand_halves(k, block, codes, out);
#endif
    for (int first = 0; first < kTileColumns; first += columns) {
      const Group group = group_of(k * kTileColumns + first, block);
      if (m.codes == LANCEBILL_TABLE4) {
        const __m512 values = _mm512_loadu_ps(p_.values);
        for (int i = first; i < first + columns; i += kUnitColumns) {
          table_unit(codes + i * kRows, block, values, group, out + i * kRows);
        }
      } else if (m.codes == LANCEBILL_BYTE) {
        for (int i = first; i < first + columns; i += kUnitColumns) byte_unit(codes + i * kRows, group, out + i * kRows);
      } else {
        const Avx512::Minifloat minifloat = minifloat_;
        for (int i = first; i < first + columns; i += 2) {
          store(minifloat.decode(codes + i * kRows), minifloat.decode(codes + (i + 1) * kRows), group, out + i * kRows);
        }
      }
    }
  }

 private:
  // A weight is scale * number - offset. By value, like the tables above: vectors in memory would be read again after
  // every store, which might have changed them for all the compiler knows.
  struct Group {
    __m512 scale, offset;
  };

#ifdef __AVX512FP16__
  LANCEBILL_INLINE void expand_halves(int64_t k, int block, const uint8_t* codes, uint16_t* out) const {
    const bool zeros = p_.matrix->zero == LANCEBILL_ZERO_U8;
    if (block == 0) return zeros ? expand_halves<true, 0>(k, codes, out) : expand_halves<false, 0>(k, codes, out);
    return zeros ? expand_halves<true, 1>(k, codes, out) : expand_halves<false, 1>(k, codes, out);
  }

  template <bool Zeros, int Block>
  LANCEBILL_INLINE void expand_halves(int64_t k, const uint8_t* codes, uint16_t* out) const {
    const Halves halves = halves_[Block];
    const auto columns = [&](int first, int count) __attribute__((always_inline)) {
      const int64_t g = (k * kTileColumns + first) / p_.matrix->group;
      const uint8_t* zeros = Zeros ? s_.zeros + Block * p_.zero_block + g * p_.zero_row : nullptr;
      const Halves::Group group = halves.group(s_.scales + Block * p_.scale_block + g * p_.scale_row, zeros);
      LANCEBILL_UNROLL
      for (int i = first; i < first + count; i += kUnitColumns) {
        const __m512i word = _mm512_loadu_si512(codes + i * kRows);
        halves.line<Zeros, 4 * Block>(word, group, out + i * kRows);
        halves.line<Zeros, 4 * Block + 8>(word, group, out + i * kRows + 32);
      }
    };
    if (p_.matrix->group >= kTileColumns) return columns(0, kTileColumns);
    columns(0, kTileColumns / 2);
    columns(kTileColumns / 2, kTileColumns / 2);
  }
#endif

  LANCEBILL_INLINE Group group_of(int64_t column, int block) const {
    const lancebill_matrix& m = *p_.matrix;
    const int64_t g = column / m.group;
    const uint8_t* zeros = m.zero == LANCEBILL_ZERO_NONE ? nullptr : s_.zeros + block * p_.zero_block + g * p_.zero_row;
    const __m512 stored = Avx512::scales(m.scale, s_.scales + block * p_.scale_block + g * p_.scale_row, 0);
    const __m512 scale = _mm512_mul_ps(stored, m.codes == LANCEBILL_FLOAT8 ? minifloat_.unit : _mm512_set1_ps(p_.unit));
    __m512 offset = _mm512_setzero_ps();
    if (m.codes == LANCEBILL_BYTE) offset = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(m.center)));
    if (m.zero == LANCEBILL_ZERO_U8) offset = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(Avx512::zeros(zeros, 0)));
    if (m.zero == LANCEBILL_ZERO_OFFSET_F32) offset = _mm512_add_ps(offset, Avx512::floats(zeros, 0));
    return {scale, offset};
  }

  // A row's four codes are nibbles of its word. Those 16 bits apart become pairs, which is why the inputs of TABLE4 tiles
  // come in the order of `write_tile_row`; vpermps looks at four bits of a word, so nothing is masked.
  LANCEBILL_INLINE static void table_unit(const uint8_t* unit, int block, __m512 values, Group group, uint16_t* out) {
    const __m512i word = _mm512_srli_epi32(_mm512_loadu_si512(unit), 4 * block);
    store(look_up<0>(word, values), look_up<16>(word, values), group, out);
    store(look_up<8>(word, values), look_up<24>(word, values), group, out + 32);
  }

  template <int Bit>
  LANCEBILL_INLINE static __m512 look_up(__m512i word, __m512 values) {
    return _mm512_permutexvar_ps(Bit == 0 ? word : _mm512_srli_epi32(word, Bit), values);
  }

  LANCEBILL_INLINE static void byte_unit(const uint8_t* unit, Group group, uint16_t* out) {
    const __m512i word = _mm512_loadu_si512(unit), byte = _mm512_set1_epi32(255);
    const auto number = [&](__m512i shifted) { return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, byte)); };
    store(number(word), number(_mm512_srli_epi32(word, 8)), group, out);
    store(number(_mm512_srli_epi32(word, 16)), number(_mm512_srli_epi32(word, 24)), group, out + 32);
  }

  // Two columns of sixteen rows, rounded to bf16 and paired.
  LANCEBILL_INLINE static void store(__m512 even, __m512 odd, Group group, uint16_t* out) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(_mm512_fmsub_ps(even, group.scale, group.offset)), half);
    const __m512i b = _mm512_add_epi32(_mm512_castps_si512(_mm512_fmsub_ps(odd, group.scale, group.offset)), half);
    constexpr uint32_t kOddHalves = 0xaaaaaaaa;
    _mm512_storeu_si512(out, _mm512_mask_blend_epi16(kOddHalves, _mm512_srli_epi32(a, 16), b));
  }

  const Packed& p_;
  const Streams& s_;
  int second_;
  uint16_t* buffer_;
  int64_t mask_;
  Reach reach_;
  Avx512::Minifloat minifloat_;
#ifdef __AVX512FP16__
  Halves halves_[kPair];
#endif
};

// sums[input tile][block] = up to 48 input rows times two row blocks. `Expand`: the weight tiles are made on the way.
template <int InputTiles, bool Expand>
void tile_pass(const Expander& weights, int64_t tiles, const uint8_t* inputs, int64_t stride, float (*sums)[kPair][256]) {
  const uint8_t *inputs1 = inputs + kTileRows * stride, *inputs2 = inputs + 2 * kTileRows * stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (InputTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if constexpr (InputTiles > 2) {
    _tile_zero(4);
    _tile_zero(5);
  }
  if (Expand) weights.expand(0, 0);
  if (Expand) weights.expand(0, 1);
  for (int64_t k = 0; k < tiles; k++) {
    const bool more = Expand && k + 1 < tiles;
    const int64_t at = k * kTileColumns * 2;
    _tile_loadd(7, weights.tile(k, 0), 64);
    if constexpr (InputTiles > 2) {  // last first, so that it can stay for the second block
      _tile_loadd(6, inputs + at, stride);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(6, inputs1 + at, stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(6, inputs2 + at, stride);
      _tile_dpbf16ps(4, 6, 7);
      if (more) weights.expand(k + 1, 0);
      _tile_loadd(7, weights.tile(k, 1), 64);
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(6, inputs1 + at, stride);
      _tile_dpbf16ps(3, 6, 7);
      _tile_loadd(6, inputs + at, stride);
      _tile_dpbf16ps(1, 6, 7);
    } else {
      _tile_loadd(6, inputs + at, stride);
      _tile_dpbf16ps(0, 6, 7);
      if constexpr (InputTiles > 1) {
        _tile_loadd(5, inputs1 + at, stride);
        _tile_dpbf16ps(2, 5, 7);
      }
      if (more) weights.expand(k + 1, 0);
      _tile_loadd(7, weights.tile(k, 1), 64);
      _tile_dpbf16ps(1, 6, 7);
      if constexpr (InputTiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
    if (more) weights.expand(k + 1, 1);
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  if constexpr (InputTiles > 1) {
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  }
  if constexpr (InputTiles > 2) {
    _tile_stored(4, sums[2][0], 64);
    _tile_stored(5, sums[2][1], 64);
  }
}

template <bool Expand>
void tile_pass(int64_t input_tiles, const Expander& weights, int64_t tiles, const uint8_t* inputs, int64_t stride,
               float (*sums)[kPair][256]) {
  if (input_tiles == 1) {
    tile_pass<1, Expand>(weights, tiles, inputs, stride, sums);
  } else if (input_tiles == 2) {
    tile_pass<2, Expand>(weights, tiles, inputs, stride, sums);
  } else {
    tile_pass<3, Expand>(weights, tiles, inputs, stride, sums);
  }
}

struct Amx : Avx512 {
  static constexpr bool tiles = true;

  // A row of inputs in bf16, which holds it exactly: its upper halves. In the order that `table_unit` makes its pairs.
  // Comes back with what the row's sums are to be multiplied by.
  static float write_tile_row(const Packed& p, const float* values, uint8_t* record) {
    const float peak = in_halves(p) ? largest(values, p.columns) : 1;
    const bool scaled = in_halves(p) && finite(peak);
    const uint32_t exponent = most(bits_as<uint32_t>(peak) & kExponentMask, uint32_t{127 + kInputExponent - 126} << 23);
    const float factor = scaled ? bits_as<float>(exponent) : 1;
    const __m512 grow = _mm512_set1_ps(scaled ? bits_as<float>((uint32_t{254 + kInputExponent} << 23) - exponent) : 1);
    const __m512i natural = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i paired = _mm512_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m512i order = p.matrix->codes == LANCEBILL_TABLE4 ? paired : natural;
    for (int64_t k = 0; k < p.columns; k += 16) {
      const __m512i numbers = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(values + k), grow));
      const __m512i words = _mm512_permutexvar_epi32(order, numbers);
      const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(record + 2 * k), halves);
    }
    return factor;
  }

  // See `blocks_product` in layer.h.
  template <class Results>
  static void tile_product(const Call& call, const Packed& p, int64_t low, int64_t high, int64_t next, int64_t slot,
                           int64_t end, int thread, const Results& results) {
    const Inputs& inputs = call.inputs_of(p);
    uint16_t* buffer = reinterpret_cast<uint16_t*>(row_buffers(call, thread).values + 3 * call.row_floats);
    const int64_t count = p.columns / kTileColumns;
    const TileConfig config;
    _tile_loadconfig(&config);
    alignas(64) float sums[kPassRows / kTileRows][kPair][kTileRows * kRows];
    for (int64_t block = low; block < high; block += kPair) {
      const int64_t blocks = least<int64_t>(kPair, high - block);
      const Streams s = streams(p, block, block + kPair < high ? block + kPair : next);
      const Expander weights(p, s, blocks == 1, buffer, end - slot <= kPassRows ? kRing - 1 : INT64_MAX);
      for (int64_t first = slot; first < end; first += kPassRows) {
        const int64_t rows = least<int64_t>(end - first, kPassRows), input_tiles = (rows + kTileRows - 1) / kTileRows;
        first == slot ? tile_pass<true>(input_tiles, weights, count, inputs.own(first), inputs.stride, sums)
                      : tile_pass<false>(input_tiles, weights, count, inputs.own(first), inputs.stride, sums);
        for (int64_t r = 0; r < rows; r++) {
          alignas(64) float values[kPair][kRows];
          for (int64_t b = 0; b < blocks; b++) {
            std::memcpy(values[b], sums[r / kTileRows][b] + r % kTileRows * kRows, sizeof values[b]);
            weights.finish(static_cast<int>(b), inputs.factors[first + r], values[b]);
          }
          results.take(first + r, block, blocks, values[0]);
        }
      }
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace lancebill
