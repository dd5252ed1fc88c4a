// Every level against a naive loop in double, over codes x groups x scales x zeros x inputs x sizes x dispatches.
//
//   driver [seed] [cases]      random cases on every level that is here
//   driver time THREADS [FORMAT ...]  a decode and a prefill step, against the rate memory streams at
//
// Weights are packed here by the words of lancebill.h and read back only by the kernels.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "lancebill.h"
#include "plan.h"

using namespace lancebill;

namespace {

std::mt19937 random_bits;
int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }
double normal() { return std::normal_distribution<double>()(random_bits); }
template <class T>
T one_of(std::initializer_list<T> list) { return list.begin()[pick(0, static_cast<int>(list.size()) - 1)]; }

// Nearest number of `bits` significant bits, half to even, subnormal below 2^lowest.
double rounded(double x, int bits, int lowest) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const double quantum = std::ldexp(1.0, std::max(exponent - 1, lowest) - (bits - 1));
  return std::nearbyint(x / quantum) * quantum;
}
double bf16(double x) { return rounded(x, 8, -126); }
double f16(double x) { return rounded(x, 11, -14); }
double e4m3(double x) { return std::max(-448.0, std::min(448.0, rounded(x, 4, -6))); }

uint16_t bf16_bits(double x) {
  const float f = static_cast<float>(bf16(x));
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>(u >> 16);
}
uint16_t f16_bits(double x) {
  const double r = f16(x), size = std::fabs(r);
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (size < 0x1p-14) return static_cast<uint16_t>(sign | static_cast<int>(size * 0x1p24));
  int exponent;
  const double mantissa = std::frexp(size, &exponent);
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | (static_cast<int>(mantissa * 2048) - 1024));
}
double minifloat(int code, int mantissa) {
  const int bias = (1 << (6 - mantissa)) - 1, exponent = (code & 127) >> mantissa, rest = code & ((1 << mantissa) - 1);
  const double size = exponent ? std::ldexp(1 + std::ldexp(rest, -mantissa), exponent - bias)
                               : std::ldexp(rest, 1 - bias - mantissa);
  return code & 128 ? -size : size;
}
double round_up_to(double x, double multiple) { return std::ceil(x / multiple) * multiple; }

// One matrix of every expert: the packed form, and in double what it means.
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
void append(std::vector<uint8_t>& bytes, size_t place, T value) { std::memcpy(bytes.data() + place * sizeof(T), &value, sizeof(T)); }

double random_scale(int kind, std::vector<uint8_t>& bytes, size_t place) {
  const double wanted = std::exp(normal() * 0.4) * 0.02;
  const float exact = static_cast<float>(wanted);
  switch (kind) {
    case LANCEBILL_SCALE_BF16: append(bytes, place, bf16_bits(wanted)); return bf16(wanted);
    case LANCEBILL_SCALE_F16: append(bytes, place, f16_bits(wanted)); return f16(wanted);
    case LANCEBILL_SCALE_F32: append(bytes, place, exact); return exact;
    case LANCEBILL_SCALE_E8M0: bytes[place] = static_cast<uint8_t>(pick(118, 123)); return std::ldexp(1.0, bytes[place] - 127);
    case LANCEBILL_SCALE_E4M3: bytes[place] = static_cast<uint8_t>(pick(0, 120)); return minifloat(bytes[place], 3);
    default: return 1;
  }
}
constexpr double kOffsets = 0.1;
constexpr int kBytesOfScale[] = {0, 2, 2, 4, 1, 1};

