// The product at the heart of it: a few row blocks times a few input rows, group by group.
//
// Written once over a level's vectors `V`, which have `V::lanes` output rows (16, or 4: a block is then read in parts):
//   rows                      input rows that are multiplied together, 2 to 4
//   together(sums)            row blocks that are, where each has so many sums: 1, 2 or 4, what registers allow
//   fetches_twice             lines of codes are asked for twice, see kFar: not where products take longer than memory
//   Codes, I32, F32, Table    four codes of each row; one number of each row; 16 bytes to look up
//   load, table, low, high    codes from memory, looked up by low or high nibble
//   dot(I32, Codes, x)        adds the products of each row's four codes with the four signed bytes at x
//   split_bytes               dot takes codes of 7 bits only: bytes are then cut in two planes like large table entries
//   short_sums                small table entries: short_products of several columns are added up (add_shorts) and then
//                             widened, multiplied by a factor (add_widened): both planes of an input go to one sum
//   plain_nibbles             low_nibbles and high_nibbles are codes as numbers, without a table
//   whole_bytes               with blocks together: sums of high nibbles are found from those of whole bytes instead
//   scales, zeros, floats, Minifloat        numbers of the rows from their stored bytes
#pragma once

#include "inputs.h"
#include "plan.h"

namespace lancebill {
namespace {

constexpr int64_t kScalesAhead = 512;  // bytes between what is read and what is asked for

constexpr int kFetchUnits = 2;  // units multiplied between two steps of asking for what comes: evenly, not in bursts

constexpr int kPlane = 256;  // what the high plane of an input counts

// Row blocks read together, each strip a stream of its own, and those that will be read after them: prefetches run into
// these.
struct Streams {
  const uint8_t *codes, *scales, *zeros;
  const uint8_t *next_codes, *next_scales;
};

inline Streams streams(const Packed& p, int64_t block, int64_t next) {
  return {p.codes(block), p.scales(block), p.zeros(block), p.codes(next), p.scales(next)};
}

// What is read `distance` bytes after `offset`, in pieces of `size` bytes; short ones shorten the distance.
inline const uint8_t* ahead(const uint8_t* here, const uint8_t* next, int64_t offset, int64_t distance, int64_t size) {
  offset += least(distance, size);
  const uintptr_t address = reinterpret_cast<uintptr_t>(offset < size ? here : next) + (offset < size ? offset : offset - size);
  return reinterpret_cast<const uint8_t*>(address);
}

// Codes of the first of some strips that will be read, later and soon.
struct Ahead {
  const uint8_t *far, *near;

  LANCEBILL_INLINE void fetch(int64_t place) const { fetch_line(far + place, near + place); }
  LANCEBILL_INLINE void fetch_once(int64_t place) const { __builtin_prefetch(far + place, 0, 3); }
  Ahead from(int64_t place) const { return {far + place, near + place}; }
};

// The lines of `Strips` strips, as they are asked for while the same lines of an earlier group are multiplied: `Count`
// of them in every step, `steps` steps in a pass, until after some passes all had their turn. Memory is faster at the
// pages of several strips at once, and kernels compute one after the other: a step takes a line of each of some strips.
template <class V, int Strips, int Count>
struct Turns {
  static constexpr int kStreams = least(Strips, Count), kSets = Strips / kStreams, kLines = Count / kStreams;
  static_assert(kStreams * kSets == Strips && kStreams * kLines == Count, "every line has its turn");
  Ahead at;
  int64_t strip_bytes;

  Turns(const Ahead& first, int64_t strip_bytes, int pass, int64_t steps)
      : at(first.from(pass % kSets * kStreams * strip_bytes + pass / kSets * steps * kLines * kUnit)),
        strip_bytes(strip_bytes) {}

