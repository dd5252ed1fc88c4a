// Expansion of packed weights to bf16 tiles.
//
// A weight tile has 32 columns of a row block in the format of the AMX instruction: 16 lines, one for each pair of
// columns; each line has that pair for all 16 output rows.
#pragma once

#include "prefetch.h"
#include "tile_config.h"
#include "tile_fp16.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

constexpr int kTileBytes = 1024, kPair = 2;
constexpr int kTileHalves = kTileBytes / 2;
constexpr int kPassRows = 3 * kTileRows;  // input rows per pass: six of the eight tile registers are accumulators
constexpr int64_t kRing = 4;              // pairs of weight tiles kept when there is only one pass

// Expands two row blocks to tiles, one tile of each at a time.
class Expander {
 public:
  // Tile k is stored at index k & `mask`. `alone`: there is only one block, which is then used as both.
  Expander(const Packed& p, const Streams& s, bool alone, uint16_t* buffer, int64_t mask)
      : p_(p), s_(s), second_(alone ? 0 : 1), buffer_(buffer), mask_(mask),
        prefetch_(p, s, kTileColumns * kRows), minifloat_(p)
#ifdef __AVX512FP16__
        ,
        fp16_blocks_{Fp16Block(p, s.scales), Fp16Block(p, s.scales + second_ * p.scale_block)}
#endif
  {
  }

  uint16_t* tile(int64_t k, int block) const { return buffer_ + ((k & mask_) * kPair + block) * kTileHalves; }

  // Applies the correction factors to the sixteen sums of one block and one input row.
  LANCEBILL_INLINE void finish(int block, const float* sums, float factor, float* values) const {
    __m512 scaled = _mm512_mul_ps(_mm512_load_ps(sums), _mm512_set1_ps(factor));
#ifdef __AVX512FP16__
    if (expands_in_fp16(p_)) scaled = _mm512_mul_ps(scaled, _mm512_load_ps(fp16_blocks_[block].correction()));
#endif
    (void)block;
    _mm512_store_ps(values, scaled);
  }

  // Expands columns 32k .. 32k + 31 of one of the two blocks.
  LANCEBILL_INLINE void expand(int64_t k, int block) const {
    const lancebill_matrix& m = *p_.matrix;
    uint16_t* out = tile(k, block);
    block *= second_;
    constexpr int kBytes = kTileColumns * kRows;  // of codes per strip
    const int64_t strip = block / p_.strip * p_.strip_bytes;
    const uint8_t* codes = s_.codes + strip + k * kBytes;
    const PrefetchPoint point = prefetch_.at(k * kBytes);
    for (int i = block % p_.strip * kUnit; i < kBytes; i += p_.strip * kUnit) point.prefetch_both(strip + i);
    const int columns = min_of(m.group, kTileColumns);
#ifdef __AVX512FP16__
    if (expands_in_fp16(p_)) return expand_fp16(k, block, codes, out);
#endif
    for (int first = 0; first < kTileColumns; first += columns) {
      const Group group = group_of(k * kTileColumns + first, block);
      if (m.codes == LANCEBILL_TABLE4) {
        const __m512 values = _mm512_loadu_ps(p_.values);
        for (int i = first; i < first + columns; i += kUnitColumns) {
          table_unit(codes + i * kRows, block, values, group, out + i * kRows);
        }
      } else if (m.codes == LANCEBILL_BYTE) {
        for (int i = first; i < first + columns; i += kUnitColumns) {
          byte_unit(codes + i * kRows, group, out + i * kRows);
        }
      } else {
        const Avx512::Minifloat minifloat = minifloat_;
        for (int i = first; i < first + columns; i += 2) {
          store(minifloat.decode(codes + i * kRows), minifloat.decode(codes + (i + 1) * kRows), group, out + i * kRows);
        }
      }
    }
  }

 private:
  // A weight is scale * number - offset. Passed by value, like tables and `minifloat`: the compiler would reload
  // vectors in memory after every store, since the store might alias them.
  struct Group {
    __m512 scale, offset;
  };

#ifdef __AVX512FP16__
  LANCEBILL_INLINE void expand_fp16(int64_t k, int block, const uint8_t* codes, uint16_t* out) const {
    const bool zeros = p_.matrix->zero == LANCEBILL_ZERO_U8;
    if (block == 0) return zeros ? expand_fp16<true, 0>(k, codes, out) : expand_fp16<false, 0>(k, codes, out);
    return zeros ? expand_fp16<true, 1>(k, codes, out) : expand_fp16<false, 1>(k, codes, out);
  }

  template <bool Zeros, int Block>
  LANCEBILL_INLINE void expand_fp16(int64_t k, const uint8_t* codes, uint16_t* out) const {
    const Fp16Block halves = fp16_blocks_[Block];
    const auto columns = [&](int first, int count) __attribute__((always_inline)) {
      const int64_t g = (k * kTileColumns + first) / p_.matrix->group;
      const uint8_t* zeros = Zeros ? s_.zeros + Block * p_.zero_block + g * p_.zero_row : nullptr;
      const Fp16Block::Group group = halves.group(s_.scales + Block * p_.scale_block + g * p_.scale_row, zeros);
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
    const __m512 unit = m.codes == LANCEBILL_FLOAT8 ? minifloat_.unit : _mm512_set1_ps(p_.unit);
    const __m512 scale = _mm512_mul_ps(stored, unit);
    __m512 offset = _mm512_setzero_ps();
    if (m.codes == LANCEBILL_BYTE) offset = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(m.center)));
    if (m.zero == LANCEBILL_ZERO_U8) offset = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(Avx512::zeros(zeros, 0)));
    if (m.zero == LANCEBILL_ZERO_OFFSET_F32) offset = _mm512_add_ps(offset, Avx512::floats(zeros, 0));
    return {scale, offset};
  }

  // A row's four codes are nibbles of its 32-bit word. Codes 16 bits apart become a pair, so `write_tile_row` permutes
  // the inputs of TABLE4 tiles to match. vpermps ignores all but four index bits, so no mask is needed.
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
  PrefetchCursor prefetch_;
  Avx512::Minifloat minifloat_;
#ifdef __AVX512FP16__
  Fp16Block fp16_blocks_[kPair];
#endif
};

}  // namespace
}  // namespace lancebill
