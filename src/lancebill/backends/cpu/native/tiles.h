// The AMX GEMM for many input rows: expands weights to bf16 tiles with scales applied, then multiplies tiles.
//
// Expanded weights never leave the caches, and are expanded while other tiles are multiplied: the vector and the tile
// unit both stay busy. With up to two tiles of input rows there is one pass over a small ring of tiles in L1, expanded
// one step ahead. With more, a pair of row blocks is expanded in L2 while the pair before it is multiplied with all rows.
#pragma once

#include "inputs.h"
#include "prefetch.h"
#include "tile_config.h"
#include "tile_expand.h"
#include "vector_avx512.h"

namespace lancebill {
namespace {

constexpr int kPassTiles = 2;             // tiles of input rows in a pass, and of weights: four tiles of sums
constexpr int64_t kRing = 4;              // pairs of weight tiles kept when there is only one pass
constexpr int64_t kChunkBytes = 1 << 20;  // of input rows that stay in L2 while all weights pass
constexpr int64_t kFewestTiles = 4;       // of a chunk

typedef float TileSums[kPassTiles][kPair][kTileRows][kRows];

// sums[input tile][block] = one or two tiles of input rows times two row blocks. `between(k, block)` is called after the
// products of each weight tile, for work of the vector unit.
template <int InputTiles, class Weights, class Between>
LANCEBILL_INLINE void tile_pass(const Weights& weights, int64_t steps, const TileRow (&inputs)[kPassTiles],
                                TileSums& sums, const Between& between) {
  const uint8_t *first = inputs[0].start, *second = inputs[1].start;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (InputTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; k++) {
    load_new_tile<6>(weights.tile(k, 0));
    _tile_loadd(4, first, kUnit);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (InputTiles > 1) {
      _tile_loadd(5, second, kUnit);
      _tile_dpbf16ps(2, 5, 6);
    }
    between(k, Constant<0>());
    load_new_tile<7>(weights.tile(k, 1));
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (InputTiles > 1) _tile_dpbf16ps(3, 5, 7);
    between(k, Constant<1>());
    first += inputs[0].step;
    second += inputs[1].step;
  }
  _tile_stored(0, sums[0][0], kUnit);
  _tile_stored(1, sums[0][1], kUnit);
  if constexpr (InputTiles > 1) {
    _tile_stored(2, sums[1][0], kUnit);
    _tile_stored(3, sums[1][1], kUnit);
  }
}

template <class Weights, class Between>
LANCEBILL_INLINE void tile_pass(int64_t tiles, const Weights& weights, int64_t steps,
                                const TileRow (&inputs)[kPassTiles], TileSums& sums, const Between& between) {
  tiles == 1 ? tile_pass<1>(weights, steps, inputs, sums, between)
             : tile_pass<2>(weights, steps, inputs, sums, between);
}

// The results of a tile of rows: its sums times the factors of rows and columns.
template <int Blocks, class Results>
__attribute__((noinline)) void write_tile(const Results& results, int64_t slot, int64_t slots, int64_t block,
                                          const float (&sums)[kPair][kTileRows][kRows], const float* factors,
                                          const __m512 (&corrections)[kPair]) {
  __m512 own[Blocks];
  LANCEBILL_EACH(b, Blocks) own[b] = corrections[b];
  const auto load = [&](int64_t row, float (&values)[Blocks][kRows]) __attribute__((always_inline)) {
    const __m512 factor = _mm512_set1_ps(factors[row]);
    LANCEBILL_EACH(b, Blocks) {
      _mm512_store_ps(values[b], _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(sums[b][row]), factor), own[b]));
    }
  };
  results.template write<Blocks>(slot, slots, block, load);
}

// One GEMM of some row blocks of an expert with its slots [slot, end).
template <TileCodes Codes, class Results>
class TileGemm {
 public:
  TileGemm(const Call& call, const Packed& p, int64_t slot, int64_t end, int thread, const Results& results)
      : inputs_(call.inputs_of(p)), p_(p), book_(p), rows_(end - slot), slot_(slot), results_(results),
        steps_(p.columns / kTileColumns),
        buffer_(reinterpret_cast<uint16_t*>(row_buffers(call, thread).values + 3 * call.row_floats)) {}