void choose_codes(Matrix& w) {
  lancebill_matrix& m = w.abi;
  static const double nf4[] = {-1.0, -0.6962, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0,
                               0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0};
  static const int e2m1[] = {0, 1, 2, 3, 4, 6, 8, 12};
  m.codes = one_of({LANCEBILL_TABLE4, LANCEBILL_TABLE4, LANCEBILL_BYTE, LANCEBILL_FLOAT8});
  m.step = 1;
  if (m.codes == LANCEBILL_FLOAT8) {
    m.mantissa = pick(2, 4);
    m.step = one_of({1.0f, 0.5f});
    w.name = "float8 m" + std::to_string(m.mantissa);
  } else if (m.codes == LANCEBILL_BYTE) {
    m.center = one_of({128, 100});
    w.name = "byte";
  } else if (const int kind = pick(0, 2); kind == 0) {
    m.center = 8;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<uint16_t>(i);
    w.name = "int4";
  } else if (kind == 1) {
    m.center = 12;
    m.step = 0.5f;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<uint16_t>(12 + (i < 8 ? e2m1[i] : -e2m1[i - 8]));
    w.name = "e2m1";
  } else {
    m.center = 8191;
    m.step = 1.0f / 8191;
    for (int i = 0; i < 16; i++) m.table[i] = static_cast<uint16_t>(8191 + std::lround(nf4[i] * 8191));
    w.name = "nf4";
  }
  m.zero = m.codes == LANCEBILL_FLOAT8 ? one_of({LANCEBILL_ZERO_NONE, LANCEBILL_ZERO_OFFSET_F32})
                                     : one_of({LANCEBILL_ZERO_NONE, LANCEBILL_ZERO_NONE, LANCEBILL_ZERO_U8, LANCEBILL_ZERO_OFFSET_F32});
}

double code_value(const lancebill_matrix& m, int code, int zero) {
  if (m.codes == LANCEBILL_FLOAT8) return m.step * minifloat(code, m.mantissa);
  const int number = m.codes == LANCEBILL_TABLE4 ? m.table[code] : code;
  return static_cast<double>(m.step) * (number - (m.zero == LANCEBILL_ZERO_U8 ? zero : m.center));
}

int random_code(const lancebill_matrix& m) {
  if (m.codes == LANCEBILL_TABLE4) return pick(0, 15);
  if (m.codes == LANCEBILL_BYTE) return pick(0, 255);
  const int top = m.mantissa == 2 ? 0x7b : m.mantissa == 3 ? 0x7e : 0x7f;  // no NaN, no infinity
  return pick(0, top) | (pick(0, 1) << 7);
}

double typical_weight(const lancebill_matrix& m) {
  const double scales[] = {1, 0.02, 0.02, 0.02, 0.01, 60};
  double squares = 0;
  for (int i = 0; i < 256; i++) squares += std::pow(code_value(m, random_code(m), m.codes == LANCEBILL_BYTE ? 128 : 8), 2);
  return std::sqrt(squares / 256) * scales[m.scale] + (m.zero == LANCEBILL_ZERO_OFFSET_F32 ? kOffsets : 0);
}

// Where a natural row lies among the packed ones.
int packed_row(int row, int rows, bool gated) {
  if (!gated) return row;
  const int half = rows / 2, in_half = row % half;
  return (in_half / 16 * 2 + row / half) * 16 + in_half % 16;
}

