// Expansion of packed weights to bf16 tiles.
//
// A weight tile has 32 columns of a row block in the format of the AMX instruction: 16 lines, one for each pair of
// columns; each line has that pair for all 16 output rows.
#pragma once

#include "group_codes.h"
#include "prefetch.h"
#include "tile_config.h"
#include "tile_fp16.h"
#include "tile_scales.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

constexpr int kTileBytes = 1024, kPair = 2;
constexpr int kTileHalves = kTileBytes / 2;

// How codes become numbers. 4-bit codes are nibbles of bytes that two blocks share; there are always two of them.
enum class TileCodes { kFp16, kFp16WithZeros, kFp16Byte, kFp16SixBits, kTable, kByte, kSixBits, kFloat8 };

template <TileCodes Codes>
struct CodesOf {
  static constexpr TileCodes value = Codes;
};

// use(codes) with the kind of this matrix.
template <class Use>
LANCEBILL_INLINE void with_codes(const Packed& p, const Use& use) {
  const lancebill_matrix& m = *p.matrix;
#ifdef __AVX512FP16__
  if (expands_in_fp16(p)) {
    if (m.codes == LANCEBILL_BYTE) return use(CodesOf<TileCodes::kFp16Byte>());
    if (m.codes == LANCEBILL_BITS6) return use(CodesOf<TileCodes::kFp16SixBits>());
    return m.zero == LANCEBILL_ZERO_U8 ? use(CodesOf<TileCodes::kFp16WithZeros>()) : use(CodesOf<TileCodes::kFp16>());
  }
#endif
  if (m.codes == LANCEBILL_BYTE) return use(CodesOf<TileCodes::kByte>());
  if (m.codes == LANCEBILL_BITS6) return use(CodesOf<TileCodes::kSixBits>());
  if (m.codes == LANCEBILL_FLOAT8) return use(CodesOf<TileCodes::kFloat8>());
  use(CodesOf<TileCodes::kTable>());
}

// What expanding takes from the matrix; the same for all its row blocks.
struct Codebook {
  const Packed& p;
  Avx512::Minifloat minifloat;
#ifdef __AVX512FP16__
  Fp16Table fp16;
  explicit Codebook(const Packed& p) : p(p), minifloat(p), fp16(p) {}
#else
  explicit Codebook(const Packed& p) : p(p), minifloat(p) {}
#endif
};

// Expands two row blocks to tiles, from the first column to the last.
template <TileCodes Codes>
class Expander {
 public:
  // Tile k is stored at index k & `mask`. `alone`: there is only one block, which is then used as both.
  Expander(const Codebook& book, const Streams& s, bool alone, uint16_t* buffer, int64_t mask)
      : p_(&book.p), s_(s), second_(alone ? 0 : 1), buffer_(buffer), mask_(mask),
        prefetch_(book.p, s, kBytes), point_(prefetch_.at(0)), minifloat_(book.minifloat)
#ifdef __AVX512FP16__
        ,
        fp16_blocks_{Fp16Block(book.p, book.fp16, s.scales),
                     Fp16Block(book.p, book.fp16, s.scales + second_ * book.p.scale.block)}
#endif
  {
  }

  uint16_t* tile(int64_t k, int block) const { return buffer_ + ((k & mask_) * kPair + block) * kTileHalves; }

  // The factors of the sums of a block's rows.
  __m512 correction(int block) const {
#ifdef __AVX512FP16__
    if constexpr (kInFp16) return fp16_blocks_[block].correction();
#endif
    return (void)block, _mm512_set1_ps(1);
  }