  // Row blocks [low, high); `next` is read afterwards.
  void run(int64_t low, int64_t high, int64_t next) {
    rows_.count <= kPassTiles ? run_once(low, high, next) : run_chunks(low, high, next);
  }

 private:
  using Weights = Expander<Codes>;

  Weights expander(int64_t block, int64_t high, int64_t next, uint16_t* buffer, int64_t mask) const {
    const Streams s = streams(p_, block, block + kPair < high ? block + kPair : next);
    return Weights(book_, s, high - block == 1, buffer, mask);
  }

  // One pass for each pair of blocks, over a ring.
  void run_once(int64_t low, int64_t high, int64_t next) {
    for (int64_t block = low; block < high; block += kPair) {
      Weights weights = expander(block, high, next, buffer_, kRing - 1);
      weights.template expand_apart<0>();
      weights.template expand_apart<1>();
      pass(0, weights, block, high, [&](int64_t k, auto b) __attribute__((always_inline)) {
        if (k + 1 < steps_) weights.template expand<b>();
      });
    }
  }

  // As many rows at a time as fit the cache. The passes of a pair share the work of expanding the next pair.
  void run_chunks(int64_t low, int64_t high, int64_t next) {
    const int64_t tile_bytes = rows_.lines * p_.columns * 2;
    const int64_t chunk = max_of(kFewestTiles, kChunkBytes / tile_bytes / kPassTiles * kPassTiles);
    uint16_t* buffers[2] = {buffer_, buffer_ + steps_ * kPair * kTileHalves};
    Weights weights = expander(low, high, low, buffers[0], INT64_MAX);
    for (int64_t k = 0; k < steps_; k++) {
      weights.template expand_apart<0>();
      weights.template expand_apart<1>();
    }
    for (int64_t first = 0; first < rows_.count; first += chunk) {
      const int64_t end = min_of(first + chunk, rows_.count);
      for (int64_t block = low; block < high; block += kPair) {
        const bool last = block + kPair >= high;
        Weights following = expander(last ? low : block + kPair, high, last ? next : low, buffers[1], INT64_MAX);
        const bool needed = !last || end < rows_.count;
        const int64_t passes = (end - first + kPassTiles - 1) / kPassTiles;
        int64_t wait[kPair] = {needed ? passes : INT64_MAX, needed ? passes : INT64_MAX};
        for (int64_t tile = first; tile < end; tile += kPassTiles) {
          pass(tile, weights, block, high, [&](int64_t, auto b) __attribute__((always_inline)) {
            if (--wait[b] > 0) return;
            following.template expand_apart<b>();
            wait[b] = passes;
          });
        }
        weights = following;
        uint16_t* swapped = buffers[0];
        buffers[0] = buffers[1];
        buffers[1] = swapped;
      }
    }
  }

  // One or two tiles of rows, from `tile` on, times one or two blocks.
  template <class Between>
  LANCEBILL_INLINE void pass(int64_t tile, const Weights& weights, int64_t block, int64_t high,
                             const Between& between) {
    const int64_t tiles = min_of<int64_t>(kPassTiles, rows_.count - tile);
    const TileRow inputs[kPassTiles] = {inputs_.tile(slot_, rows_, tile, p_.columns),
                                        inputs_.tile(slot_, rows_, tile + tiles - 1, p_.columns)};
    tile_pass(tiles, weights, steps_, inputs, sums_, between);
    const __m512 corrections[kPair] = {weights.correction(0), weights.correction(1)};
    for (int64_t t = tile; t < tile + tiles; t++) {
      const int64_t slot = slot_ + t * rows_.lines, slots = rows_.rows_of(t);
      const float* factors = inputs_.factors + slot;
      high - block > 1 ? write_tile<kPair>(results_, slot, slots, block, sums_[t - tile], factors, corrections)
                       : write_tile<1>(results_, slot, slots, block, sums_[t - tile], factors, corrections);
    }
  }

