// Random matrices, packed as lancebill.h describes; only the kernels read the packed form back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "lancebill.h"
#include "numbers.h"

namespace {

// One matrix of all experts: packed, and its values in double.
struct Matrix {
  lancebill_matrix abi = {};
  int experts = 0, rows = 0, columns = 0;
  std::vector<uint8_t> codes, scales, zeros;
  std::vector<float> row_scale, bias, pre_scale, input_scale;
  std::vector<int32_t> perm;
  std::vector<double> dense;  // [expert][row][column], natural order of rows and columns
  std::string name;
};

template <class T>
void store_at(std::vector<uint8_t>& bytes, size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

// Writes a random scale at `index` and returns its value.
double random_scale(int kind, std::vector<uint8_t>& bytes, size_t index) {
  const double scale = std::exp(normal() * 0.4) * 0.02;
  const float exact = static_cast<float>(scale);
  switch (kind) {
    case LANCEBILL_SCALE_BF16: store_at(bytes, index, bf16_bits(scale)); return bf16(scale);
    case LANCEBILL_SCALE_F16: store_at(bytes, index, f16_bits(scale)); return f16(scale);
    case LANCEBILL_SCALE_F32: store_at(bytes, index, exact); return exact;
    case LANCEBILL_SCALE_E8M0:
      bytes[index] = static_cast<uint8_t>(pick(118, 123));
      return std::ldexp(1.0, bytes[index] - 127);
    case LANCEBILL_SCALE_E4M3: bytes[index] = static_cast<uint8_t>(pick(0, 120)); return minifloat(bytes[index], 3);
    default: return 1;
  }
}
constexpr double kOffsets = 0.1;
constexpr int kBytesOfScale[] = {0, 2, 2, 4, 1, 1, 1};
constexpr int kBytesOfZero[] = {0, 1, 4, 1};
constexpr double kI8 = 73;  // root mean square of a signed byte

// Groups that share a factor, and the bytes of their record.
int groups_of_factor(const lancebill_matrix& m) { return m.factor / m.group; }
size_t record_bytes(const lancebill_matrix& m) { return 64 + size_t(groups_of_factor(m)) * 16; }

// Writes a random signed byte of a group under the factor of its row, which the first group of a record chooses.
double random_i8(const lancebill_matrix& m, int groups, size_t block, int group, int lane, double size,
                 std::vector<uint8_t>& bytes) {
  const int shared = groups_of_factor(m);
  const size_t records = (groups + shared - 1) / shared;
  uint8_t* record = bytes.data() + (block * records + group / shared) * record_bytes(m);
  float factor = static_cast<float>(std::exp(normal() * 0.4) * size / kI8) * static_cast<float>(one_of({1, 1, -1, 0}));
  if (group % shared == 0) std::memcpy(record + 4 * lane, &factor, sizeof factor);
  std::memcpy(&factor, record + 4 * lane, sizeof factor);
  const int8_t number = static_cast<int8_t>(pick(-128, 127));
  record[64 + group % shared * 16 + lane] = static_cast<uint8_t>(number);
  return static_cast<double>(number) * factor;
}

void choose_codes(Matrix& w) {
  lancebill_matrix& m = w.abi;
  static const double nf4[] = {-1.0, -0.6962, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0,
                               0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0};
  static const int e2m1[] = {0, 1, 2, 3, 4, 6, 8, 12}, iq2[] = {8, 25, 43};
  m.codes = one_of({LANCEBILL_TABLE4, LANCEBILL_TABLE4, LANCEBILL_BYTE, LANCEBILL_FLOAT8, LANCEBILL_BITS6});
  m.step = 1;
  if (m.codes == LANCEBILL_FLOAT8) {
    m.mantissa = pick(2, 4);
    m.step = one_of({1.0f, 0.5f});
    w.name = "float8 m" + std::to_string(m.mantissa);
  } else if (m.codes == LANCEBILL_BYTE) {
    m.center = one_of({128, 100});
    w.name = "byte";
  } else if (m.codes == LANCEBILL_BITS6) {
    m.center = one_of({32, 16});
    w.name = "bits6";
  } else if (const int kind = pick(0, 3); kind == 0) {
    m.center = 8;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<int32_t>(i);
    w.name = "int4";
  } else if (kind == 1) {
    m.center = 12;
    m.step = 0.5f;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<int32_t>(12 + (i < 8 ? e2m1[i] : -e2m1[i - 8]));
    w.name = "e2m1";
  } else if (kind == 2) {  // 7 bits: too large to be summed in 16, but one byte
    m.center = 43;
    m.step = 0.125f;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<int32_t>(43 + (i < 8 ? iq2[i % 3] : -iq2[i % 3]));
    w.name = "iq2";
  } else {
    m.center = 8191;
    m.step = 1.0f / 8191;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<int32_t>(8191 + std::lround(nf4[i] * 8191));
    w.name = "nf4";
  }
  const int none = LANCEBILL_ZERO_NONE, byte = LANCEBILL_ZERO_U8, offset = LANCEBILL_ZERO_OFFSET_F32;
  m.zero = m.codes == LANCEBILL_FLOAT8 ? one_of({none, offset}) : one_of({none, none, byte, offset});
}

double code_value(const lancebill_matrix& m, int code, int zero) {
  if (m.codes == LANCEBILL_FLOAT8) return m.step * minifloat(code, m.mantissa);
  const int number = m.codes == LANCEBILL_TABLE4 ? m.table[code] : code;
  return static_cast<double>(m.step) * (number - (m.zero == LANCEBILL_ZERO_U8 ? zero : m.center));
}

int random_code(const lancebill_matrix& m) {
  if (m.codes == LANCEBILL_TABLE4) return pick(0, 15);
  if (m.codes == LANCEBILL_BYTE) return pick(0, 255);
  if (m.codes == LANCEBILL_BITS6) return pick(0, 63);
  const int top = m.mantissa == 2 ? 0x7b : m.mantissa == 3 ? 0x7e : 0x7f;  // no NaN, no infinity
  return pick(0, top) | (pick(0, 1) << 7);
}

double typical_weight(const lancebill_matrix& m) {
  const double scales[] = {1, 0.02, 0.02, 0.02, 0.01, 60, 0.02};
  double squares = 0;
  const int zero = m.codes == LANCEBILL_BYTE ? 128 : m.codes == LANCEBILL_BITS6 ? 32 : 8;
  for (int i = 0; i < 256; i++) squares += std::pow(code_value(m, random_code(m), zero), 2);
  return std::sqrt(squares / 256) * scales[m.scale] + (m.zero >= LANCEBILL_ZERO_OFFSET_F32 ? kOffsets : 0);
}

// Index of a natural row among the packed rows.
int packed_row(int row, int rows, bool gated) {
  if (!gated) return row;
  const int half = rows / 2, in_half = row % half;
  return (in_half / 16 * 2 + row / half) * 16 + in_half % 16;
}

// Sizes of a packed matrix.
struct Packing {
  int columns, groups, blocks;
  bool nibbles, gated;
};

Packing packing_of(const lancebill_matrix& m, bool gated) {
  const int columns = static_cast<int>(round_up_to(m.columns, std::max(m.group, 32)));
  const bool nibbles = m.codes == LANCEBILL_TABLE4;
  const double rows = gated ? 2 * round_up_to(m.rows / 2, 16) : round_up_to(m.rows, nibbles ? 32 : 16);
  return {columns, columns / m.group, static_cast<int>(rows) / 16, nibbles, gated};
}

bool may_be_long_table(const Matrix& w) {
  const lancebill_matrix& m = w.abi;
  return w.name == "nf4" && m.input == LANCEBILL_INPUT_F32 && m.factor == 0 && m.zero != LANCEBILL_ZERO_U8;
}

// Entries of 24 bits: their weights are multiplied in fp32.
void use_long_table(Matrix& w) {
  lancebill_matrix& m = w.abi;
  for (int32_t& entry : m.table) entry = entry * 1024 + pick(0, 1023);
  m.center *= 1024;
  m.step /= 1024;
  w.name = "nf4 in fp32";
}

void choose_kinds(Matrix& w) {
  lancebill_matrix& m = w.abi;
  choose_codes(w);
  m.group = one_of({16, 32, 64, 128});
  m.scale = one_of({LANCEBILL_SCALE_NONE, LANCEBILL_SCALE_BF16, LANCEBILL_SCALE_F16, LANCEBILL_SCALE_F32,
                    LANCEBILL_SCALE_E8M0, LANCEBILL_SCALE_E4M3});
  const bool may_be_small = m.codes == LANCEBILL_TABLE4 || m.codes == LANCEBILL_BITS6;
  if (may_be_small && pick(0, 3) == 0) m.scale = LANCEBILL_SCALE_I8, m.factor = m.group * one_of({1, 2, 8, 16});
  if (m.factor != 0 && m.zero == LANCEBILL_ZERO_OFFSET_F32) m.zero = LANCEBILL_ZERO_OFFSET_I8;
  m.input = one_of({LANCEBILL_INPUT_BF16, LANCEBILL_INPUT_BF16, LANCEBILL_INPUT_F16, LANCEBILL_INPUT_F32,
                    LANCEBILL_INPUT_INT8, LANCEBILL_INPUT_E4M3});
  m.input_group = one_of({0, 0, m.group, 2 * m.group});
  if (may_be_long_table(w) && pick(0, 1)) use_long_table(w);
}

void allocate_codes(Matrix& w, const Packing& packing) {
  const lancebill_matrix& m = w.abi;
  const size_t blocks = size_t(w.experts) * packing.blocks;
  const bool floats = m.codes == LANCEBILL_FLOAT8;
  w.codes.resize(blocks * packing.columns * (packing.nibbles ? 8 : m.codes == LANCEBILL_BITS6 ? 12 : 16));
  for (uint8_t& byte : w.codes) byte = static_cast<uint8_t>(floats ? 0x11 : pick(0, 255));  // padding may hold anything
  w.scales.resize(blocks * packing.groups * 16 * kBytesOfScale[m.scale]);
  w.zeros.resize(blocks * packing.groups * 16 * kBytesOfZero[m.zero]);
  if (m.factor == 0) return;
  const size_t shared = groups_of_factor(m), records = (packing.groups + shared - 1) / shared;
  w.scales.resize(blocks * records * record_bytes(m));
  if (m.zero == LANCEBILL_ZERO_OFFSET_I8) w.zeros.resize(blocks * records * record_bytes(m));
}

// Chooses which of the optional arrays there are. `row_factor` brings the results for normal inputs near one.
void allocate_options(Matrix& w, const Packing& packing, double row_factor) {
  lancebill_matrix& m = w.abi;
  const size_t blocks = size_t(w.experts) * packing.blocks;
  if (pick(0, 1) || row_factor < 0.5 || row_factor > 2) w.row_scale.resize(blocks * 16);
  if (pick(0, 1)) w.bias.resize(blocks * 16);
  const bool may_permute = m.input != LANCEBILL_INPUT_INT8 || m.input_group == 0;
  if (pick(0, 3) == 0 && may_permute) w.perm.resize(size_t(w.experts) * w.columns);
  if (pick(0, 3) == 0) w.pre_scale.resize(size_t(w.experts) * w.columns);
  if (pick(0, 3) == 0 && m.input >= LANCEBILL_INPUT_INT8) w.input_scale.resize(w.experts);
  const int divisor = w.columns & -w.columns;  // the largest power of two
  if (pick(0, 3) == 0 && divisor > 1) m.rotation = std::min(divisor, one_of({2, 32, 128}));
  w.dense.resize(size_t(w.experts) * w.rows * w.columns);
}

// Fills the column order and the input scales of an expert, and returns the order.
std::vector<int> fill_inputs(Matrix& w, int expert) {
  const size_t first = size_t(expert) * w.columns;
  std::vector<int> order(w.columns);
  for (int k = 0; k < w.columns; k++) order[k] = k;
  if (!w.perm.empty()) std::shuffle(order.begin(), order.end(), random_bits);
  for (int k = 0; k < w.columns && !w.perm.empty(); k++) w.perm[first + k] = order[k];
  for (int k = 0; k < w.columns && !w.pre_scale.empty(); k++) {
    w.pre_scale[first + k] = static_cast<float>(std::exp(normal() * 0.2));
  }
  if (!w.input_scale.empty()) {
    w.input_scale[expert] = static_cast<float>(w.abi.input == LANCEBILL_INPUT_INT8 ? 0.02 : 0.005);
  }
  return order;
}

// Six bits of a byte, or of the fourth unit two of each of three.
void store_six_bits(uint8_t* bytes, int lane, int k, int code) {
  uint8_t* first = bytes + k / 16 * 192 + lane * 4 + k % 4;
  const int unit = k % 16 / 4;
  if (unit < 3) first[64 * unit] = static_cast<uint8_t>((first[64 * unit] & 0xc0) | code);
  for (int i = 0; i < 3 && unit == 3; i++) {
    first[64 * i] = static_cast<uint8_t>((first[64 * i] & 0x3f) | (code >> (2 * i) & 3) << 6);
  }
}

void store_code(Matrix& w, const Packing& packing, size_t block, int lane, int k, int code) {
  uint8_t* bytes = w.codes.data() + (packing.nibbles ? block / 2 : block) * packing.columns * 16;
  if (packing.nibbles) {
    uint8_t& byte = bytes[k / 4 * 64 + lane * 4 + k % 4];
    byte = static_cast<uint8_t>(block % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
  } else if (w.abi.codes == LANCEBILL_BITS6) {
    store_six_bits(w.codes.data() + block * packing.columns * 12, lane, k, code);
  } else if (w.abi.codes == LANCEBILL_BYTE) {
    bytes[k / 4 * 64 + lane * 4 + k % 4] = static_cast<uint8_t>(code);
  } else {
    bytes[k / 4 * 64 + k % 4 * 16 + lane] = static_cast<uint8_t>(code);
  }
}

void fill_row(Matrix& w, const Packing& packing, int expert, int n, const std::vector<int>& order, double row_factor) {
  const lancebill_matrix& m = w.abi;
  const int packed = packed_row(n, w.rows, packing.gated), lane = packed % 16;
  const size_t first_block = size_t(expert) * packing.blocks, block = first_block + packed / 16;
  const size_t row = first_block * 16 + packed;
  double row_scale = 1;
  if (!w.row_scale.empty()) row_scale = w.row_scale[row] = static_cast<float>(std::exp(normal() * 0.3) * row_factor);
  if (!w.bias.empty()) w.bias[row] = static_cast<float>(normal());
  for (int g = 0; g < packing.groups; g++) {
    const size_t index = (block * packing.groups + g) * 16 + lane;
    const auto i8 = [&](double size, std::vector<uint8_t>& bytes) {
      return random_i8(m, packing.groups, block, g, lane, size, bytes);
    };
    const double scale = m.scale == LANCEBILL_SCALE_I8 ? i8(0.02, w.scales) : random_scale(m.scale, w.scales, index);
    int zero = 0;
    double offset = 0;
    if (m.zero == LANCEBILL_ZERO_U8) {
      const int most = packing.nibbles ? 16 : m.codes == LANCEBILL_BITS6 ? 64 : 255;
      zero = w.zeros[index] = static_cast<uint8_t>(pick(0, most));
    }
    if (m.zero == LANCEBILL_ZERO_OFFSET_F32) {
      const float exact = static_cast<float>(normal() * kOffsets);
      store_at(w.zeros, index, exact);
      offset = exact;
    }
    if (m.zero == LANCEBILL_ZERO_OFFSET_I8) offset = i8(kOffsets, w.zeros);
    for (int k = g * m.group; k < std::min((g + 1) * m.group, w.columns); k++) {
      const int code = random_code(m);
      store_code(w, packing, block, lane, k, code);
      const double value = row_scale * (scale * code_value(m, code, zero) - offset);
      w.dense[(size_t(expert) * w.rows + n) * w.columns + order[k]] = value;
    }
  }
}

void make_matrix(Matrix& w, int experts, int rows, int columns, bool gated) {
  lancebill_matrix& m = w.abi;
  w.experts = experts, w.rows = m.rows = rows, w.columns = m.columns = columns;
  choose_kinds(w);
  const Packing packing = packing_of(m, gated);
  allocate_codes(w, packing);
  const double row_factor = 1 / (std::sqrt(columns) * typical_weight(m));
  allocate_options(w, packing, row_factor);
  for (int e = 0; e < experts; e++) {
    const std::vector<int> order = fill_inputs(w, e);
    for (int n = 0; n < rows; n++) fill_row(w, packing, e, n, order, row_factor);
  }
  const auto data = [](auto& v) { return v.empty() ? nullptr : v.data(); };
  m.code_bytes = w.codes.data(), m.scale_bytes = data(w.scales), m.zero_bytes = data(w.zeros);
  m.row_scale = data(w.row_scale), m.bias = data(w.bias), m.perm = data(w.perm);
  m.pre_scale = data(w.pre_scale), m.input_scale = data(w.input_scale);
}

}  // namespace
