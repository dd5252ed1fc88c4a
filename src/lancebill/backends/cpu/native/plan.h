// The plan of one call: sizes and strides of the packed matrices, slots sorted by expert, and the layout of the scratch
// memory. Compiled once, without special instructions; the levels only read it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lancebill.h"

namespace lancebill {

constexpr int kRows = 16;         // rows of a row block
constexpr int kUnit = 64;         // bytes of codes that are decoded together: one cache line
constexpr int kUnitColumns = 4;   // columns of a unit, for the rows of one block, or of two as nibbles
constexpr int kSixBitUnits = 4;   // units of 6-bit codes that are stored together,
constexpr int kSixBitLines = 3;   // in so many cache lines
constexpr int kTileRows = 16;     // lines of a tile
constexpr int kTileColumns = 32;  // bf16 columns of a tile
constexpr int kPanelColumns = 256;    // columns whose codes are expanded at once for many rows
constexpr int kTileRowsByDefault = 6;  // input rows from which tiles are faster

// Each cache line of codes is prefetched twice: to L2 about kFarBytes before it is read, to L1 about kNearBytes before.
// One prefetch straight to L1 occupies one of the few L1 fill buffers for the full memory latency, which limits the
// lines in flight. Levels whose compute is slower than memory prefetch once, to L1, kFarBytes ahead: one instruction
// less.
constexpr int64_t kFarBytes = 3072, kNearBytes = 1536;

// Always inlined: GCC takes a function that only prefetches for one without effect, and removes calls of it.
inline __attribute__((always_inline)) void prefetch_line(const uint8_t* far, const uint8_t* near) {
  __builtin_prefetch(far, 0, 2);
  __builtin_prefetch(near, 0, 3);
}

// e4m3 differs from fp16 in mantissa width and exponent bias. Shifting its bits into place gives an fp16 number that is
// too small by this power of two, which is folded into `Packed::unit`.
constexpr float kE4m3Unit = 256;

// How the numbers of groups are stored: of each row block, records of a few groups, which the factors of the rows precede
// if there are any.
struct GroupArray {
  int32_t row = 0;           // bytes of one group
  int32_t factors = 0;       // bytes of the factors of a record
  int32_t record_shift = 0;  // log2 of the groups of a record
  int64_t block = 0;         // bytes of a row block
  int64_t record_bytes() const { return (int64_t{row} << record_shift) + factors; }
  int64_t record_of(int64_t group) const { return (group >> record_shift) * record_bytes(); }
  int64_t at(int64_t group) const {
    return record_of(group) + factors + (group & ((1 << record_shift) - 1)) * row;
  }
};

// A packed matrix with its derived sizes.
struct Packed {
  const lancebill_matrix* matrix = nullptr;
  int64_t columns = 0, rows = 0;  // padded
  int32_t blocks = 0, groups = 0;
  int32_t strip = 1;                        // row blocks that share code bytes: two where codes are nibbles
  int64_t strip_bytes = 0;                  // bytes of codes per strip
  int32_t record_groups = 0;                // groups that share factors; all of them if there are none
  GroupArray scale, zero;
  int32_t top = 0;             // largest table entry
  bool in_floats = false;      // weights and inputs are multiplied in fp32: minifloats, and tables of long entries
  bool plain_entries = false;  // the table is 0 .. 15: 4-bit integers
  float unit = 1;              // value of one table unit: step, times kE4m3Unit with E4M3 scales
  float values[16] = {};       // TABLE4: value of each code, in units
  float minifloats[256] = {};  // FLOAT8: likewise
  bool fits_words = false;     // sums of a group fit 32 bits if codes and inputs have 16
  float minifloat_unit = 1;    // the counterpart of kE4m3Unit for this minifloat
  bool has_offsets() const { return matrix->zero >= LANCEBILL_ZERO_OFFSET_F32; }
  const uint8_t* codes(int64_t block) const { return matrix->code_bytes + block / strip * strip_bytes; }
  const uint8_t* scales(int64_t block) const { return at(matrix->scale_bytes, block * scale.block); }
  const uint8_t* zeros(int64_t block) const { return at(matrix->zero_bytes, block * zero.block); }

 private:
  static const uint8_t* at(const void* base, int64_t offset) {
    return base == nullptr ? nullptr : static_cast<const uint8_t*>(base) + offset;
  }
};

// The rows of an expert as tiles: divided evenly, because a product takes as long as its tile has lines. Only the last
// tile has fewer.
struct RowTiles {
  int64_t rows, count, lines;
  explicit RowTiles(int64_t rows)
      : rows(rows), count((rows + kTileRows - 1) / kTileRows), lines((rows + count - 1) / count) {}
  int64_t rows_of(int64_t tile) const { return tile + 1 < count ? lines : rows - tile * lines; }
};

// One row in tiles: kUnit bytes, then those of the next kTileColumns columns `step` bytes later.
struct TileRow {
  uint8_t* start;
  int64_t step;
};

// The input rows of a GEMM: each sorted slot has a record of `stride` bytes. The tiles of an expert take the place of
// its records: its columns one after the other, each with the lines of all its rows. The other kernels read records, so
// slots with equal inputs (and kernels that read the same form of them) share one, that of slot `shared[slot]`.
struct Inputs {
  uint8_t* records = nullptr;
  int64_t* shared = nullptr;
  float* factors = nullptr;  // scale of each row written for tiles; 1 where the tile holds unquantised numbers
  int64_t stride = 0;
  uint8_t* own_record(int64_t slot) const { return records + slot * stride; }
  const uint8_t* record(int64_t slot) const { return own_record(shared[slot]); }