  // Expands the next tile of a block: of the first, then of the second.
  template <int Block>
  LANCEBILL_INLINE void expand() {
    uint16_t* out = tile(next_, Block);
    const int64_t strip = kShared ? 0 : Block * second_ * p_->strip_bytes;
    LANCEBILL_EACH(i, kBytes / kUnit) {  // blocks that share codes prefetch every other line
      if (!kShared || i % kPair == Block) point_.prefetch_both(strip + i * kUnit);
    }
    const uint8_t* codes = s_.codes + strip + next_ * kBytes;
    const int64_t column = next_ * kTileColumns;
    if (p_->matrix->group >= kTileColumns) {
      columns<Block, 0, kTileColumns>(column, codes, out);
    } else {
      columns<Block, 0, kTileColumns / 2>(column, codes, out);
      columns<Block, kTileColumns / 2, kTileColumns / 2>(column, codes, out);
    }
    if constexpr (Block == 1) {
      next_++;
      point_ = prefetch_.next(point_);
    }
  }

  // The same, where a call costs little.
  template <int Block>
  __attribute__((noinline)) void expand_apart() {
    expand<Block>();
  }

 private:
  static constexpr bool kNibblesInFp16 = Codes == TileCodes::kFp16 || Codes == TileCodes::kFp16WithZeros;
  static constexpr bool kSixBitCodes = Codes == TileCodes::kFp16SixBits || Codes == TileCodes::kSixBits;
  static constexpr bool kInFp16 = kNibblesInFp16 || Codes == TileCodes::kFp16Byte || Codes == TileCodes::kFp16SixBits;
  static constexpr bool kShared = kNibblesInFp16 || Codes == TileCodes::kTable;
  static constexpr bool kBytesInFp32 = Codes == TileCodes::kByte || Codes == TileCodes::kSixBits;
  static constexpr int kUnits = kTileColumns / kUnitColumns;
  static constexpr int kLines = kSixBitCodes ? kUnits / kSixBitUnits * kSixBitLines : kUnits;
  static constexpr int kBytes = kLines * kUnit;  // of codes per strip

  // The unit of the four columns from `column` of a tile on.
  LANCEBILL_INLINE static __m512i unit_of(const uint8_t* codes, int column) {
    const int unit = column / kUnitColumns;
    if constexpr (!kSixBitCodes) return _mm512_loadu_si512(codes + unit * kUnit);
    return SixBits<Avx512>::load(codes + unit / kSixBitUnits * kSixBitLines * kUnit, unit % kSixBitUnits);
  }

  // A weight is scale * number - offset. Passed by value, like tables and `minifloat`: the compiler would reload
  // vectors in memory after every store, since the store might alias them.
  struct Group {
    __m512 scale, offset;
  };

  // `Count` columns of one group, from `column + First` on.
  template <int Block, int First, int Count>
  LANCEBILL_INLINE void columns(int64_t column, const uint8_t* codes, uint16_t* out) const {
    const int64_t block = kShared ? Block : Block * second_;
    const int64_t g = (column + First) >> __builtin_ctz(static_cast<uint32_t>(p_->matrix->group));
    const GroupNumbers scales = group_numbers(p_->scale, s_.scales, block, g);
    const GroupNumbers zeros = group_numbers(p_->zero, s_.zeros, block, g);
    if constexpr (kInFp16) {
#ifdef __AVX512FP16__
      constexpr bool kZeros = Codes == TileCodes::kFp16WithZeros;
      const Fp16Block halves = fp16_blocks_[Block];
      const bool with_zeros = kNibblesInFp16 ? kZeros : p_->matrix->zero == LANCEBILL_ZERO_U8;
      const Fp16Block::Group group = halves.group(scales, with_zeros ? zeros.numbers : nullptr);
      LANCEBILL_UNROLL
      for (int i = First; i < First + Count; i += kUnitColumns) {
        const __m512i word = unit_of(codes, i);
        uint16_t* lines = out + i * kRows;
        if constexpr (kNibblesInFp16) {
          halves.line<kZeros, 4 * Block>(word, group, lines);
          halves.line<kZeros, 4 * Block + 8>(word, group, lines + 32);
        } else {
          halves.byte_line<0>(word, group, lines);
          halves.byte_line<8>(word, group, lines + 32);
        }
      }
#endif
    } else {
      const Group group = group_of(scales, zeros);
      const __m512 values = _mm512_loadu_ps(p_->values);
      const Avx512::Minifloat minifloat = minifloat_;
      for (int i = First; i < First + Count; i += kUnitColumns) {
        uint16_t* lines = out + i * kRows;
        if constexpr (Codes == TileCodes::kTable) {
          table_unit(unit_of(codes, i), Block, values, group, lines);
        } else if constexpr (kBytesInFp32) {
          byte_unit(unit_of(codes, i), group, lines);
        } else {
          const uint8_t* unit = codes + i * kRows;
          store(minifloat.decode(unit), minifloat.decode(unit + kRows), group, lines);
          store(minifloat.decode(unit + 2 * kRows), minifloat.decode(unit + 3 * kRows), group, lines + 32);
        }
      }
    }
  }

