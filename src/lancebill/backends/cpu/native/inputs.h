// The input of a GEMM: rounded or quantised as the matrix says, then written in the format of the kernels.
//
// Integer kernels (TABLE4, BYTE) read signed bytes. INT8 inputs are one plane of bytes. All others become integers
// relative to the largest value of each group: 16-bit floats and e4m3 numbers have two planes, value = scale * (256 *
// high + low), fp32 numbers have three, with 22 bits and a sign. Runs of eight columns of each plane alternate, so all
// planes are at fixed offsets. A group's record also holds the start values of its sums, which account for centers and
// zero points: sum (u - c) x = sum u x - c sum x. Kernels for many rows read two planes as one of 16-bit words, without
// start values. Kernels of fp32 weights read fp32, tiles read bf16.
#pragma once

#include "convert.h"
#include "group_codes.h"
#include "plan.h"

namespace lancebill {
namespace {

struct InputGroup {
  float scale;
  int32_t start[3];  // start values of the sums over each plane (see start_value); with zero points: minus its sum
  int32_t both;      // likewise for one sum over two planes; used with small table entries only, where it fits
  float sum;         // sum of the group's values, for offsets
};

// The largest value of two planes, which keeps the high plane within 127, and of three, which `to_int` limits.
constexpr float kTop[4] = {0, 0, 127 * 256, 63 * 65536};
constexpr float kTiny = 0x1p-90f;    // groups below this are multiplied by kLift first: their reciprocals overflow
constexpr float kLift = 0x1p64f;

constexpr int kPlaneRun = 8;  // consecutive columns of one plane before those of the other

// Byte offset of a column in a record with `planes` planes.
constexpr int plane_offset(int column, int plane, int planes) {
  return (column / kPlaneRun * planes + plane) * kPlaneRun + column % kPlaneRun;
}

inline int planes_of(const Packed& p) {
  return p.matrix->input == LANCEBILL_INPUT_INT8 ? 1 : p.matrix->input == LANCEBILL_INPUT_F32 ? 3 : 2;
}

inline int64_t operand_bytes(const Packed& p) {
  const int64_t numbers = p.in_floats ? 4 * p.columns : planes_of(p) * p.columns;
  return round_up(numbers + p.groups * static_cast<int64_t>(p.in_floats ? sizeof(float) : sizeof(InputGroup)), kUnit);
}

inline int64_t tile_operand_bytes(const Packed& p) { return 2 * p.columns; }

// Row buffers of one thread.
struct RowBuffers {
  float *values, *spare, *scales;
};

inline RowBuffers row_buffers(const Call& call, int thread) {
  float* base = reinterpret_cast<float*>(call.per_thread + thread * call.per_thread_bytes);
  return {base, base + call.row_floats, base + 2 * call.row_floats};
}

inline void load_row(const void* x, int32_t type, int64_t first, int64_t count, float* values) {
  if (type == LANCEBILL_F32) {
    std::memcpy(values, static_cast<const float*>(x) + first, sizeof(float) * count);
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(x) + first;
  if (type == LANCEBILL_BF16) {
    for (int64_t k = 0; k < count; k++) values[k] = from_bf16(halves[k]);
  } else {
    for (int64_t k = 0; k < count; k++) values[k] = from_f16(halves[k]);
  }
}

inline void store_row(const float* values, int64_t count, int32_t type, void* out, int64_t first) {
  if (type == LANCEBILL_F32) {
    std::memcpy(static_cast<float*>(out) + first, values, sizeof(float) * count);
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(out) + first;
  if (type == LANCEBILL_BF16) {
    for (int64_t k = 0; k < count; k++) halves[k] = to_bf16(values[k]);
  } else {
    for (int64_t k = 0; k < count; k++) halves[k] = to_f16(values[k]);
  }
}

inline void fill(float* values, int64_t count, float value) {
  for (int64_t k = 0; k < count; k++) values[k] = value;
}

// Quantises one block in place and returns its scale. Blocks that are not finite get a NaN scale.
inline float quantise_block(float* values, int64_t count, int32_t kind, const float* fixed) {
  const float peak = largest(values, count);
  if (!finite(peak)) {
    fill(values, count, 0);
    return __builtin_nanf("");
  }
  const double reach = kind == LANCEBILL_INPUT_INT8 ? 127 : 448;
  const float dynamic = peak == 0 ? 1.0f : max_of(static_cast<float>(peak / reach), 0x1p-149f);
  const float scale = fixed != nullptr ? *fixed : dynamic;
  if (kind == LANCEBILL_INPUT_INT8) {
    for (int64_t k = 0; k < count; k++) values[k] = rint_small(min_of(max_of(values[k] / scale, -128.0f), 127.0f));
  } else {
    for (int64_t k = 0; k < count; k++) values[k] = round_e4m3(values[k] / scale);
  }
  return scale;
}

// Rounds or quantises a row in place. Quantised kinds leave codes in `values` and one scale per block in `scales`;
// returns the columns of a block, 0 for kinds without scales.
inline int64_t represent(const Packed& p, int64_t expert, float* values, float* scales) {
  const lancebill_matrix& m = *p.matrix;
  const int64_t count = m.columns;
  if (m.input == LANCEBILL_INPUT_BF16) {
    for (int64_t k = 0; k < count; k++) values[k] = round_bf16(values[k]);
  } else if (m.input == LANCEBILL_INPUT_F16) {
    for (int64_t k = 0; k < count; k++) values[k] = round_f16(values[k]);
  } else if (m.input != LANCEBILL_INPUT_F32) {
    const float* fixed = m.input_scale == nullptr ? nullptr : m.input_scale + expert;
    const int64_t block = m.input_group == 0 || fixed != nullptr ? p.columns : m.input_group;
    for (int64_t first = 0; first < p.columns; first += block) {
      const int64_t size = min_of(block, count - first);  // <= 0 in the padding
      scales[first / block] = size > 0 ? quantise_block(values + first, size, m.input, fixed) : 1.0f;
    }
    return block;
  }
  return 0;
}

inline void unscale(float* values, int64_t count, const float* scales, int64_t block) {
  for (int64_t first = 0; first < count; first += block) {
    for (int64_t k = first; k < min_of(first + block, count); k++) values[k] *= scales[first / block];
  }
}

// Where converting integers to floats takes several times as long as adding, sums of bytes start at the bits of
// 1.5 * 2^23: they are then the bits of that number plus the sum. A group has at most 128 columns, so sums of products
// with codes less their center or zero point are below 2^22.
constexpr int32_t kFloatBits = 0x4b400000;
constexpr float kFloatBias = 0x1.8p23f;

template <class V>
int32_t start_value(const Packed& p, int32_t sum) {
  if (p.matrix->zero == LANCEBILL_ZERO_U8) return -sum;
  const bool biased = V::biased_sums && !two_planes<V>(p);
  return (code_bias<V>(p) - p.matrix->center) * sum + (biased ? kFloatBits : 0);
}

// `total`: the sum of the group's integers; `step`: what their unit is worth.
template <class V>
InputGroup finish_group(const Packed& p, const int32_t sums[3], float total, float step) {
  InputGroup group = {step * p.unit, {}, 0, step * total};
  for (int i = 0; i < 3; i++) group.start[i] = start_value<V>(p, sums[i]);
  group.both = static_cast<int32_t>(256u * static_cast<uint32_t>(group.start[0]) +
                                    static_cast<uint32_t>(group.start[1]));  // may wrap
  return group;
}

// Separate functions with __restrict: byte stores may alias anything, which would keep these loops from vectorising.
inline int32_t to_plane(const float* __restrict codes, int64_t count, int8_t* __restrict plane) {
  int32_t sum = 0;
  for (int64_t k = 0; k < count; k++) {
    const int32_t q = to_int(codes[k]);
    plane[k] = static_cast<int8_t>(q);
    sum += q;
  }
  return sum;
}

// Planes from the highest to the lowest: each takes the nearest multiple of its unit, the next what is left.
template <int Planes>
inline void to_planes(const float* __restrict values, int64_t count, float to_code, int8_t* __restrict planes,
                      int32_t sums[3]) {
  int32_t high_sum = 0, middle_sum = 0, low_sum = 0;
  for (int64_t first = 0; first < count; first += kPlaneRun) {
    int8_t* run = planes + Planes * first;
    for (int k = 0; k < kPlaneRun; k++) {
      int32_t rest = to_int(values[first + k] * to_code);
      if constexpr (Planes == 3) {
        const int32_t top = (rest + 32768 + 128) >> 16;
        rest -= 65536 * top;
        run[plane_offset(k, 0, 3)] = static_cast<int8_t>(top);
        high_sum += top;
      }
      const int32_t h = (rest + 128) >> 8, l = rest - 256 * h;
      run[plane_offset(k, Planes - 2, Planes)] = static_cast<int8_t>(h);
      run[plane_offset(k, Planes - 1, Planes)] = static_cast<int8_t>(l);
      middle_sum += h;
      low_sum += l;
    }
  }
  sums[Planes - 2] = middle_sum;
  sums[Planes - 1] = low_sum;
  if constexpr (Planes == 3) sums[0] = high_sum;
}

// As one plane of words. The second and third of every four are swapped, as codes are paired (many_rows.h). Returns the
// sum.
inline int32_t to_words(const float* __restrict values, int64_t count, float to_code, int16_t* __restrict words) {
  int32_t sum = 0;
  for (int64_t k = 0; k < count; k++) {
    const int32_t q = to_int(values[k] * to_code);
    words[k] = static_cast<int16_t>(q);
    sum += q;
  }
  for (int64_t k = 0; k < count; k += kUnitColumns) {
    uint64_t four;
    std::memcpy(&four, words + k, sizeof four);
    four = (four & 0xffff00000000ffff) | (four & 0xffff0000) << 16 | (four >> 16 & 0xffff0000);
    std::memcpy(words + k, &four, sizeof four);
  }
  return sum;
}

template <class V>
void write_one_plane(const Packed& p, const float* codes, const float* scales, int64_t block, uint8_t* record) {
  int8_t* plane = reinterpret_cast<int8_t*>(record);
  InputGroup* groups = reinterpret_cast<InputGroup*>(record + p.columns);
  const int64_t count = static_cast<uint32_t>(p.matrix->group);
  for (int64_t g = 0, first = 0; g < p.groups; g++, first += count) {
    const int32_t sums[3] = {to_plane(codes + first, count, plane + first), 0, 0};
    groups[g] = finish_group<V>(p, sums, static_cast<float>(sums[0]), scales[first / block]);
  }
}

// With `scales`, the values are e4m3 codes, almost all of which fit 16 bits exactly. Values of tiny groups are changed.
// `Words`: instead of two planes.
template <class V, int Planes, bool Words = false>
void write_planes(const Packed& p, float* values, const float* scales, int64_t block, uint8_t* record) {
  int8_t* planes = reinterpret_cast<int8_t*>(record);
  InputGroup* groups = reinterpret_cast<InputGroup*>(record + Planes * p.columns);
  const int64_t count = static_cast<uint32_t>(p.matrix->group);
  for (int64_t g = 0, first = 0; g < p.groups; g++, first += count) {
    float scale = scales == nullptr ? 1 : scales[first / block], peak = largest(values + first, count);
    int32_t sums[3] = {0, 0, 0};
    if (!finite(peak) || peak == 0) {
      std::memset(planes + Planes * first, 0, Planes * count);
      groups[g] = finish_group<V>(p, sums, 0, finite(peak) ? 0 * scale : __builtin_nanf(""));  // the scale may be NaN
      continue;
    }
    if (peak < kTiny) {
      for (int64_t k = first; k < first + count; k++) values[k] *= kLift;
      peak *= kLift;
      scale /= kLift;
    }
    // The smallest power of two that brings the largest value within kTop. A power of two keeps 16-bit floats near the
    // largest exact.
    const uint32_t power = (bits_as<uint32_t>(peak / kTop[Planes]) + 0x7fffffu) & kExponentMask;
    const float step = bits_as<float>(power), to_code = bits_as<float>((254u << 23) - power);
    if constexpr (Words) {
      const int32_t sum = to_words(values + first, count, to_code, reinterpret_cast<int16_t*>(planes) + first);
      groups[g] = {step * scale * p.unit, {}, 0, step * scale * static_cast<float>(sum)};
      continue;
    }
    to_planes<Planes>(values + first, count, to_code, planes + Planes * first, sums);
    double total = 0;
    for (int i = 0; i < Planes; i++) total = 256 * total + sums[i];
    groups[g] = finish_group<V>(p, sums, static_cast<float>(total), step * scale);
  }
}

inline void write_floats(const Packed& p, const float* values, uint8_t* record) {
  std::memcpy(record, values, sizeof(float) * p.columns);
  float* sums = reinterpret_cast<float*>(record) + p.columns;
  if (!p.has_offsets()) return;  // nothing reads the sums
  for (int64_t g = 0; g < p.groups; g++) {
    sums[g] = 0;
    for (int64_t k = 0; k < p.matrix->group; k++) sums[g] += values[g * p.matrix->group + k];
  }
}

// Rotates every `block` columns, as lancebill.numbers.rotation defines it. Every number is a sum in the same order.
inline void rotate(float* values, int64_t columns, int64_t block) {
  for (int64_t distance = 1; distance < block; distance *= 2) {
    for (int64_t low = 0; low < columns; low += 2 * distance) {
      float *first = values + low, *second = first + distance;
      for (int64_t i = 0; i < distance; i++) {
        const float sum = first[i] + second[i], difference = first[i] - second[i];
        first[i] = sum;
        second[i] = difference;
      }
    }
  }
  const float factor = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(block)));
  for (int64_t k = 0; k < columns; k++) values[k] *= factor;
}

// How the kernel of an expert reads its input rows: records of bytes (of fp32 where weights are), of words, or tiles.
enum class Form { kRecord, kWords, kTiles };
constexpr int kForms = 3;

struct InputPlace {
  Form form;
  TileRow tile;  // of kTiles
};

// Writes row `slot` of `inputs` from the fp32 values in `rows.values`. `V`: the level's vectors, see kernel.h.
template <class V>
void write_input(const Packed& p, int64_t expert, InputPlace place, RowBuffers rows, const Inputs& inputs,
                 int64_t slot) {
  const lancebill_matrix& m = *p.matrix;
  const bool tiles = place.form == Form::kTiles;
  if (m.pre_scale != nullptr) {
    for (int64_t k = 0; k < m.columns; k++) rows.values[k] *= m.pre_scale[expert * m.columns + k];
  }
  if (m.rotation != 0) rotate(rows.values, m.columns, m.rotation);
  const bool rounds_later = tiles && m.input == LANCEBILL_INPUT_BF16;  // see write_tile_row
  const int64_t block = rounds_later ? 0 : represent(p, expert, rows.values, rows.scales);
  // Codes and scales stay separate only while each group has one scale.
  const bool one_scale = m.perm == nullptr || block == p.columns;
  const bool as_codes = block != 0 && (tiles || (!p.in_floats && one_scale));
  if (block != 0 && !as_codes) unscale(rows.values, m.columns, rows.scales, block);
  if (m.perm != nullptr) {
    for (int64_t k = 0; k < m.columns; k++) rows.spare[k] = rows.values[m.perm[expert * m.columns + k]];
    float* swapped = rows.values;
    rows.values = rows.spare;
    rows.spare = swapped;
  }
  if (!tiles) fill(rows.values + m.columns, p.columns - m.columns, 0);
  inputs.shared[slot] = slot;
  inputs.factors[slot] = as_codes ? rows.scales[0] : 1;
  if (tiles) {
    if constexpr (V::tiles) inputs.factors[slot] *= V::write_tile_row(p, rows.values, place.tile);
  } else if (place.form == Form::kWords) {
    write_planes<V, 2, true>(p, rows.values, as_codes ? rows.scales : nullptr, block, inputs.own_record(slot));
  } else if (p.in_floats) {
    write_floats(p, rows.values, inputs.own_record(slot));
  } else if (m.input == LANCEBILL_INPUT_INT8) {
    write_one_plane<V>(p, rows.values, rows.scales, block, inputs.own_record(slot));
  } else if (m.input == LANCEBILL_INPUT_F32) {
    write_planes<V, 3>(p, rows.values, nullptr, block, inputs.own_record(slot));
  } else {
    write_planes<V, 2>(p, rows.values, as_codes ? rows.scales : nullptr, block, inputs.own_record(slot));
  }
}

}  // namespace
}  // namespace lancebill