void make_matrix(Matrix& w, int experts, int rows, int columns, bool gated) {
  lancebill_matrix& m = w.abi;
  w.experts = experts, w.rows = m.rows = rows, w.columns = m.columns = columns;
  choose_codes(w);
  m.group = one_of({16, 32, 64, 128});
  m.scale = one_of({LANCEBILL_SCALE_NONE, LANCEBILL_SCALE_BF16, LANCEBILL_SCALE_F16, LANCEBILL_SCALE_F32, LANCEBILL_SCALE_E8M0, LANCEBILL_SCALE_E4M3});
  m.input = one_of({LANCEBILL_INPUT_BF16, LANCEBILL_INPUT_BF16, LANCEBILL_INPUT_F16, LANCEBILL_INPUT_F32, LANCEBILL_INPUT_INT8, LANCEBILL_INPUT_E4M3});
  m.input_group = one_of({0, 0, m.group, 2 * m.group});
  const int padded = static_cast<int>(round_up_to(columns, std::max(m.group, 32))), groups = padded / m.group;
  const bool nibbles = m.codes == LANCEBILL_TABLE4;
  const int packed_rows = static_cast<int>(gated ? 2 * round_up_to(rows / 2, 16) : round_up_to(rows, nibbles ? 32 : 16));
  const int blocks = packed_rows / 16;
  w.codes.resize(size_t(experts) * blocks * padded * (nibbles ? 8 : 16));
  for (uint8_t& byte : w.codes) byte = static_cast<uint8_t>(m.codes == LANCEBILL_FLOAT8 ? 0x11 : pick(0, 255));  // padding: anything
  w.scales.resize(size_t(experts) * blocks * groups * 16 * kBytesOfScale[m.scale]);
  w.zeros.resize(size_t(experts) * blocks * groups * 16 * (m.zero == LANCEBILL_ZERO_U8 ? 1 : m.zero ? 4 : 0));
  const double tame = 1 / (std::sqrt(columns) * typical_weight(m));  // brings products of normal inputs near one
  if (pick(0, 1) || tame < 0.5 || tame > 2) w.row_scale.resize(size_t(experts) * blocks * 16);
  if (pick(0, 1)) w.bias.resize(size_t(experts) * blocks * 16);
  const bool may_permute = m.input != LANCEBILL_INPUT_INT8 || m.input_group == 0;
  if (pick(0, 3) == 0 && may_permute) w.perm.resize(size_t(experts) * columns);
  if (pick(0, 3) == 0) w.pre_scale.resize(size_t(experts) * columns);
  if (pick(0, 3) == 0 && m.input >= LANCEBILL_INPUT_INT8) w.input_scale.resize(experts);
  w.dense.resize(size_t(experts) * rows * columns);
  for (int e = 0; e < experts; e++) {
    std::vector<int> order(columns);
    for (int k = 0; k < columns; k++) order[k] = k;
    if (!w.perm.empty()) std::shuffle(order.begin(), order.end(), random_bits);
    for (int k = 0; k < columns && !w.perm.empty(); k++) w.perm[size_t(e) * columns + k] = order[k];
    for (int k = 0; k < columns && !w.pre_scale.empty(); k++) w.pre_scale[size_t(e) * columns + k] = static_cast<float>(std::exp(normal() * 0.2));
    if (!w.input_scale.empty()) w.input_scale[e] = static_cast<float>(m.input == LANCEBILL_INPUT_INT8 ? 0.02 : 0.005);
    for (int n = 0; n < rows; n++) {
      const int place = packed_row(n, rows, gated), lane = place % 16;
      const size_t block = size_t(e) * blocks + place / 16, row = size_t(e) * blocks * 16 + place;
      const double outer = w.row_scale.empty() ? 1 : (w.row_scale[row] = static_cast<float>(std::exp(normal() * 0.3) * tame));
      if (!w.bias.empty()) w.bias[row] = static_cast<float>(normal());
      for (int g = 0; g < groups; g++) {
        const size_t at = (block * groups + g) * 16 + lane;
        const double scale = random_scale(m.scale, w.scales, at);
        int zero = 0;
        double offset = 0;
        if (m.zero == LANCEBILL_ZERO_U8) zero = w.zeros[at] = static_cast<uint8_t>(nibbles ? pick(0, 16) : pick(0, 255));
        if (m.zero == LANCEBILL_ZERO_OFFSET_F32) append(w.zeros, at, static_cast<float>(offset = static_cast<float>(normal() * kOffsets)));
        for (int k = g * m.group; k < std::min((g + 1) * m.group, columns); k++) {
          const int code = random_code(m);
          uint8_t* bytes = w.codes.data() + (nibbles ? block / 2 : block) * padded * 16;
          if (nibbles) {
            uint8_t& byte = bytes[k / 4 * 64 + lane * 4 + k % 4];
            byte = static_cast<uint8_t>(place / 16 % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
          } else if (m.codes == LANCEBILL_BYTE) {
            bytes[k / 4 * 64 + lane * 4 + k % 4] = static_cast<uint8_t>(code);
          } else {
            bytes[k / 4 * 64 + k % 4 * 16 + lane] = static_cast<uint8_t>(code);
          }
          w.dense[(size_t(e) * rows + n) * columns + order[k]] = outer * (scale * code_value(m, code, zero) - offset);
        }
      }
    }
  }
  const auto data = [](auto& v) { return v.empty() ? nullptr : v.data(); };
  m.code_bytes = w.codes.data(), m.scale_bytes = data(w.scales), m.zero_bytes = data(w.zeros);
  m.row_scale = data(w.row_scale), m.bias = data(w.bias), m.perm = data(w.perm);
  m.pre_scale = data(w.pre_scale), m.input_scale = data(w.input_scale);
}

// The rules of lancebill.numbers.activations.
std::vector<double> represented(const Matrix& w, int expert, std::vector<double> x) {
  const lancebill_matrix& m = w.abi;
  for (int k = 0; k < w.columns && !w.pre_scale.empty(); k++) x[k] = static_cast<float>(x[k]) * w.pre_scale[size_t(expert) * w.columns + k];
  for (double& v : x) v = m.input == LANCEBILL_INPUT_BF16 ? bf16(v) : m.input == LANCEBILL_INPUT_F16 ? f16(v) : static_cast<float>(v);
  if (m.input < LANCEBILL_INPUT_INT8) return x;
  const bool integers = m.input == LANCEBILL_INPUT_INT8, fixed = !w.input_scale.empty();
  const int block = m.input_group && !fixed ? m.input_group : w.columns;
  for (int first = 0; first < w.columns; first += block) {
    const int end = std::min(first + block, w.columns);
    double peak = 0;
    for (int k = first; k < end; k++) peak = std::max(peak, std::fabs(x[k]));
    const float scale = fixed ? w.input_scale[expert] : peak == 0 ? 1.0f : static_cast<float>(peak / (integers ? 127 : 448));
    for (int k = first; k < end; k++) {
      const double q = static_cast<float>(x[k]) / scale;
      x[k] = scale * (integers ? std::nearbyint(std::max(-128.0, std::min(127.0, q))) : e4m3(q));
    }
  }
  return x;
}

std::vector<double> times(const Matrix& w, int expert, bool gated, const std::vector<double>& x) {
  std::vector<double> y(w.rows);
  const size_t packed_rows = w.bias.size() / std::max(w.experts, 1);
  for (int n = 0; n < w.rows; n++) {
    const double* row = w.dense.data() + (size_t(expert) * w.rows + n) * w.columns;
    for (int k = 0; k < w.columns; k++) y[n] += row[k] * x[k];
    if (!w.bias.empty()) y[n] += w.bias[expert * packed_rows + packed_row(n, w.rows, gated)];
  }
  return y;
}

double activated(const lancebill_layer& a, double g, double u) {
  const double limit = a.limit > 0 ? a.limit : INFINITY, clamped = std::max(-limit, std::min(limit, u));
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto gelu = [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); };
  const auto gelu_tanh = [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); };
  switch (a.activation) {
    case LANCEBILL_SILU: g = std::min(g, limit); return g * sigmoid(g) * clamped;
    case LANCEBILL_GELU: return gelu(g) * u;
    case LANCEBILL_GELU_TANH: return gelu_tanh(g) * u;
    case LANCEBILL_SWIGLUOAI: g = std::min(g, limit); return g * sigmoid(a.alpha * g) * (clamped + a.beta);
    case LANCEBILL_SWIGLUSTEP: return std::min(g * sigmoid(g), limit) * clamped;
    case LANCEBILL_SITU: return a.beta * std::tanh(g / a.beta) * sigmoid(g) * (a.limit > 0 ? limit * std::tanh(u / limit) : u);
    case LANCEBILL_RELU2_NO_MUL: return g > 0 ? g * g : 0;
    case LANCEBILL_SILU_NO_MUL: return g * sigmoid(g);
    case LANCEBILL_GELU_NO_MUL: return gelu(g);
    default: return gelu_tanh(g);
  }
}