  LANCEBILL_INLINE void step() {
    LANCEBILL_EACH(i, Count) {
      const int64_t place = i % kStreams * strip_bytes + i / kStreams * kUnit;
      V::fetches_twice ? at.fetch(place) : at.fetch_once(place);
    }
    at = at.from(kLines * kUnit);
  }
};

// How far ahead codes are asked for where `piece` bytes of a strip, a power of two, are read at once: whole pieces, so
// that none begins in a strip and ends behind it.
class Reach {
 public:
  Reach(const Packed& p, const Streams& s, int64_t piece)
      : s_(s), strip_bytes_(p.strip_bytes), piece_(piece), end_(s.codes + p.strip_bytes) {}

  Ahead from(int64_t offset) const { return {place(offset, kFar), place(offset, kNear)}; }
  LANCEBILL_INLINE Ahead after(const Ahead& now) const { return {after(now.far), after(now.near)}; }

 private:
  const uint8_t* place(int64_t offset, int64_t distance) const {
    return ahead(s_.codes, s_.next_codes, offset, (distance + piece_ - 1) & -piece_, strip_bytes_);
  }
  LANCEBILL_INLINE const uint8_t* after(const uint8_t* now) const {
    now += piece_;
    return now == end_ ? s_.next_codes : now;
  }

  const Streams& s_;
  int64_t strip_bytes_, piece_;
  const uint8_t* end_;
};

// Scales of blocks that are `block` bytes apart: which kind they are of is asked once for all.
template <class V, int Blocks>
LANCEBILL_INLINE void load_scales(int32_t kind, const uint8_t* first, int64_t block, int part,
                                typename V::F32 (&scales)[Blocks]) {
  const auto load = [&](int32_t one_kind) __attribute__((always_inline)) {
    LANCEBILL_EACH(b, Blocks) scales[b] = V::scales(one_kind, first + b * block, part);
  };
  switch (kind) {
    case LANCEBILL_SCALE_BF16: return load(LANCEBILL_SCALE_BF16);
    case LANCEBILL_SCALE_F16: return load(LANCEBILL_SCALE_F16);
    case LANCEBILL_SCALE_F32: return load(LANCEBILL_SCALE_F32);
    case LANCEBILL_SCALE_E8M0: return load(LANCEBILL_SCALE_E8M0);
    case LANCEBILL_SCALE_E4M3: return load(LANCEBILL_SCALE_E4M3);
    default: return load(LANCEBILL_SCALE_NONE);
  }
}

// A number that is known when a lambda is compiled.
template <int Value>
struct Constant {
  constexpr operator int() const { return Value; }
};

template <class V>
LANCEBILL_INLINE typename V::Table plane_table(const Packed& p, int plane) {
  uint8_t bytes[16];
  for (int i = 0; i < 16; i++) bytes[i] = static_cast<uint8_t>(plane == 0 ? p.matrix->table[i] & 127 : p.matrix->table[i] >> 7);
  return V::table(bytes);
}

// What the codes of a unit are for each of its `blocks` row blocks, in `planes`; `at_once` units are a step.
template <class V, int Planes, bool Short = false>
struct Nibbles {
  static constexpr int blocks = 2, planes = Planes, at_once = Short ? 4 : 2;
  static constexpr bool short_sums = Short, whole_bytes = false;
  typename V::Table tables[Planes];

  explicit Nibbles(const Packed& p) {
    for (int i = 0; i < Planes; i++) tables[i] = plane_table<V>(p, i);
  }

  LANCEBILL_INLINE typename V::Codes of(int block, int plane, typename V::Codes unit) const {
    return block == 0 ? V::low(tables[plane], unit) : V::high(tables[plane], unit);
  }
};

// Nibbles that are their own table: integers of 4 bits. Where bytes are multiplied as they are, the high ones need not
// be found, see GroupSums; where sums are short, products of 32 columns fit one.
template <class V>
struct PlainNibbles {
  static constexpr int blocks = 2, planes = 1, at_once = V::short_sums ? 8 : 2;
  static constexpr bool short_sums = V::short_sums, whole_bytes = V::whole_bytes;

  explicit PlainNibbles(const Packed&) {}

