// Many input rows: weights are expanded to bf16 tiles, scales applied, and AMX multiplies.
//
// A tile of weights has 32 columns of a row block, as the instruction wants it: a line for each pair of columns, in it
// the pairs of the 16 output rows. Expanded weights never leave the caches: few input rows pass by a ring of tiles in L1,
// expanded one step ahead of the products so that both kinds of units stay busy; for more rows the two row blocks are
// kept whole, in L2, for the passes that follow.
#pragma once

#include "kernel.h"
#include "vector_avx512.h"

namespace colibri {
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

// Turns row blocks into tiles.
class Expander {
 public:
  // Tiles are kept at their number & `mask`. Of an odd number of blocks the last is `alone`: it is then both of a pair.
  Expander(const Packed& p, const Streams& s, bool alone, uint16_t* buffer, int64_t mask)
      : p_(p), s_(s), second_(alone ? 0 : 1), buffer_(buffer), mask_(mask), minifloat_(p) {}

  uint16_t* tile(int64_t k, int block) const { return buffer_ + ((k & mask_) * kPair + block) * kTileHalves; }

  // Columns 32k .. 32k + 31 of one of the two blocks.
  COLIBRI_INLINE void expand(int64_t k, int block) const {
    const colibri_matrix& m = *p_.matrix;
    uint16_t* out = tile(k, block);
    block *= second_;
    const int64_t bytes = p_.code_block * kTileColumns / p_.columns, at = k * bytes;
    const uint8_t* codes = s_.codes + block * p_.code_block + at;
    const uint8_t* soon = ahead(s_.codes, s_.next_codes, at + kAhead, p_.code_block) + block * p_.code_block;
    for (int64_t i = 0; i < bytes; i += kUnit) __builtin_prefetch(soon + i);
    const int columns = least(m.group, kTileColumns);
    for (int first = 0; first < kTileColumns; first += columns) {
      const Group group = group_of(k * kTileColumns + first, block);
      if (m.codes == COLIBRI_TABLE4) {
        const __m512 values = _mm512_loadu_ps(p_.values);
        for (int i = first; i < first + columns; i += 8) table_unit(codes + i * kRows / 2, values, group, out + i * kRows);
      } else if (m.codes == COLIBRI_BYTE) {
        for (int i = first; i < first + columns; i += 4) byte_unit(codes + i * kRows, group, out + i * kRows);
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

  COLIBRI_INLINE Group group_of(int64_t column, int block) const {
    const colibri_matrix& m = *p_.matrix;
    const int64_t g = column / m.group;
    const uint8_t* zeros = m.zero == COLIBRI_ZERO_NONE ? nullptr : s_.zeros + block * p_.zero_block + g * p_.zero_row;
    const __m512 stored = Avx512::scales(m.scale, s_.scales + block * p_.scale_block + g * p_.scale_row, 0);
    const __m512 scale = _mm512_mul_ps(stored, m.codes == COLIBRI_FLOAT8 ? minifloat_.unit : _mm512_set1_ps(p_.unit));
    __m512 offset = _mm512_setzero_ps();
    if (m.codes == COLIBRI_BYTE) offset = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(m.center)));
    if (m.zero == COLIBRI_ZERO_U8) offset = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(Avx512::zeros(zeros, 0)));
    if (m.zero == COLIBRI_ZERO_OFFSET_F32) offset = _mm512_add_ps(offset, Avx512::floats(zeros, 0));
    return {scale, offset};
  }

  // A row's eight codes are the nibbles of its word. Those 16 bits apart become pairs, which is why the inputs of TABLE4
  // tiles come in the order of `write_tile_row`; vpermps looks at four bits of a word, so nothing is masked.
  COLIBRI_INLINE static void table_unit(const uint8_t* unit, __m512 values, Group group, uint16_t* out) {
    const __m512i word = _mm512_loadu_si512(unit);
    store(look_up<0>(word, values), look_up<16>(word, values), group, out);
    store(look_up<4>(word, values), look_up<20>(word, values), group, out + 32);
    store(look_up<8>(word, values), look_up<24>(word, values), group, out + 64);
    store(look_up<12>(word, values), look_up<28>(word, values), group, out + 96);
  }

  template <int Bit>
  COLIBRI_INLINE static __m512 look_up(__m512i word, __m512 values) {
    return _mm512_permutexvar_ps(Bit == 0 ? word : _mm512_srli_epi32(word, Bit), values);
  }

  COLIBRI_INLINE static void byte_unit(const uint8_t* unit, Group group, uint16_t* out) {
    const __m512i word = _mm512_loadu_si512(unit), byte = _mm512_set1_epi32(255);
    const auto number = [&](__m512i shifted) { return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, byte)); };
    store(number(word), number(_mm512_srli_epi32(word, 8)), group, out);
    store(number(_mm512_srli_epi32(word, 16)), number(_mm512_srli_epi32(word, 24)), group, out + 32);
  }

  // Two columns of sixteen rows, rounded to bf16 and paired.
  COLIBRI_INLINE static void store(__m512 even, __m512 odd, Group group, uint16_t* out) {
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
  Avx512::Minifloat minifloat_;
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
  static void write_tile_row(const Packed& p, const float* values, uint8_t* record) {
    const __m512i natural = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i paired = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512i order = p.matrix->codes == COLIBRI_TABLE4 ? paired : natural;
    for (int64_t k = 0; k < p.columns; k += 16) {
      const __m512i words = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(values + k));
      const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(record + 2 * k), halves);
    }
  }

  // See `blocks_product` in layer.h.
  template <class Emit>
  static void tile_product(const Call& call, const Packed& p, int64_t low, int64_t high, int64_t next, int64_t slot,
                           int64_t end, int thread, const Emit& emit) {
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
        first == slot ? tile_pass<true>(input_tiles, weights, count, inputs.row(first), inputs.stride, sums)
                      : tile_pass<false>(input_tiles, weights, count, inputs.row(first), inputs.stride, sums);
        for (int64_t r = 0; r < rows; r++) {
          for (int64_t b = 0; b < blocks; b++) {
            float* values = sums[r / kTileRows][b] + r % kTileRows * kRows;
            for (int i = 0; i < kRows; i++) values[i] *= inputs.factors[first + r];
            emit(first + r, block + b, values);
          }
        }
      }
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace colibri