struct Case {
  lancebill_layer layer = {};
  lancebill_work work = {};
  Matrix w13, w2;
  bool gated = false, linear = false;
  int out_columns = 0;
  std::vector<double> x;
  std::vector<uint8_t> x_bytes;
  std::vector<float> weights;
  std::vector<int32_t> ids;
  std::vector<int64_t> offsets, rows;
  std::vector<double> want;  // [row][column]
};

std::vector<double> expert_row(const Case& c, int expert, const std::vector<double>& x) {
  std::vector<double> y = times(c.w13, expert, c.gated, represented(c.w13, expert, x));
  if (c.linear) return y;
  const int width = c.w2.columns;
  std::vector<double> h(width);
  for (int i = 0; i < width; i++) h[i] = activated(c.layer, y[i], c.gated ? y[width + i] : 0);
  return times(c.w2, expert, false, represented(c.w2, expert, h));
}

void make_inputs(Case& c, int rows) {
  const int columns = c.w13.columns;
  c.work.x_type = one_of({LANCEBILL_BF16, LANCEBILL_F16, LANCEBILL_F32});
  c.work.x_stride = columns;
  c.x.resize(size_t(rows) * columns);
  c.x_bytes.resize(c.x.size() * (c.work.x_type == LANCEBILL_F32 ? 4 : 2));
  for (size_t i = 0; i < c.x.size(); i++) {
    const double v = normal() * (pick(0, 50) == 0 ? 8 : 1);
    if (c.work.x_type == LANCEBILL_BF16) append(c.x_bytes, i, bf16_bits(c.x[i] = bf16(v)));
    if (c.work.x_type == LANCEBILL_F16) append(c.x_bytes, i, f16_bits(c.x[i] = f16(v)));
    if (c.work.x_type == LANCEBILL_F32) append(c.x_bytes, i, static_cast<float>(c.x[i] = static_cast<float>(v)));
  }
  c.work.x = c.x_bytes.data();
}