  LANCEBILL_INLINE typename V::Codes of(int block, int, typename V::Codes unit) const {
    if (block == 0) return V::low_nibbles(unit);
    if constexpr (whole_bytes) {
      return unit;
    } else {
      return V::high_nibbles(unit);
    }
  }
};

template <class V>
struct Bytes {
  static constexpr int blocks = 1, planes = V::split_bytes ? 2 : 1, at_once = 2;
  static constexpr bool short_sums = false, whole_bytes = false;

  explicit Bytes(const Packed&) {}

  LANCEBILL_INLINE typename V::Codes of(int, int plane, typename V::Codes unit) const {
    if constexpr (V::split_bytes) return plane == 0 ? V::low_bits(unit) : V::top_bit(unit);
    return unit;
  }
};

// The sums of one group: `Together` row blocks (part `part` of each, where a block is more than a vector) from block
// `First` of a strip on, with `Rows` input rows. An input is loaded once for all blocks, a code looked up once for all rows.
//
// Whole bytes are low + 16 * high, of two blocks: sums with them, less those with the low nibbles, are sixteen times
// those with the high ones. So are the values of every second block.
template <class V, class Code, int InputPlanes, int First, int Together, int Rows>
struct GroupSums {
  using I32 = typename V::I32;
  static constexpr int kPartBytes = kUnit * V::lanes / kRows;
  static constexpr int kAtOnce = Code::at_once;  // units: every group has a multiple of it
  static constexpr int kSums = Code::short_sums ? 1 : InputPlanes;  // widening short sums brings the planes together
  static_assert(kAtOnce * kUnitColumns % kTurn == 0, "a step begins where the turn of a plane does");
  static_assert(!Code::whole_bytes || (First == 0 && Together % 2 == 0), "whole bytes are of both blocks");
  I32 sums[Together][Rows][kSums][Code::planes];

  LANCEBILL_INLINE void start(const Packed& p, const uint8_t* zeros, int part, const InputGroup* const (&groups)[Rows]) {
    LANCEBILL_EACH(b, Together)
      LANCEBILL_EACH(r, Rows)
        LANCEBILL_EACH(i, kSums) {
          I32* sum = sums[b][r][i];
          const int32_t start = kSums == InputPlanes ? groups[r]->start[i] : groups[r]->both;
          sum[0] = zeros == nullptr ? V::broadcast(is_whole(b) ? start + 16 * start : start)
                                    : V::multiply(zero(p, zeros, b, part), V::broadcast(start));
          if constexpr (Code::planes == 2) sum[1] = V::broadcast(0);
        }
  }

  static constexpr bool is_whole(int b) { return Code::whole_bytes && b % 2 == 1; }

  static LANCEBILL_INLINE I32 zero(const Packed& p, const uint8_t* zeros, int b, int part) {
    const I32 own = V::zeros(zeros + b * p.zero_block, part);
    return is_whole(b) ? V::add(V::zeros(zeros + (b - 1) * p.zero_block, part), V::template shift_left<4>(own)) : own;
  }

  // `unit`: the first of these blocks' codes, of `bytes` a strip; `x`: where each row's inputs of the group are; `soon`:
  // what is fetched on the way, if `fetch`.
  template <class Soon>
  LANCEBILL_INLINE void add(const Packed& p, const Code& code, const uint8_t* unit, int64_t bytes, Soon soon, bool fetch,
                          const int8_t* const (&x)[Rows]) {
    const int8_t* at[Rows];
    LANCEBILL_EACH(r, Rows) at[r] = x[r];
    for (const uint8_t* end = unit + bytes; unit != end; unit += kAtOnce * kUnit) {
      if constexpr (Code::short_sums) {
        add_shorts(p, code, unit, soon, fetch, at);
      } else {
        static_assert(kAtOnce == kFetchUnits, "one step of fetching");
        if (fetch) soon.step();
        add_dots(p, code, unit, at);
      }
      LANCEBILL_EACH(r, Rows) at[r] += InputPlanes * kAtOnce * kUnitColumns;
    }
  }

