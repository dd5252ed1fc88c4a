// One call, worked out: sizes and strides of the packed matrices, slots sorted by expert, and where everything lies in the
// scratch memory. Compiled once, without special instructions; the levels only read it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lancebill.h"

namespace lancebill {

constexpr int kRows = 16;         // of a row block
constexpr int kUnit = 64;         // bytes of codes that are decoded together
constexpr int kUnitColumns = 4;   // of a unit: of the rows of one block, or, as nibbles, of two
constexpr int kTileColumns = 32;  // bf16 columns of a tile

// A line of codes is asked for twice: into the second level about `kFar` bytes before it is read, into the first about
// `kNear` before. Asked for once, it takes one of the first level's few buffers for as long as memory takes, and the
// more there is to compute the fewer lines are on their way. Where computing takes longer than memory, once is enough:
// into the first level `kFar` before, with one instruction less.
constexpr int64_t kFar = 3072, kNear = 1536;

inline void fetch_line(const uint8_t* far, const uint8_t* near) {
  __builtin_prefetch(far, 0, 2);
  __builtin_prefetch(near, 0, 3);
}

// e4m3 and fp16 differ in their mantissa's width and in the bias of their exponent. Moving the bits turns one into the
// other but for this power of two, which is multiplied in elsewhere.
constexpr float kE4m3Unit = 256;

// A packed matrix with its derived sizes.
struct Packed {
  const lancebill_matrix* matrix = nullptr;
  int64_t columns = 0, rows = 0;  // padded
  int32_t blocks = 0, groups = 0;
  int32_t strip = 1;                        // row blocks whose codes lie together: two where they are nibbles
  int64_t strip_bytes = 0;                  // of codes
  int64_t scale_block = 0, zero_block = 0;  // bytes of one row block
  int32_t scale_row = 0, zero_row = 0;      // bytes of one group of a row block
  bool two_planes = false;     // table entries need two bytes (base 128)
  bool small_entries = false;  // table entries are at most 31: integers of 4 bits, e2m1
  bool plain_entries = false;  // the table is 0 .. 15: integers of 4 bits
  float unit = 1;              // what one unit of the codes counts: step, times kE4m3Unit with E4M3 scales
  float values[16] = {};       // TABLE4: what a code means, in units
  float minifloats[256] = {};  // FLOAT8: likewise
  float minifloat_unit = 1;    // what kE4m3Unit is to e4m3, for this minifloat
  const uint8_t* codes(int64_t block) const { return matrix->code_bytes + block / strip * strip_bytes; }
  const uint8_t* scales(int64_t block) const { return at(matrix->scale_bytes, block * scale_block); }
  const uint8_t* zeros(int64_t block) const { return at(matrix->zero_bytes, block * zero_block); }

 private:
  static const uint8_t* at(const void* base, int64_t offset) {
    return base == nullptr ? nullptr : static_cast<const uint8_t*>(base) + offset;
  }
};

// How the rows of a product's input are held: each sorted slot has a record of `stride` bytes. Tiles read those of an
// expert side by side; the other kernels read any, and slots that are alike share one: that of slot `shared[slot]`.
struct Inputs {
  uint8_t* records = nullptr;
  int64_t* shared = nullptr;
  float* factors = nullptr;  // of the rows held for tiles: their scale, where the tile holds quantised numbers
  int64_t stride = 0;
  uint8_t* own(int64_t slot) const { return records + slot * stride; }
  const uint8_t* record(int64_t slot) const { return own(shared[slot]); }
};

struct Call {
  const lancebill_layer* layer = nullptr;
  const lancebill_work* work = nullptr;
  Packed first, last;     // of a linear: only last
  bool two_products = false, gated = false;
  int32_t intermediate = 0;
  int32_t tile_rows = 0;  // an expert with so many rows takes tiles; 0: none does

  // Sorted slots: those of expert e are offsets[e] .. offsets[e + 1].
  int64_t slots = 0;  // at most
  int64_t summed_rows = 0;  // of out: those of tokens, with the sum of their slots each
  int64_t* offsets = nullptr;
  int32_t* active = nullptr;  // experts that have slots, ascending
  int32_t actives = 0;
  int64_t* row_of = nullptr;     // of x and of out
  int64_t* slot_of = nullptr;    // of each id, in the order of the ids; -1: of none
  float* weight_of = nullptr;    // routing weight

  Inputs first_inputs, last_inputs;
  float* hidden = nullptr;  // [slots][padded intermediate], after the activation
  float* sums = nullptr;    // [summed_rows][padded rows of last]
  uint8_t* per_thread = nullptr;
  int64_t per_thread_bytes = 0;
  int64_t row_floats = 0;   // of the fp32 row buffers at the start of each thread's memory, three of them

  bool by_tokens() const { return work->ids != nullptr; }  // slots are of ids, and summed; else rows come by expert
  float* sums_of(int64_t row) const { return sums + row * last.rows; }
  int64_t hidden_stride() const { return gated ? first.rows / 2 : first.rows; }
  const Inputs& inputs_of(const Packed& packed) const { return &packed == &first ? first_inputs : last_inputs; }
};

// Everything but the scratch: LANCEBILL_OK, or why not. `tiles`: the level has tiles.
int32_t plan(const lancebill_layer* layer, const lancebill_work* work, bool tiles, Call& call);

// Lays out the scratch from `memory`; with nullptr only measures. Returns its bytes.
int64_t lay_out(Call& call, uint8_t* memory);

// Fills offsets, active experts and rows.
int32_t sort_slots(Call& call);

Packed describe(const lancebill_matrix& matrix, bool gated);

// Whether `packed`'s input can be held exactly in bf16 tiles, up to a factor for each row.
bool fits_tiles(const Packed& packed);

struct Level {
  const char* name;
  bool tiles;
  void (*run)(const Call&);
};

// Null where a level was not built: a compiler that lacks its flags, or another machine's.
__attribute__((weak)) const Level* level_portable();
__attribute__((weak)) const Level* level_neon();
__attribute__((weak)) const Level* level_avx2();
__attribute__((weak)) const Level* level_avxvnni();
__attribute__((weak)) const Level* level_avx512vnni();
__attribute__((weak)) const Level* level_avx512();
__attribute__((weak)) const Level* level_amx();

}  // namespace lancebill
