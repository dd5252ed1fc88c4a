// Attention of neighbouring tokens of one sequence: a block of queries against one block of keys after the other, with
// the largest score and the sum of weights so far of each query.
//
// Queries are the lanes of vectors, so nothing is summed across lanes: scores are [key][query], sums of values are
// [column][query]. Keys and values become fp32 once for all queries of the block. A query's bits do not depend on the
// others of its block, but `attend` sums in another order.
#pragma once

#include "activate.h"
#include "row_kernels.h"
#include "row_vectors.h"

namespace lancebill {
namespace {

constexpr int kPanel = kQueryVectors * kLanes;  // queries that are computed together
constexpr int64_t kBlockKeys = 64;
constexpr float kLowest = -3e38f;  // below all scores, and finite: differences are numbers
static_assert(kAttendRows % kPanel == 0 && kBlockKeys % kQuerySums == 0, "whole panels and sums");

// M rows of sums[m][query] = sums * factors + a[m][k] * b[k][query]; without factors the sums start at zero.
template <int M>
LANCEBILL_INLINE void multiply_rows(const float* a, int64_t m_stride, int64_t k_stride, int64_t depth, const float* b,
                                    const float* factors, float* sums) {
  Floats total[M][kQueryVectors];
  LANCEBILL_EACH(m, M) {
    LANCEBILL_EACH(v, kQueryVectors) {
      const int at = v * kLanes;
      total[m][v] = factors == nullptr ? Floats{}
                                       : vector_at<Floats>(sums + m * kPanel + at) * vector_at<Floats>(factors + at);
    }
  }
  for (int64_t k = 0; k < depth; k++) {
    Floats inputs[kQueryVectors];
    LANCEBILL_EACH(v, kQueryVectors) inputs[v] = vector_at<Floats>(b + k * kPanel + v * kLanes);
    LANCEBILL_EACH(m, M) {
      const Floats number = spread(a[m * m_stride + k * k_stride]);
      LANCEBILL_EACH(v, kQueryVectors) total[m][v] = multiply_add(number, inputs[v], total[m][v]);
    }
  }
  LANCEBILL_EACH(m, M) {
    LANCEBILL_EACH(v, kQueryVectors) store_at(sums + m * kPanel + v * kLanes, total[m][v]);
  }
}

void multiply(const float* a, int64_t m_stride, int64_t k_stride, int64_t count, int64_t depth, const float* b,
              const float* factors, float* sums) {
  int64_t m = 0;
  for (; m + kQuerySums <= count; m += kQuerySums) {
    multiply_rows<kQuerySums>(a + m * m_stride, m_stride, k_stride, depth, b, factors, sums + m * kPanel);
  }
  for (; m < count; m++) {
    multiply_rows<1>(a + m * m_stride, m_stride, k_stride, depth, b, factors, sums + m * kPanel);
  }
}

// e^x for x <= 0, to about two units in the last place; zero below -87.
LANCEBILL_INLINE Floats exponential_below(Floats x) {
  constexpr float kMagic = 0x1.8p23f;  // leaves no fraction bits
  const Floats bounded = x < -87.0f ? spread(-87.0f) : x;
  const Floats shifted = multiply_add(bounded, spread(1.44269504f), spread(kMagic)), power = shifted - kMagic;
  const Floats most = multiply_add(power, spread(-0.693359375f), bounded);  // ln 2 in two parts
  const Floats rest = multiply_add(power, spread(2.12194440e-4f), most);
  constexpr float kPolynomial[] = {1.39819995e-3f, 8.33345191e-3f, 4.16657959e-2f, 1.66666655e-1f, 5.00000012e-1f};
  Floats sum = spread(1.98756915e-4f);
  for (float factor : kPolynomial) sum = multiply_add(sum, rest, spread(factor));
  sum = multiply_add(sum, rest * rest, rest) + 1.0f;
  const Words scaled = vector_at<Words>(&sum) + (vector_at<Words>(&shifted) << 23);
  return x < -87.0f ? Floats{} : vector_at<Floats>(&scaled);
}

// Some queries, and what they have seen so far.
struct Panel {
  float *q, *values;  // [dim][kPanel]
  Floats largest[kQueryVectors], total[kQueryVectors];
  int64_t first[kPanel], end[kPanel];  // the keys that each sees; both ascend

  bool sees(int64_t start, int64_t count) const { return start < end[kPanel - 1] && start + count > first[0]; }

  void begin(const QueryBlock& block, int64_t row) {
    for (int i = 0; i < kPanel; i++) {
      const int64_t own = min_of(row + i, block.tokens * block.heads - 1);  // lanes too many repeat the last
      const int64_t token = own / block.heads;
      const float* from = block.q + token * block.q_stride + own % block.heads * block.dim;
      for (int64_t k = 0; k < block.dim; k++) q[k * kPanel + i] = from[k] * block.scale;
      end[i] = block.position + token + 1;
      first[i] = max_of<int64_t>(end[i] - block.window, 0);
    }
    LANCEBILL_EACH(v, kQueryVectors) largest[v] = spread(kLowest), total[v] = Floats{};
    for (int64_t i = 0; i < block.dim * kPanel; i++) values[i] = 0;
  }