  LANCEBILL_INLINE void add_dots(const Packed& p, const Code& code, const uint8_t* unit, const int8_t* const (&x)[Rows]) {
    LANCEBILL_EACH(u, kAtOnce) {
      typename V::Codes held[Together][Code::planes];
      look_up(p, code, unit + u * kUnit, held);
      LANCEBILL_EACH(r, Rows)
        LANCEBILL_EACH(i, InputPlanes)
          LANCEBILL_EACH(b, Together)
            LANCEBILL_EACH(plane, Code::planes) {
              I32& sum = sums[b][r][i][plane];
              sum = V::dot(sum, held[b][plane], x[r] + in_record(u * kUnitColumns, i, InputPlanes));
            }
    }
  }

  template <class Soon>
  LANCEBILL_INLINE void add_shorts(const Packed& p, const Code& code, const uint8_t* unit, Soon& soon, bool fetch,
                                 const int8_t* const (&x)[Rows]) {
    typename V::Codes shorts[Together][Rows][InputPlanes];
    LANCEBILL_EACH(u, kAtOnce) {
      if (fetch && u % kFetchUnits == 0) soon.step();
      typename V::Codes held[Together][Code::planes];
      look_up(p, code, unit + u * kUnit, held);
      LANCEBILL_EACH(r, Rows)
        LANCEBILL_EACH(i, InputPlanes)
          LANCEBILL_EACH(b, Together) {
            const int8_t* at = x[r] + in_record(u * kUnitColumns, i, InputPlanes);
            const typename V::Codes more = V::short_products(held[b][0], at);
            typename V::Codes& sum = shorts[b][r][i];
            sum = u == 0 ? more : V::add_shorts(sum, more);
            if (u + 1 == kAtOnce) {
              sums[b][r][0][0] = V::add_widened(sums[b][r][0][0], sum, i + 1 < InputPlanes ? kPlane : 1);
            }
          }
    }
  }

  static LANCEBILL_INLINE void look_up(const Packed& p, const Code& code, const uint8_t* unit,
                                     typename V::Codes (&held)[Together][Code::planes]) {
    LANCEBILL_EACH(b, Together) {
      const int block = First + b;
      const typename V::Codes codes = V::load(unit + block / Code::blocks * p.strip_bytes);
      LANCEBILL_EACH(plane, Code::planes) held[b][plane] = code.of(block % Code::blocks, plane, codes);
    }
  }

  LANCEBILL_INLINE I32 sum(int b, int r, int plane) const {
    const I32* sum = sums[b][r][plane];
    if constexpr (Code::planes == 2) return V::add(sum[0], V::template shift_left<7>(sum[1]));
    if constexpr (Code::whole_bytes) return is_whole(b) ? V::subtract(sum[0], sums[b - 1][r][plane][0]) : sum[0];
    return sum[0];
  }

