// Products of dense matrices and many rows of fp32, in panels: some rows of the matrix as fp32, transposed, so that a
// vector has a number of each. Numbers are converted once for all rows of x, and nothing is summed across lanes.
//
// rows.h sums the columns of each lane, then the lanes. A panel has its columns in that order: first those of the lane
// that lanes_sum adds first. So a sum has the same bits here as there, whatever the number of rows.
#pragma once

#include "row_kernels.h"
#include "row_vectors.h"
#include "transpose.h"

namespace lancebill {
namespace {

// Columns of a lane. An odd number, so that those of different lanes do not compete for the same places of a cache.
LANCEBILL_INLINE int64_t lane_columns(int64_t columns) { return columns / kLanes | 1; }

// Columns that a panel has room for: those of the lanes, then the rest.
int64_t ordered_columns(int64_t columns) { return lane_columns(columns) * kLanes + columns % kLanes; }

// Writes kLanes rows in the order of sums: [column][`to_stride`], of which kLanes are written. Of fewer rows the last
// one is repeated.
template <class Stored>
LANCEBILL_INLINE void order_columns(const typename Stored::Number* from, int64_t stride, int64_t rows, int64_t columns,
                                    float* to, int64_t to_stride) {
  const int64_t steps = lane_columns(columns), rest = columns / kLanes * kLanes;
  const auto row = [&](int64_t i) __attribute__((always_inline)) { return from + min_of(i, rows - 1) * stride; };
  const auto place = [&](int64_t k) __attribute__((always_inline)) {
    return to + (place_in_sum(k % kLanes) * steps + k / kLanes) * to_stride;
  };
  int64_t k = 0;
  if constexpr (Stored::kPairs) {  // a word has two numbers: half as much to transpose
    for (; k + 2 * kLanes <= columns; k += 2 * kLanes) {
      transpose([&](int i) __attribute__((always_inline)) { return vector_at<Words>(row(i) + k); },
                [&](int i, Words words) __attribute__((always_inline)) {
                  store_at(place(k + 2 * i), Stored::first_of_pair(words));
                  store_at(place(k + 2 * i + 1), Stored::second_of_pair(words));
                });
    }
  }
  for (; k + kLanes <= columns; k += kLanes) {
    transpose([&](int i) __attribute__((always_inline)) { return (Words)Stored::load(row(i) + k); },
              [&](int i, Words words) __attribute__((always_inline)) { store_at(place(k + i), (Floats)words); });
  }
  for (; k < columns; k++) {
    for (int i = 0; i < kLanes; i++) to[(steps * kLanes + k - rest) * to_stride + i] = Stored::one(row(i)[k]);
  }
}

// Rows of x as panels read them: [block of kLanes rows][column][row].
void order_inputs(const float* x, int64_t x_stride, int64_t rows, int64_t columns, float* block) {
  order_columns<StoredF32>(x, x_stride, rows, columns, block, kLanes);
}

// V vectors of matrix rows times M rows of x, of which `count` are written. For each column it prefetches a cache line,
// from `ahead` on; with `step` 0 always the same one.
template <int V, int M>
void multiply_panel(const float* panel, const float* inputs, int64_t columns, const char* ahead, int64_t step,
                    const float* bias, int64_t count, float* out, int64_t out_stride) {
  constexpr int kDepth = __builtin_ctz(kLanes);
  const int64_t steps = columns / kLanes, unused = lane_columns(columns) - steps;
  Floats sums[M][V], kept[kDepth][M][V];  // kept: sums of 1, 2, 4 ... lanes
  const auto add_columns = [&](int64_t number) __attribute__((always_inline)) {
    for (int64_t k = 0; k < number; k++, panel += V * kLanes, inputs += kLanes, ahead += step) {
      __builtin_prefetch(ahead, 0, 2);
      Floats weights[V];
      LANCEBILL_EACH(v, V) weights[v] = vector_at<Floats>(panel + v * kLanes);
      LANCEBILL_EACH(i, M) {
        const Floats input = in_register(spread(inputs[i]));
        LANCEBILL_EACH(v, V) sums[i][v] = multiply_add(weights[v], input, sums[i][v]);
      }
    }
  };
  const auto clear = [&]() __attribute__((always_inline)) {
    LANCEBILL_EACH(i, M) {
      LANCEBILL_EACH(v, V) sums[i][v] = Floats{};
    }
  };
  for (int lane = 0; lane < kLanes; lane++) {
    clear();
    add_columns(steps);
    panel += unused * V * kLanes, inputs += unused * kLanes;
    int depth = 0;
    for (; lane >> depth & 1; depth++) {  // two sums of as many lanes
      LANCEBILL_EACH(i, M) {
        LANCEBILL_EACH(v, V) sums[i][v] += kept[depth][i][v];
      }
    }
    if (depth == kDepth) break;
    LANCEBILL_EACH(i, M) {
      LANCEBILL_EACH(v, V) kept[depth][i][v] = sums[i][v];
    }
  }
  add_columns(columns % kLanes);
  LANCEBILL_EACH(v, V) {
    const Floats added = bias == nullptr ? Floats{} : vector_at<Floats>(bias + v * kLanes);
    LANCEBILL_EACH(i, M) {
      if (i < count) store_at(out + i * out_stride + v * kLanes, sums[i][v] + added);
    }
  }
}

// V vectors of matrix rows, from `row` on, times all rows of x. Rows from `next` on are prefetched.
template <class Stored, int V>
LANCEBILL_INLINE void panel_rows(const lancebill_dense& m, int64_t row, int64_t next, const float* inputs,
                                 int64_t count, float* out, int64_t out_stride, float* panel) {
  constexpr int kMost = kPanelInputs, kFew = 4, kCacheLine = 64;
  const auto* all = static_cast<const typename Stored::Number*>(m.weights);
  const auto* w = all + row * m.columns;
  const char* ahead = reinterpret_cast<const char*>(all + min_of<int64_t>(next, m.rows) * m.columns);
  const int64_t columns = m.columns, lines = V * kLanes * columns * static_cast<int64_t>(sizeof *w) / kCacheLine;
  for (int v = 0; v < V; v++) {
    order_columns<Stored>(w + v * kLanes * columns, columns, kLanes, columns, panel + v * kLanes, V * kLanes);
  }
  const float* bias = m.bias == nullptr ? nullptr : m.bias + row;
  for (int64_t i = 0; i < count; i += kMost) {
    const float* own = inputs + i / kLanes * kLanes * ordered_columns(columns) + i % kLanes;
    const int64_t line = i / kMost * columns;  // of the next panel
    const char* from = line < lines ? ahead + line * kCacheLine : ahead;
    const int64_t step = line < lines ? kCacheLine : 0;
    float* to = out + i * out_stride + row;
    const int64_t left = min_of<int64_t>(kMost, count - i);
    left > kFew ? multiply_panel<V, kMost>(panel, own, columns, from, step, bias, left, to, out_stride)
                : multiply_panel<V, kFew>(panel, own, columns, from, step, bias, left, to, out_stride);
  }
}

template <int V>
struct Vectors {
  static constexpr int count = V;
};

// Vectors of matrix rows that there is room for.
LANCEBILL_INLINE int64_t panel_vectors(int64_t columns) { return kPanelNumbers / (kLanes * ordered_columns(columns)); }

template <class Stored>
void panels_of(const lancebill_dense& m, int64_t first, int64_t end, int64_t next, const float* inputs, int64_t count,
               float* out, int64_t out_stride) {
  alignas(64) float panel[kPanelNumbers];
  const int64_t most = panel_vectors(m.columns);
  int64_t row = first;
  const auto rows_by = [&](auto vectors) __attribute__((always_inline)) {
    constexpr int V = decltype(vectors)::count;
    for (; V <= most && row + V * kLanes <= end; row += V * kLanes) {
      const int64_t after = row + V * kLanes < end ? row + V * kLanes : next;
      panel_rows<Stored, V>(m, row, after, inputs, count, out, out_stride, panel);
    }
  };
  rows_by(Vectors<kPanelVectors>());
  rows_by(Vectors<2>());
  rows_by(Vectors<1>());
}

void panel_dense(const lancebill_dense& m, int64_t first, int64_t end, int64_t next, const float* inputs,
                 int64_t count, float* out, int64_t out_stride) {
  with_type(m.type, [&](auto stored) {
    panels_of<decltype(stored)>(m, first, end, next, inputs, count, out, out_stride);
  });
}

// More rows of x where panels are narrower: as measured, by the square of how much.
int64_t panels_from(int64_t columns) {
  const int64_t vectors = max_of<int64_t>(1, min_of<int64_t>(kPanelVectors, panel_vectors(columns)));
  return kPanelsFrom * kPanelVectors * kPanelVectors / (vectors * vectors);
}

int64_t panel_task(int64_t columns) { return kLanes * min_of<int64_t>(kPanelVectors, panel_vectors(columns)); }

constexpr DensePanels kDensePanels = {order_inputs, panel_dense, panel_task, ordered_columns, panels_from, kLanes};

}  // namespace
}  // namespace lancebill