  // A tile of the expert whose first slot is `slot`.
  TileRow tile(int64_t slot, const RowTiles& tiles, int64_t tile, int64_t columns) const {
    return {own_record(slot) + tile * tiles.lines * columns * 2, tiles.rows_of(tile) * kUnit};
  }
  TileRow tile_row(int64_t slot, const RowTiles& tiles, int64_t row, int64_t columns) const {
    const TileRow first = tile(slot, tiles, row / tiles.lines, columns);
    return {first.start + row % tiles.lines * kUnit, first.step};
  }
};

struct Call {
  const lancebill_layer* layer = nullptr;
  const lancebill_work* work = nullptr;
  Packed first, last;     // a linear has `last` only
  bool two_gemms = false, gated = false;
  int32_t intermediate = 0;
  int32_t tile_rows = 0;  // experts with at least this many rows use tiles; 0: none

  // Slots sorted by expert: expert e has slots offsets[e] .. offsets[e + 1].
  int64_t slots = 0;        // upper bound: ids out of range have no slot
  int64_t summed_rows = 0;  // rows of out that sum over slots: one per token; 0 with grouped rows
  int64_t* offsets = nullptr;
  int32_t* active = nullptr;  // experts with slots, ascending
  int32_t actives = 0;
  int64_t* row_of = nullptr;     // row of x and of out, by slot
  int64_t* slot_of = nullptr;    // slot of each id; -1: none
  float* weight_of = nullptr;    // routing weight, by slot

  Inputs first_inputs, last_inputs;
  float* hidden = nullptr;  // [slots][padded intermediate], after the activation
  float* sums = nullptr;    // [summed_rows][padded rows of last]; of a dense fp32 result without padding it is `out`
  uint8_t* per_thread = nullptr;
  int64_t per_thread_bytes = 0;
  int64_t row_floats = 0;   // length of each of the three fp32 row buffers at the start of a thread's memory

  bool by_tokens() const { return work->ids != nullptr; }  // indexed dispatch, summed per token; else grouped
  float* sums_of(int64_t row) const { return sums + row * last.rows; }
  bool sums_are_out() const { return sums == work->out; }
  int64_t hidden_stride() const { return gated ? first.rows / 2 : first.rows; }
  const Inputs& inputs_of(const Packed& packed) const { return &packed == &first ? first_inputs : last_inputs; }
};

// Validates and fills everything but the scratch. `tiles`: the level has tiles. Returns a status.
int32_t plan(const lancebill_layer* layer, const lancebill_work* work, bool tiles, Call& call);

// Input rows of an expert from which the kernel for many rows (many_rows.h) is faster, by codes: `plain` are 4-bit
// integers.
struct ManyRows {
  int bytes, six_bits, plain, others;
  int of(const Packed& p) const {
    if (p.matrix->codes == LANCEBILL_BYTE) return bytes;
    if (p.matrix->codes == LANCEBILL_BITS6) return six_bits;
    return p.plain_entries ? plain : others;
  }
};

// Assigns scratch memory from `memory`; with nullptr only measures. Returns the bytes needed.
int64_t lay_out(Call& call, uint8_t* memory);

// The local expert of a token's choice; -1: none.
int32_t local_expert(const Call& call, int64_t token, int64_t choice);

// Sorts slots by expert: fills offsets, active experts, rows and weights. Returns a status.
int32_t sort_slots(Call& call);

Packed describe(const lancebill_matrix& matrix, bool gated);

// Whether bf16 tiles hold the input of `packed` exactly, up to one factor per row.
bool fits_tiles(const Packed& packed);

struct Level {
  const char* name;
  bool tiles;
  void (*run)(const Call&);
};

// Null for levels that were not built: the compiler lacks their flags, or they are for another machine.
__attribute__((weak)) const Level* level_portable();
__attribute__((weak)) const Level* level_neon();
__attribute__((weak)) const Level* level_avx2();
__attribute__((weak)) const Level* level_avxvnni();
__attribute__((weak)) const Level* level_avx512bw();
__attribute__((weak)) const Level* level_avx512vnni();
__attribute__((weak)) const Level* level_avx512();
__attribute__((weak)) const Level* level_amx();

}  // namespace lancebill
