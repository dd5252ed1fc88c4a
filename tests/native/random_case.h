// Random layers and batches with their expected results in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lancebill.h"
#include "numbers.h"
#include "random_matrix.h"

namespace {

// Rotated inputs, from the definition: a sum over the block with the signs of Sylvester's matrix.
std::vector<double> rotated(const std::vector<double>& x, int block) {
  std::vector<double> result(x.size());
  for (size_t k = 0; k < x.size(); k++) {
    const size_t low = k / block * block;
    for (int i = 0; i < block; i++) result[k] += __builtin_parityll((k - low) & i) ? -x[low + i] : x[low + i];
    result[k] /= std::sqrt(block);
  }
  return result;
}

// The input of a matrix after rounding or quantisation, by the rules of lancebill.numbers.activations.
std::vector<double> quantised_input(const Matrix& w, int expert, std::vector<double> x) {
  const lancebill_matrix& m = w.abi;
  for (int k = 0; k < w.columns && !w.pre_scale.empty(); k++) {
    x[k] = static_cast<float>(x[k]) * w.pre_scale[size_t(expert) * w.columns + k];
  }
  if (m.rotation != 0) x = rotated(x, m.rotation);
  for (double& v : x) {
    v = m.input == LANCEBILL_INPUT_BF16 ? bf16(v) : m.input == LANCEBILL_INPUT_F16 ? f16(v) : static_cast<float>(v);
  }
  if (m.input < LANCEBILL_INPUT_INT8) return x;
  const bool integers = m.input == LANCEBILL_INPUT_INT8, fixed = !w.input_scale.empty();
  const int block = m.input_group && !fixed ? m.input_group : w.columns;
  for (int first = 0; first < w.columns; first += block) {
    const int end = std::min(first + block, w.columns);
    double peak = 0;
    for (int k = first; k < end; k++) peak = std::max(peak, std::fabs(x[k]));
    const float dynamic = peak == 0 ? 1.0f : static_cast<float>(peak / (integers ? 127 : 448));
    const float scale = fixed ? w.input_scale[expert] : dynamic;
    for (int k = first; k < end; k++) {
      const double q = static_cast<float>(x[k]) / scale;
      x[k] = scale * (integers ? std::nearbyint(std::max(-128.0, std::min(127.0, q))) : e4m3(q));
    }
  }
  return x;
}

std::vector<double> multiply(const Matrix& w, int expert, bool gated, const std::vector<double>& x) {
  std::vector<double> y(w.rows);
  const size_t packed_rows = w.bias.size() / std::max(w.experts, 1);
  for (int n = 0; n < w.rows; n++) {
    const double* row = w.dense.data() + (size_t(expert) * w.rows + n) * w.columns;
    for (int k = 0; k < w.columns; k++) y[n] += row[k] * x[k];
    if (!w.bias.empty()) y[n] += w.bias[expert * packed_rows + packed_row(n, w.rows, gated)];
  }
  return y;
}

// Norm of the product if its terms were independent. Errors are in proportion to it, also where terms cancel.
double product_size(const Matrix& w, int expert, const std::vector<double>& x) {
  double squares = 0;
  for (int n = 0; n < w.rows; n++) {
    const double* row = w.dense.data() + (size_t(expert) * w.rows + n) * w.columns;
    for (int k = 0; k < w.columns; k++) squares += std::pow(row[k] * x[k], 2);
  }
  return std::sqrt(squares);
}

double activated(const lancebill_layer& a, double g, double u) {
  const double limit = a.limit > 0 ? a.limit : INFINITY, clamped = std::max(-limit, std::min(limit, u));
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto gelu = [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); };
  const auto gelu_tanh = [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  };
  switch (a.activation) {
    case LANCEBILL_SILU: g = std::min(g, limit); return g * sigmoid(g) * clamped;
    case LANCEBILL_GELU: return gelu(g) * u;
    case LANCEBILL_GELU_TANH: return gelu_tanh(g) * u;
    case LANCEBILL_SWIGLUOAI: g = std::min(g, limit); return g * sigmoid(a.alpha * g) * (clamped + a.beta);
    case LANCEBILL_SWIGLUSTEP: return std::min(g * sigmoid(g), limit) * clamped;
    case LANCEBILL_SITU:
      return a.beta * std::tanh(g / a.beta) * sigmoid(g) * (a.limit > 0 ? limit * std::tanh(u / limit) : u);
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
  std::vector<double> want;   // [row][column]
  std::vector<double> sizes;  // [row]: sums of `product_size`
};

struct ExpertRow {
  std::vector<double> values;
  double size;
};

ExpertRow expert_row(const Case& c, int expert, const std::vector<double>& x) {
  const std::vector<double> input = quantised_input(c.w13, expert, x);
  const std::vector<double> y = multiply(c.w13, expert, c.gated, input);
  if (c.linear) return {y, product_size(c.w13, expert, input)};
  const int width = c.w2.columns;
  std::vector<double> h(width);
  for (int i = 0; i < width; i++) h[i] = activated(c.layer, y[i], c.gated ? y[width + i] : 0);
  const std::vector<double> hidden = quantised_input(c.w2, expert, h);
  return {multiply(c.w2, expert, false, hidden), product_size(c.w2, expert, hidden)};
}

void make_inputs(Case& c, int rows) {
  const int columns = c.w13.columns;
  c.work.x_type = one_of({LANCEBILL_BF16, LANCEBILL_F16, LANCEBILL_F32});
  c.work.x_stride = columns;
  c.x.resize(size_t(rows) * columns);
  c.x_bytes.resize(c.x.size() * (c.work.x_type == LANCEBILL_F32 ? 4 : 2));
  for (size_t i = 0; i < c.x.size(); i++) {
    const double v = normal() * (pick(0, 50) == 0 ? 8 : 1);
    if (c.work.x_type == LANCEBILL_BF16) store_at(c.x_bytes, i, bf16_bits(c.x[i] = bf16(v)));
    if (c.work.x_type == LANCEBILL_F16) store_at(c.x_bytes, i, f16_bits(c.x[i] = f16(v)));
    if (c.work.x_type == LANCEBILL_F32) store_at(c.x_bytes, i, static_cast<float>(c.x[i] = static_cast<float>(v)));
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
  c.sizes.assign(tokens, 0);
  for (int t = 0; t < tokens; t++) {
    const int first = pick(0, experts - 1);
    for (int j = 0; j < top_k; j++) {
      const int expert = pick(0, 7) == 0 ? -1 : (first + j) % experts;
      c.ids.push_back(expert);
      c.weights.push_back(static_cast<float>(std::fabs(normal()) * 0.5 + 0.1));
      if (expert < 0) continue;
      const double weight = c.weights.back();
      const auto y = expert_row(c, expert, row_of(c, t, c.work.weight_on_input ? weight : 1));
      const double factor = c.work.weight_on_input ? 1 : weight;
      for (int n = 0; n < c.out_columns; n++) c.want[size_t(t) * c.out_columns + n] += factor * y.values[n];
      c.sizes[t] += factor * y.size;
    }
  }
  c.work.ids = c.ids.data();
  c.work.weights = c.weights.data();
  c.work.id_words = 1, c.work.weight_type = LANCEBILL_F32;
  c.work.id_row = c.work.weight_row = c.work.top_k, c.work.id_column = c.work.weight_column = 1;
}

void add_grouped(Case& c, int tokens) {
  make_inputs(c, tokens);
  c.rows.resize(tokens);
  for (int i = 0; i < tokens; i++) c.rows[i] = tokens - 1 - i;
  c.want.resize(size_t(tokens) * c.out_columns);
  c.sizes.resize(tokens);
  c.offsets.push_back(0);
  for (int e = 0; e < c.layer.experts; e++) {
    const int64_t low = c.offsets.back();
    const int64_t high = e + 1 == c.layer.experts ? tokens : pick(static_cast<int>(low), tokens);
    for (int64_t s = low; s < high; s++) {
      const auto y = expert_row(c, e, row_of(c, c.rows[s]));
      std::copy(y.values.begin(), y.values.end(), c.want.begin() + c.rows[s] * c.out_columns);
      c.sizes[c.rows[s]] = y.size;
    }
    c.offsets.push_back(high);
  }
  c.work.offsets = c.offsets.data();
  c.work.rows = c.rows.data();
}

void make_case(Case& c) {
  c.layer.experts = pick(1, 4);
  c.linear = pick(0, 4) == 0;
  c.layer.activation = pick(0, 2) ? pick(LANCEBILL_SILU, LANCEBILL_SITU)
                                  : pick(LANCEBILL_RELU2_NO_MUL, LANCEBILL_GELU_TANH_NO_MUL);
  c.gated = !c.linear && c.layer.activation <= LANCEBILL_SITU;
  const bool needs_limit = c.layer.activation == LANCEBILL_SWIGLUOAI || c.layer.activation == LANCEBILL_SWIGLUSTEP;
  c.layer.limit = needs_limit || pick(0, 1) ? 3.0f : 0.0f;
  c.layer.alpha = 1.702f, c.layer.beta = 1.25f;
  const int hidden = pick(0, 1) ? 16 * pick(1, 20) : pick(1, 200);
  const int width = pick(0, 1) ? 16 * pick(1, 12) : pick(1, 100);
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

}  // namespace