  // In units of the input's low plane.
  LANCEBILL_INLINE typename V::F32 value(int b, int r) const {
    if constexpr (kSums == 1) return V::to_float(sum(b, r, 0));
    return V::fma(V::to_float(sum(b, r, 0)), V::spread(kPlane), V::to_float(sum(b, r, kSums - 1)));
  }
};

// Where the records of a few input rows are.
template <int Rows>
using Records = const uint8_t* const (&)[Rows];

// out[row][block][16] = the products of `Blocks` row blocks with `Rows` input rows, before row scales.
template <class V, class Code, int InputPlanes, int Blocks, int Rows>
__attribute__((noinline)) void integer_product(const Packed& p, const Streams& s, Records<Rows> records,
                                               float (*out)[Blocks][kRows]) {
  using F32 = typename V::F32;
  constexpr int kParts = kRows / V::lanes, kStrips = Blocks / Code::blocks;
  constexpr int kTogether = least(V::together(Rows * InputPlanes * Code::planes), Blocks);
  const lancebill_matrix& m = *p.matrix;
  const int64_t piece = m.group / kUnitColumns * kUnit;
  const Reach reach(p, s, piece);
  const Code code(p);
  F32 total[Blocks][kParts][Rows];
  for (auto& block : total)
    for (auto& part : block)
      for (F32& sum : part) sum = V::zero();

  // Where the current group is, in everything that is read: the end of each group steps to the next.
  Ahead soon = reach.from(0);
  const uint8_t *codes = s.codes, *scales = s.scales, *zeros = s.zeros;
  int64_t scales_read = 0;  // of each block
  const int8_t* x[Rows];
  const InputGroup* groups[Rows];
  LANCEBILL_EACH(r, Rows) {
    x[r] = reinterpret_cast<const int8_t*>(records[r]);
    groups[r] = reinterpret_cast<const InputGroup*>(records[r] + InputPlanes * p.columns);
  }
  for (int32_t g = 0; g < p.groups; g++) {
    if (scales_read % kUnit == 0 && m.scale != LANCEBILL_SCALE_NONE) {  // a line of each block begins
      const uint8_t* later = ahead(s.scales, s.next_scales, scales_read, kScalesAhead, p.scale_block);
      LANCEBILL_EACH(b, Blocks) __builtin_prefetch(later + b * p.scale_block);
    }
    // Block `b` of a strip that has it as its block `in_strip`, and those that are multiplied together with it.
    const auto blocks_from = [&](int b, auto in_strip) __attribute__((always_inline)) {
      for (int part = 0; part < kParts; part++) {
        using Group = GroupSums<V, Code, InputPlanes, in_strip, kTogether, Rows>;
        constexpr int kLines = kFetchUnits * kTogether / Code::blocks;
        Group group;
        group.start(p, m.zero == LANCEBILL_ZERO_U8 ? zeros + b * p.zero_block : nullptr, part, groups);
        const uint8_t* unit = codes + b / Code::blocks * p.strip_bytes + part * Group::kPartBytes;
        const Turns<V, kStrips, kLines> turns(soon, p.strip_bytes, b / kTogether, piece / (kFetchUnits * kUnit));
        group.add(p, code, unit, piece, turns, part == 0, x);
        F32 scale[kTogether];
        load_scales<V>(m.scale, scales + b * p.scale_block, p.scale_block, part, scale);
        LANCEBILL_EACH(t, kTogether) {
          if (Group::is_whole(t)) scale[t] = V::mul(scale[t], V::spread(1.0f / 16));
          LANCEBILL_EACH(r, Rows) {
            F32& sum = total[b + t][part][r];
            sum = V::fma(group.value(t, r), V::mul(scale[t], V::spread(groups[r]->scale)), sum);
          }
        }
      }
    };
    LANCEBILL_UNROLL
    for (int b = 0; b < Blocks; b += most(kTogether, Code::blocks)) {
      blocks_from(b, Constant<0>());
      if constexpr (kTogether < Code::blocks) blocks_from(b + 1, Constant<1>());
    }
    if (m.zero == LANCEBILL_ZERO_OFFSET_F32) {
      for (int b = 0; b < Blocks; b++)
        for (int part = 0; part < kParts; part++)
          for (int r = 0; r < Rows; r++) {
            F32& sum = total[b][part][r];
            sum = V::fma(V::floats(zeros + b * p.zero_block, part), V::spread(-groups[r]->sum), sum);
          }
    }
    soon = reach.after(soon);
    codes += piece;
    scales += p.scale_row;
    scales_read += p.scale_row;
    zeros += p.zero_row;
    LANCEBILL_EACH(r, Rows) {
      x[r] += InputPlanes * m.group;
      groups[r]++;
    }
  }
  for (int b = 0; b < Blocks; b++)
    for (int part = 0; part < kParts; part++)
      for (int r = 0; r < Rows; r++) V::store(out[r][b] + part * V::lanes, total[b][part][r]);
}

// The same for FLOAT8 codes and fp32 inputs. Two sums a row: one chain of additions would wait for itself.
template <class V, int Blocks, int Rows>
__attribute__((noinline)) void float_product(const Packed& p, const Streams& s, Records<Rows> records,
                                             float (*out)[Blocks][kRows]) {
  using F32 = typename V::F32;
  constexpr int kParts = kRows / V::lanes;
  const lancebill_matrix& m = *p.matrix;
  const int64_t piece = int64_t{m.group} * kRows;
  const Reach reach(p, s, piece);
  const typename V::Minifloat minifloat(p);
  F32 total[Blocks][kParts][Rows];
  for (auto& block : total)
    for (auto& part : block)
      for (F32& sum : part) sum = V::zero();

  for (int32_t g = 0; g < p.groups; g++) {
    const int64_t first = int64_t{g} * m.group, at = g * piece;
    const Ahead soon = reach.from(at);
    for (int b = 0; b < Blocks; b++) {
      for (int part = 0; part < kParts; part++) {
        F32 sums[Rows][2];
        for (auto& pair : sums) pair[0] = pair[1] = V::zero();
        const uint8_t* codes = s.codes + b * p.strip_bytes + at + part * V::lanes;
        Turns<V, Blocks, 2> turns(soon, p.strip_bytes, b, m.group / 8);
        for (int k = 0; k < m.group; k += 8) {
          if (part == 0) turns.step();
          for (int i = 0; i < 8; i++) {
            const F32 weight = minifloat.decode(codes + (k + i) * kRows);
            for (int r = 0; r < Rows; r++) {
              const float x = reinterpret_cast<const float*>(records[r])[first + k + i];
              sums[r][i % 2] = V::fma(weight, V::spread(x), sums[r][i % 2]);
            }
          }
        }
        const F32 scale = V::mul(V::scales(m.scale, s.scales + b * p.scale_block + g * p.scale_row, part), minifloat.unit);
        for (int r = 0; r < Rows; r++) {
          F32& sum = total[b][part][r];
          sum = V::fma(V::sum(sums[r][0], sums[r][1]), scale, sum);
          if (m.zero == LANCEBILL_ZERO_OFFSET_F32) {
            const float x = reinterpret_cast<const float*>(records[r])[p.columns + g];
            sum = V::fma(V::floats(s.zeros + b * p.zero_block + g * p.zero_row, part), V::spread(-x), sum);
          }
        }
      }
    }
  }
  for (int b = 0; b < Blocks; b++)
    for (int part = 0; part < kParts; part++)
      for (int r = 0; r < Rows; r++) V::store(out[r][b] + part * V::lanes, total[b][part][r]);
}

template <class V, class Code, int Blocks, int Rows>
void by_planes(const Packed& p, const Streams& s, Records<Rows> records, float (*out)[Blocks][kRows]) {
  planes_of(p) == 1 ? integer_product<V, Code, 1, Blocks, Rows>(p, s, records, out)
                    : integer_product<V, Code, 2, Blocks, Rows>(p, s, records, out);
}

// The kernel for a matrix: by its codes and by the planes of its input. One block alone is never of nibbles.
template <class V, int Blocks, int Rows>
void product(const Packed& p, const Streams& s, Records<Rows> records, float (*out)[Blocks][kRows]) {
  if (p.matrix->codes == LANCEBILL_FLOAT8) return float_product<V, Blocks, Rows>(p, s, records, out);
  if (p.matrix->codes == LANCEBILL_BYTE) return by_planes<V, Bytes<V>, Blocks, Rows>(p, s, records, out);
  if constexpr (Blocks > 1) {
    if (p.two_planes) return by_planes<V, Nibbles<V, 2>, Blocks, Rows>(p, s, records, out);
    if constexpr (V::plain_nibbles) {
      const bool whole_steps = p.matrix->group % (PlainNibbles<V>::at_once * kUnitColumns) == 0;
      if (p.plain_entries && whole_steps) return by_planes<V, PlainNibbles<V>, Blocks, Rows>(p, s, records, out);
    }
    if constexpr (V::short_sums) {
      if (p.small_entries) return by_planes<V, Nibbles<V, 1, true>, Blocks, Rows>(p, s, records, out);
    }
    by_planes<V, Nibbles<V, 1>, Blocks, Rows>(p, s, records, out);
  }
}

}  // namespace
}  // namespace lancebill