std::vector<double> row_of(const Case& c, int64_t row, double factor = 1) {
  std::vector<double> x(c.x.begin() + row * c.w13.columns, c.x.begin() + (row + 1) * c.w13.columns);
  for (double& v : x) v = static_cast<float>(v * factor);
  return x;
}

void add_indexed(Case& c, int tokens) {
  const int experts = c.layer.experts, top_k = c.work.top_k = pick(1, std::min(3, experts));
  make_inputs(c, tokens);
  c.work.tokens = tokens;
  c.work.weight_on_input = top_k == 1 && pick(0, 1);
  c.want.assign(size_t(tokens) * c.out_columns, 0);
  for (int t = 0; t < tokens; t++) {
    const int first = pick(0, experts - 1);
    for (int j = 0; j < top_k; j++) {
      const int expert = pick(0, 7) == 0 ? -1 : (first + j) % experts;
      c.ids.push_back(expert);
      c.weights.push_back(static_cast<float>(std::fabs(normal()) * 0.5 + 0.1));
      if (expert < 0) continue;
      const double weight = c.weights.back();
      const auto y = expert_row(c, expert, row_of(c, t, c.work.weight_on_input ? weight : 1));
      for (int n = 0; n < c.out_columns; n++) c.want[size_t(t) * c.out_columns + n] += (c.work.weight_on_input ? 1 : weight) * y[n];
    }
  }
  c.work.ids = c.ids.data();
  c.work.weights = c.weights.data();
}

void add_grouped(Case& c, int tokens) {
  make_inputs(c, tokens);
  c.rows.resize(tokens);
  for (int i = 0; i < tokens; i++) c.rows[i] = tokens - 1 - i;
  c.want.resize(size_t(tokens) * c.out_columns);
  c.offsets.push_back(0);
  for (int e = 0; e < c.layer.experts; e++) {
    const int64_t low = c.offsets.back(), high = e + 1 == c.layer.experts ? tokens : pick(static_cast<int>(low), tokens);
    for (int64_t s = low; s < high; s++) {
      const auto y = expert_row(c, e, row_of(c, c.rows[s]));
      std::copy(y.begin(), y.end(), c.want.begin() + c.rows[s] * c.out_columns);
    }
    c.offsets.push_back(high);
  }
  c.work.offsets = c.offsets.data();
  c.work.rows = c.rows.data();
}

void make_case(Case& c) {
  c.layer.experts = pick(1, 4);
  c.linear = pick(0, 4) == 0;
  c.layer.activation = pick(0, 2) ? pick(LANCEBILL_SILU, LANCEBILL_SITU) : pick(LANCEBILL_RELU2_NO_MUL, LANCEBILL_GELU_TANH_NO_MUL);
  c.gated = !c.linear && c.layer.activation <= LANCEBILL_SITU;
  const bool needs = c.layer.activation == LANCEBILL_SWIGLUOAI || c.layer.activation == LANCEBILL_SWIGLUSTEP;
  c.layer.limit = needs || pick(0, 1) ? 3.0f : 0.0f;
  c.layer.alpha = 1.702f, c.layer.beta = 1.25f;
  const int hidden = pick(0, 1) ? 16 * pick(1, 20) : pick(1, 200), width = pick(0, 1) ? 16 * pick(1, 12) : pick(1, 100);
  make_matrix(c.w13, c.layer.experts, c.gated ? 2 * width : width, hidden, c.gated);
  c.out_columns = c.linear ? width : hidden;
  if (!c.linear) make_matrix(c.w2, c.layer.experts, hidden, width, false);
  c.layer.w13 = &c.w13.abi;
  c.layer.w2 = c.linear ? nullptr : &c.w2.abi;
  const int tokens = pick(0, 3) ? pick(1, 8) : pick(9, 70);
  c.work.threads = pick(1, 3);
  c.work.tile_rows = one_of({0, 1, 20});
  pick(0, 2) ? add_indexed(c, tokens) : add_grouped(c, tokens);
}