  const Inputs& inputs_;
  const Packed& p_;
  const Codebook book_;
  const RowTiles rows_;
  const int64_t slot_;
  const Results& results_;
  const int64_t steps_;
  uint16_t* const buffer_;
  alignas(64) TileSums sums_;
};

// Indices of the upper halves of 32 words; `paired`: the second and third of every four are swapped.
struct alignas(64) UpperHalves {
  uint16_t indices[kTileColumns] = {};
  explicit constexpr UpperHalves(bool paired) {
    for (int i = 0; i < kTileColumns; i++) {
      const bool swapped = paired && (i % 4 == 1 || i % 4 == 2);
      indices[i] = static_cast<uint16_t>(2 * (swapped ? i ^ 3 : i) + 1);
    }
  }
};
constexpr UpperHalves kInOrder(false), kPaired(true);

struct Amx : Avx512 {
  static constexpr bool tiles = true;

  // Writes an input row, rounded to bf16, as the upper halves of the scaled fp32 values. Columns are permuted to
  // match the pairs of `table_unit` and `byte_unit`. Returns the factor for the sums of this row.
  static float write_tile_row(const Packed& p, const float* values, TileRow row) {
    const int64_t columns = p.matrix->columns;
    __m512i peaks = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t k = 0; k < columns; k += kRows) {
      peaks = _mm512_max_epi32(peaks, _mm512_and_si512(load_values(values, k, columns), magnitude));
    }
    const float peak = round_bf16(bits_as<float>(_mm512_reduce_max_epi32(peaks)));
    const float scale = tile_row_scale(peak, expands_in_fp16(p) ? kInputExponent : 1);
    const bool paired = p.matrix->codes != LANCEBILL_FLOAT8;
    const __m512i order = _mm512_load_si512(paired ? kPaired.indices : kInOrder.indices);
    uint8_t* line = row.start;
    for (int64_t k = 0; k < p.columns; k += kTileColumns, line += row.step) {
      const __m512i low = rounded(load_values(values, k, columns), scale);
      const __m512i high = rounded(load_values(values, k + kRows, columns), scale);
      _mm512_storeu_si512(line, _mm512_permutex2var_epi16(low, order, high));
    }
    return (expands_in_fp16(p) ? 0x1p112f : 1) / scale;
  }

  static void copy_tile_row(const Packed& p, TileRow from, TileRow to) {
    for (int64_t k = 0; k < p.columns; k += kTileColumns, from.start += from.step, to.start += to.step) {
      _mm512_storeu_si512(to.start, _mm512_loadu_si512(from.start));
    }
  }

  // Implements `multiply_blocks` in layer.h.
  template <class Results>
  static void tile_gemm(const Call& call, const Packed& p, int64_t low, int64_t high, int64_t next, int64_t slot,
                        int64_t end, int thread, const Results& results) {
    const TileConfig config(RowTiles(end - slot).lines);
    load_tile_config(config);
    with_codes(p, [&](auto codes) {
      TileGemm<decltype(codes)::value, Results>(call, p, slot, end, thread, results).run(low, high, next);
    });
    _tile_release();
  }

 private:
  // Sixteen values from `k` on; zero past the end of the row.
  static __m512i load_values(const float* values, int64_t k, int64_t columns) {
    const int64_t left = columns - k;
    if (left >= kRows) return _mm512_loadu_si512(values + k);
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(left > 0 ? (1 << left) - 1 : 0), values + k);
  }

  // As `round_bf16`, times a power of two.
  static __m512i rounded(__m512i bits, float scale) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512 number = _mm512_castsi512_ps(bits);
    const __mmask16 nan = _mm512_cmp_ps_mask(number, number, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
    const __m512 upper = _mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    return _mm512_castps_si512(_mm512_mul_ps(upper, _mm512_set1_ps(scale)));
  }
};

}  // namespace
}  // namespace lancebill