  LANCEBILL_INLINE Group group_of(GroupNumbers scales, GroupNumbers zeros) const {
    const lancebill_matrix& m = *p_->matrix;
    const __m512 stored = scales_of(m.scale, scales);
    const __m512 unit = Codes == TileCodes::kFloat8 ? minifloat_.unit : _mm512_set1_ps(p_->unit);
    const __m512 scale = _mm512_mul_ps(stored, unit);
    __m512 offset = _mm512_setzero_ps();
    if (kBytesInFp32) offset = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(m.center)));
    if (m.zero == LANCEBILL_ZERO_U8) offset = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(Avx512::zeros(zeros.numbers, 0)));
    if (p_->has_offsets()) offset = _mm512_add_ps(offset, offsets_of(m.zero, zeros));
    return {scale, offset};
  }

  // A row's four codes are nibbles or bytes of its 32-bit word. Codes 16 bits apart become a pair, so `write_tile_row`
  // permutes the inputs to match. vpermps ignores all but four index bits, so no mask is needed.
  LANCEBILL_INLINE static void table_unit(__m512i unit, int block, __m512 values, Group group, uint16_t* out) {
    const __m512i word = _mm512_srli_epi32(unit, 4 * block);
    store(look_up<0>(word, values), look_up<16>(word, values), group, out);
    store(look_up<8>(word, values), look_up<24>(word, values), group, out + 32);
  }

  template <int Bit>
  LANCEBILL_INLINE static __m512 look_up(__m512i word, __m512 values) {
    return _mm512_permutexvar_ps(Bit == 0 ? word : _mm512_srli_epi32(word, Bit), values);
  }

  LANCEBILL_INLINE static void byte_unit(__m512i word, Group group, uint16_t* out) {
    const __m512i byte = _mm512_set1_epi32(255);
    const auto number = [&](__m512i shifted) { return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, byte)); };
    store(number(word), number(_mm512_srli_epi32(word, 16)), group, out);
    store(number(_mm512_srli_epi32(word, 8)), number(_mm512_srli_epi32(word, 24)), group, out + 32);
  }

  // Two columns of sixteen rows, rounded to bf16 and paired.
  LANCEBILL_INLINE static void store(__m512 even, __m512 odd, Group group, uint16_t* out) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(_mm512_fmsub_ps(even, group.scale, group.offset)), half);
    const __m512i b = _mm512_add_epi32(_mm512_castps_si512(_mm512_fmsub_ps(odd, group.scale, group.offset)), half);
    constexpr uint32_t kOddHalves = 0xaaaaaaaa;
    _mm512_storeu_si512(out, _mm512_mask_blend_epi16(kOddHalves, _mm512_srli_epi32(a, 16), b));
  }

  const Packed* p_;
  Streams s_;
  int64_t second_;
  uint16_t* buffer_;
  int64_t mask_, next_ = 0;
  PrefetchCursor prefetch_;
  PrefetchPoint point_;
  Avx512::Minifloat minifloat_;
#ifdef __AVX512FP16__
  Fp16Block fp16_blocks_[kPair];
#endif
};

}  // namespace
}  // namespace lancebill