// A level straight from its function: this is how emulated ones run, which the machine says it does not have.
int32_t run_level(const Level& level, const Case& c, std::vector<float>& out) {
  lancebill_work work = c.work;
  out.assign(c.want.size(), NAN);
  work.out = out.data();
  work.out_type = LANCEBILL_F32;
  work.out_stride = c.out_columns;
  Call call;
  if (const int32_t status = plan(&c.layer, &work, level.tiles, call)) return status;
  std::vector<uint8_t> memory(lay_out(call, nullptr) + kUnit, 0xff);  // NaN everywhere: nothing may count on zeros
  uint8_t* aligned = memory.data() + (kUnit - reinterpret_cast<uintptr_t>(memory.data()) % kUnit) % kUnit;
  lay_out(call, aligned);
  if (const int32_t status = sort_slots(call)) return status;
  level.run(call);
  return LANCEBILL_OK;
}

// The error of the worst row, relative to the row; rows that cancel out are measured against a typical one.
double worst_row(const Case& c, const std::vector<float>& out) {
  double worst = 0, typical = 0;
  for (double v : c.want) typical += v * v;
  typical = std::sqrt(typical / std::max<size_t>(c.want.size(), 1) * c.out_columns);
  for (size_t row = 0; row * c.out_columns < c.want.size(); row++) {
    double error = 0, norm = 0;
    for (int n = 0; n < c.out_columns; n++) {
      const size_t i = row * c.out_columns + n;
      error += std::pow(out[i] - c.want[i], 2), norm += c.want[i] * c.want[i];
    }
    const double relative = std::sqrt(error) / std::max({std::sqrt(norm), 0.3 * typical, 1e-20});
    worst = std::isfinite(relative) ? std::max(worst, relative) : INFINITY;
  }
  return worst;
}

// What a level may be off by: 16-bit inputs by their 16 bits; where h is rounded in between, a rounding that falls the
// other way shows; tiles round the weights to bf16.
double bound(const Case& c, bool tiles) {
  const double rounding[] = {8e-3, 2e-3, 8e-4, 2e-2, 6e-2};  // by input kind, of the second product
  const double base = c.linear ? 8e-4 : rounding[c.w2.abi.input];
  return tiles ? base + 2e-2 : base;
}

struct Tried {
  const Level* level;
  bool usable;
};

std::vector<Tried> levels_here() {
  using Getter = const Level* (*)();
  const Getter getters[] = {level_portable,   level_neon,   level_avx2, level_avxvnni,
                            level_avx512vnni, level_avx512, level_amx};
  std::vector<Tried> found;
  for (int i = 0; i < LANCEBILL_LEVELS; i++) {
    if (getters[i] == nullptr) continue;
#ifdef LANCEBILL_EMULATED
    const bool usable = true;
#else
    const bool usable = lancebill_levels() >> i & 1;
#endif
    found.push_back({getters[i](), usable});
  }
  return found;
}

std::string describe_case(const Case& c) {
  char text[400];
  const lancebill_matrix &a = c.w13.abi, &b = c.linear ? c.w13.abi : c.w2.abi;
  std::snprintf(text, sizeof text,
                "%s%s %dx%d g%d scale %d zero %d input %d/%d perm %d pre %d static %d | %s %dx%d g%d scale %d zero %d input %d/%d perm %d pre %d static %d | "
                "act %d rows %zu %s",
                c.linear ? "linear " : "", c.w13.name.c_str(), a.rows, a.columns, a.group, a.scale, a.zero, a.input, a.input_group,
                !!a.perm, !!a.pre_scale, !!a.input_scale, c.w2.name.c_str(), b.rows, b.columns, b.group, b.scale, b.zero, b.input,
                b.input_group, !!b.perm, !!b.pre_scale, !!b.input_scale, c.layer.activation, c.want.size() / c.out_columns,
                c.work.ids ? "indexed" : "grouped");
  return text;
}