  // `count` keys from `start` on, and as many of zeros as complete a row of sums.
  void attend(const float* keys, const float* stored, int64_t dim, int64_t start, int64_t count) {
    alignas(64) float scores[kBlockKeys * kPanel], before[kPanel];
    multiply(keys, dim, 1, round_up(count, kQuerySums), dim, q, nullptr, scores);
    if (start < first[kPanel - 1] || start + count > end[0]) hide(scores, start, count);
    Floats top[kQueryVectors], sum[kQueryVectors] = {};
    LANCEBILL_EACH(v, kQueryVectors) top[v] = largest[v];
    for (int64_t t = 0; t < count; t++) {
      LANCEBILL_EACH(v, kQueryVectors) {
        const Floats score = vector_at<Floats>(scores + t * kPanel + v * kLanes);
        top[v] = top[v] < score ? score : top[v];
      }
    }
    for (int64_t t = 0; t < count; t++) {
      LANCEBILL_EACH(v, kQueryVectors) {
        float* score = scores + t * kPanel + v * kLanes;
        const Floats weight = exponential_below(vector_at<Floats>(score) - top[v]);
        sum[v] += weight;
        store_at(score, weight);
      }
    }
    LANCEBILL_EACH(v, kQueryVectors) {
      const Floats factor = exponential_below(largest[v] - top[v]);
      total[v] = multiply_add(total[v], factor, sum[v]);
      largest[v] = top[v];
      store_at(before + v * kLanes, factor);
    }
    multiply(stored, 1, dim, dim, count, scores, before, values);
  }

  // The lowest score where a query does not see a key: its weight is zero, at the latest when the query sees another.
  void hide(float* scores, int64_t start, int64_t count) const {
    for (int64_t t = 0; t < count; t++) {
      for (int i = 0; i < kPanel; i++) {
        if (start + t < first[i] || start + t >= end[i]) scores[t * kPanel + i] = kLowest;
      }
    }
  }

  void write(const QueryBlock& block, int64_t row) const {
    float sums[kPanel];
    LANCEBILL_EACH(v, kQueryVectors) store_at(sums + v * kLanes, total[v]);
    for (int64_t i = 0; i < min_of<int64_t>(kPanel, block.tokens * block.heads - row); i++) {
      const int64_t token = (row + i) / block.heads, head = (row + i) % block.heads;
      float* to = block.out + token * block.out_stride + head * block.dim;
      for (int64_t k = 0; k < block.dim; k++) to[k] = values[k * kPanel + i] / sums[i];
    }
  }
};

// Numbers as fp32, then zeros up to `end`.
template <class Stored>
void widen(const typename Stored::Number* from, int64_t count, int64_t end, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_at(to + i, Stored::load(from + i));
  for (; i < count; i++) to[i] = Stored::one(from[i]);
  for (; i < end; i++) to[i] = 0;
}

template <class Stored>
void attend_block_of(const QueryBlock& block) {
  using Number = typename Stored::Number;
  alignas(64) float queries[kAttendRows * kAttendDim], values[kAttendRows * kAttendDim];
  alignas(64) float keys[kBlockKeys * kAttendDim], stored[kBlockKeys * kAttendDim];
  Panel panels[kAttendRows / kPanel];
  const int64_t rows = block.tokens * block.heads, dim = block.dim, end = block.position + block.tokens;
  for (int64_t row = 0; row < rows; row += kPanel) {
    Panel& panel = panels[row / kPanel];
    panel.q = queries + row * dim, panel.values = values + row * dim;
    panel.begin(block, row);
  }
  const int64_t first = max_of<int64_t>(block.position + 1 - block.window, 0);
  for (int64_t start = first / kBlockKeys * kBlockKeys; start < end; start += kBlockKeys) {
    const int64_t count = min_of(kBlockKeys, end - start);
    widen<Stored>(static_cast<const Number*>(block.keys) + start * dim, count * dim, round_up(count, kQuerySums) * dim,
                  keys);
    widen<Stored>(static_cast<const Number*>(block.values) + start * dim, count * dim, count * dim, stored);
    for (int64_t row = 0; row < rows; row += kPanel) {
      Panel& panel = panels[row / kPanel];
      if (panel.sees(start, count)) panel.attend(keys, stored, dim, start, count);
    }
  }
  for (int64_t row = 0; row < rows; row += kPanel) panels[row / kPanel].write(block, row);
}

void attend_block(const QueryBlock& block) {
  with_type(block.type, [&](auto stored) { attend_block_of<decltype(stored)>(block); });
}

}  // namespace
}  // namespace lancebill