int check(unsigned seed, int cases) {
  int failures = 0;
  std::vector<double> worst(LANCEBILL_LEVELS);
  const auto levels = levels_here();
  for (int i = 0; i < cases; i++) {
    random_bits.seed(seed + i);
    Case c;
    make_case(c);
    for (size_t l = 0; l < levels.size(); l++) {
      if (!levels[l].usable) continue;
      std::vector<float> out, again;
      const int32_t status = run_level(*levels[l].level, c, out);
      Case other = c;
      other.work.threads = 4 - c.work.threads;
      run_level(*levels[l].level, other, again);
      const bool same = out.size() == again.size() && std::memcmp(out.data(), again.data(), out.size() * 4) == 0;
      const double error = worst_row(c, out), limit = bound(c, levels[l].level->tiles);
      worst[l] = std::max(worst[l], error / limit);
      if (status != LANCEBILL_OK || !same || !(error <= limit)) {
        std::printf("FAILED %s seed %u: status %d, error %.3g (limit %.3g)%s: %s\n", levels[l].level->name, seed + i, status,
                    error, limit, same ? "" : ", bits depend on threads", describe_case(c).c_str());
        failures++;
      }
    }
  }
  for (size_t l = 0; l < levels.size(); l++) {
    std::printf("%-9s %s", levels[l].level->name, levels[l].usable ? "" : "not on this machine\n");
    if (levels[l].usable) std::printf("%d cases, worst error at %.0f %% of its bound\n", cases, 100 * worst[l]);
  }
  return failures;
}

// ---- time: a layer of 128 experts, top-8, hidden 2048, intermediate 768, caches emptied before every call

struct Timed {
  lancebill_layer layer = {};
  lancebill_matrix w13 = {}, w2 = {};
  std::vector<uint8_t> bytes[6];
  int64_t expert_bytes = 0;
};

void make_timed(Timed& t, const char* format, int experts, int hidden, int width) {
  const std::string name = format;
  lancebill_matrix m = {};
  m.step = 1, m.center = 8, m.group = 32, m.scale = LANCEBILL_SCALE_BF16, m.input = LANCEBILL_INPUT_BF16;
  for (int i = 0; i < 16; i++) m.table[i] = static_cast<uint16_t>(i);
  if (name == "int4-g128") m.group = 128;
  if (name == "int4-a8") m.input = LANCEBILL_INPUT_INT8, m.input_group = 32;
  if (name == "int4-zp") m.zero = LANCEBILL_ZERO_U8;
  if (name == "mxfp4") m.scale = LANCEBILL_SCALE_E8M0;
  if (name == "nvfp4") m.scale = LANCEBILL_SCALE_E4M3, m.group = 16;
  if (name == "nf4") m.table[15] = 16000, m.center = 8000;
  if (name == "int8") m.codes = LANCEBILL_BYTE, m.center = 128, m.group = 128;
  if (name == "fp8") m.codes = LANCEBILL_FLOAT8, m.mantissa = 3, m.group = 128;
  t.w13 = t.w2 = m;
  t.w13.rows = 2 * width, t.w13.columns = hidden, t.w2.rows = hidden, t.w2.columns = width;
  int i = 0;
  for (lancebill_matrix* w : {&t.w13, &t.w2}) {
    int64_t sizes[3];
    lancebill_packed_bytes(w, 0, sizes);
    for (int64_t size : sizes) {
      std::vector<uint8_t>& bytes = t.bytes[i++];
      bytes.resize(size * experts);
      lancebill_huge_pages(bytes.data(), static_cast<int64_t>(bytes.size()));
      static std::vector<uint8_t> noise;
      for (; noise.size() < 1 << 20; noise.push_back(static_cast<uint8_t>(random_bits()))) {}
      for (size_t k = 0; k < bytes.size(); k += noise.size()) {
        std::memcpy(bytes.data() + k, noise.data(), std::min(noise.size(), bytes.size() - k));
      }
      t.expert_bytes += size;
    }
    for (size_t k = 0; k < t.bytes[i - 2].size(); k++) {  // scales near 2^-6, whatever their type
      const bool two = m.scale == LANCEBILL_SCALE_BF16;
      t.bytes[i - 2][k] = two ? (k % 2 ? 0x3c : 0x80) : m.scale == LANCEBILL_SCALE_E8M0 ? 121 : 0x08;
    }
    w->code_bytes = t.bytes[i - 3].data(), w->scale_bytes = t.bytes[i - 2].data();
    w->zero_bytes = m.zero ? t.bytes[i - 1].data() : nullptr;
  }
  t.layer.experts = experts, t.layer.activation = LANCEBILL_SILU, t.layer.w13 = &t.w13, t.layer.w2 = &t.w2;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void time_format(const char* format, int threads, std::vector<uint8_t>& big) {
  constexpr int kHidden = 2048, kWidth = 768, kExperts = 128, kTop = 8;
  Timed t;
  make_timed(t, format, kExperts, kHidden, kWidth);
  std::vector<uint16_t> x(512 * kHidden), out(x.size());
  for (uint16_t& v : x) v = bf16_bits(normal());
  for (int tokens : {1, 16, 512}) {
    std::vector<int32_t> ids(tokens * kTop);
    std::vector<char> seen(kExperts);
    int experts = 0;
    for (int i = 0; i < tokens; i++) {
      std::vector<int> order(kExperts);
      for (int e = 0; e < kExperts; e++) order[e] = e;
      std::shuffle(order.begin(), order.end(), random_bits);
      for (int j = 0; j < kTop; j++) {
        ids[i * kTop + j] = order[j];
        experts += !seen[order[j]];
        seen[order[j]] = 1;
      }
    }
    for (int level = LANCEBILL_NEON; level < LANCEBILL_LEVELS; level++) {
      const bool slow = level == LANCEBILL_AVX2 || level == LANCEBILL_AVXVNNI;
      if (!(lancebill_levels() >> level & 1) || (tokens == 512 && slow)) continue;
      if (tokens < 512 && level == LANCEBILL_AMX) continue;
      lancebill_work work = {};
      work.x = x.data(), work.out = out.data(), work.x_stride = work.out_stride = kHidden;
      work.tokens = tokens, work.top_k = kTop, work.ids = ids.data(), work.threads = threads, work.level = level;
      std::vector<uint8_t> scratch(lancebill_scratch_bytes(&t.layer, &work) + 64);
      work.scratch = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
      double best = 1e9;
      for (int i = 0; i < (tokens == 512 ? 2 : 4); i++) {
        lancebill_stream(big.data(), static_cast<int64_t>(big.size()), threads, 8);
        const double start = seconds();
        lancebill_run(&t.layer, &work);
        best = std::min(best, seconds() - start);
      }
      std::printf("%-9s threads %d tokens %3d %-8s %8.3f ms %6.1f GB/s %6.0f GFLOP/s\n", format, threads, tokens, lancebill_level_name(level),
                  best * 1e3, experts * static_cast<double>(t.expert_bytes) / best / 1e9, 6.0 * tokens * kTop * kHidden * kWidth / best / 1e9);
    }
  }
}

void time_all(int threads, const std::vector<std::string>& formats) {
  std::vector<uint8_t> big(400 << 20, 1);
  for (int i = 0; i < 3; i++) {
    const double start = seconds();
    lancebill_stream(big.data(), static_cast<int64_t>(big.size()), threads, 8);
    std::printf("stream    threads %d %6.1f GB/s\n", threads, static_cast<double>(big.size()) / (seconds() - start) / 1e9);
  }
  for (const std::string& format : formats) {
    time_format(format.c_str(), threads, big);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "time") == 0) {
    const std::vector<std::string> all = {"int4", "int4-g128", "int4-a8", "int4-zp", "mxfp4", "nvfp4", "nf4", "int8", "fp8"};
    time_all(std::atoi(argv[2]), argc > 3 ? std::vector<std::string>(argv + 3, argv + argc) : all);
    return 0;
  }
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  const int failures = check(seed, argc > 2 ? std::atoi(argv[2]) : 300);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
