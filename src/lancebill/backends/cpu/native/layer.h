// A whole layer on one level's vectors `V`: quantise x, gate-up GEMM, activation, quantise h, down GEMM.
//
// One thread computes each output number, in an order that depends only on the number of rows of its expert. Results
// therefore do not depend on the number of threads, and no atomics are needed.
#pragma once

#include "activate.h"
#include "inputs.h"
#include "kernel.h"
#include "many_rows.h"
#include "parallel.h"
#include "plan.h"

namespace lancebill {
namespace {

constexpr int kTasksPerThread = 8;   // for load balance
constexpr int kTasksOfManyRows = 2;  // of the last GEMM: each task touches all rows
constexpr int64_t kManyRows = 64;
constexpr int64_t kRowsPerTask = 4;  // input rows quantised in one task

// values = values * row_scale + bias, for consecutive blocks.
LANCEBILL_INLINE void finish_rows(const Packed& p, int64_t block, int64_t blocks, float* __restrict values) {
  const lancebill_matrix& m = *p.matrix;
  const int64_t first = block * kRows, count = blocks * kRows;
  if (m.row_scale != nullptr) {
    for (int64_t i = 0; i < count; i++) values[i] *= m.row_scale[first + i];
  }
  if (m.bias != nullptr) {
    for (int64_t i = 0; i < count; i++) values[i] += m.bias[first + i];
  }
}

LANCEBILL_INLINE void add_weighted(float* __restrict sums, const float* __restrict values, float weight, int64_t count) {
  for (int64_t i = 0; i < count; i++) sums[i] += weight * values[i];
}

// Epilogue of the gate-up GEMM: applies the activation and writes the hidden row of the slot.
struct ToHidden {
  const Call& call;
  int64_t base;  // the expert's first block

  float* destination(int64_t slot, int64_t block) const {
    return call.hidden + slot * call.hidden_stride() + (call.gated ? (block - base) / 2 : block - base) * kRows;
  }

  // `values`: 16 results for each of `blocks` blocks. A gate block and its up block always come in the same call.
  LANCEBILL_INLINE void write(int64_t slot, int64_t block, int64_t blocks, float* values) const {
    finish_rows(call.first, block, blocks, values);
    const int64_t per_output = call.gated ? 2 : 1;
    float* hidden = destination(slot, block);
    for (int64_t b = 0; b < blocks; b += per_output, hidden += kRows) {
      activate(*call.layer, values + b * kRows, values + (b + per_output - 1) * kRows, hidden);
    }
  }

  // Several slots; load(i, values) gives the results of slot + i.
  template <int Blocks, class Load>
  LANCEBILL_INLINE void write(int64_t slot, int64_t slots, int64_t block, const Load& load) const {
    with_activation(*call.layer, [&](auto function) __attribute__((always_inline)) {
      for (int64_t i = 0; i < slots; i++) {
        alignas(64) float values[Blocks][kRows];
        load(i, values);
        finish_rows(call.first, block, Blocks, values[0]);
        float* hidden = destination(slot + i, block);
        if (call.gated) {
          apply(function, values[0], values[Blocks - 1], hidden);
        } else {
          LANCEBILL_EACH(b, Blocks) apply(function, values[b], values[b], hidden + b * kRows);
        }
      }
    });
  }
};

// Epilogue of the last GEMM: writes the row of `out`, or adds the weighted results to the token's sums.
struct ToOutput {
  const Call& call;
  int64_t base;

  const void* destination(int64_t slot, int64_t block) const {
    const int64_t row = call.row_of[slot], column = (block - base) * kRows;
    if (call.by_tokens()) return call.sums_of(row) + column;
    const int64_t bytes = call.work->out_type == LANCEBILL_F32 ? 4 : 2;
    return static_cast<const uint8_t*>(call.work->out) + (row * call.work->out_stride + column) * bytes;
  }

  LANCEBILL_INLINE void write(int64_t slot, int64_t block, int64_t blocks, float* values) const {
    finish_rows(call.last, block, blocks, values);
    const int64_t row = call.row_of[slot], column = (block - base) * kRows;
    if (!call.by_tokens()) return store(row, column, blocks, values);
    const float weight = call.work->weight_on_input ? 1.0f : call.weight_of[slot];
    add_weighted(call.sums_of(row) + column, values, weight, blocks * kRows);
  }

  template <int Blocks, class Load>
  LANCEBILL_INLINE void write(int64_t slot, int64_t slots, int64_t block, const Load& load) const {
    for (int64_t i = 0; i < slots; i++) {
      alignas(64) float values[Blocks][kRows];
      load(i, values);
      write(slot + i, block, Blocks, values[0]);
    }
  }

  void store(int64_t row, int64_t column, int64_t blocks, const float* values) const {
    const lancebill_work& work = *call.work;
    const int64_t count = min_of(blocks * kRows, call.last.matrix->rows - column);
    store_row(values, count, work.out_type, work.out, row * work.out_stride + column);
  }
};

// `Rows` input rows times `Blocks` row blocks. The destination has been evicted since the last expert, so it is
// prefetched before the GEMM.
template <class V, int Blocks, int Rows, class Results>
LANCEBILL_INLINE void multiply_rows(const Packed& p, Streams& s, const Inputs& inputs, int64_t block, int64_t slot,
                                    const Results& results) {
  alignas(64) float out[Rows][Blocks][kRows];
  const uint8_t* records[Rows];
  for (int r = 0; r < Rows; r++) {
    records[r] = inputs.record(slot + r);
    LANCEBILL_EACH(b, Blocks) __builtin_prefetch(results.destination(slot + r, block + b), 1);
  }
  gemm<V, Blocks, Rows>(p, s, records, out);
  s.call++;
  for (int r = 0; r < Rows; r++) results.write(slot + r, block, Blocks, out[r][0]);
}

template <class V, int Blocks, class Results>
void multiply_all_rows(const Packed& p, const Inputs& inputs, int64_t block, int64_t next, int64_t slot, int64_t end,
                       const Results& results) {
  Streams s = streams(p, block, next, Blocks, (end - slot + V::rows - 1) / V::rows);
  // The last few blocks of a matrix are too rare for kernels of several rows. With tiles, tasks of two blocks are not:
  // an expert that has too few rows for a tile is multiplied here.
  if constexpr (Blocks == V::blocks) {
    constexpr int kMost = V::rows, kThree = V::rows > 3 ? 3 : 2;  // three rows are common in decode: one pass
    for (; end - slot >= kMost; slot += kMost) multiply_rows<V, Blocks, kMost>(p, s, inputs, block, slot, results);
    for (; end - slot >= kThree; slot += kThree) multiply_rows<V, Blocks, kThree>(p, s, inputs, block, slot, results);
  }
  if constexpr (Blocks == V::blocks || (V::tiles && Blocks == 2)) {
    for (; end - slot >= 2; slot += 2) multiply_rows<V, Blocks, 2>(p, s, inputs, block, slot, results);
  }
  for (; slot < end; slot++) multiply_rows<V, Blocks, 1>(p, s, inputs, block, slot, results);
}

template <class V>
bool takes_tiles(const Call& call, const Packed& p, int64_t rows) {
  return V::tiles && call.tile_rows > 0 && rows >= call.tile_rows && fits_tiles(p);
}

// The form that the inputs of an expert with so many rows have.
template <class V>
Form form_of(const Call& call, const Packed& p, int64_t rows) {
  if (takes_tiles<V>(call, p, rows)) return Form::kTiles;
  if constexpr (V::word_rows > 0) {
    if (p.fits_words && rows >= V::many_rows.of(p)) return Form::kWords;
  }
  return Form::kRecord;
}

// Multiplies row blocks [low, high) of one expert, numbered over all experts, with slots [slot, end), and writes the
// results in any order. `next`: the block read afterwards, for prefetching.
template <class V, class Results>
void multiply_blocks(const Call& call, const Packed& p, int64_t low, int64_t high, int64_t next, int64_t slot,
                     int64_t end, int thread, const Results& results) {
  const Inputs& inputs = call.inputs_of(p);
  const Form form = form_of<V>(call, p, end - slot);
  if constexpr (V::tiles) {
    if (form == Form::kTiles) return V::tile_gemm(call, p, low, high, next, slot, end, thread, results);
  }
  if constexpr (V::word_rows > 0) {
    if (form == Form::kWords) return multiply_many_rows<V>(p, inputs, low, high, slot, end, results);
  }
  (void)thread;
  int64_t block = low;
  for (; block + V::blocks <= high; block += V::blocks) {
    const int64_t following = block + V::blocks < high ? block + V::blocks : next;
    multiply_all_rows<V, V::blocks>(p, inputs, block, following, slot, end, results);
  }
  for (; block < high; block += 2) {  // the last few blocks, in pairs: gate and up stay in one call
    if (block + 2 <= high) {
      multiply_all_rows<V, 2>(p, inputs, block, next, slot, end, results);
    } else {
      multiply_all_rows<V, 1>(p, inputs, block, next, slot, end, results);
    }
  }
}

// The expert of a sorted slot, by binary search in the offsets.
inline int64_t expert_of(const Call& call, int64_t slot) {
  int64_t low = 0, high = call.layer->experts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (call.offsets[middle] <= slot ? low : high) = middle;
  }
  return low;
}

// Where and how the kernel of its expert reads the row of `slot`.
template <class V>
InputPlace place_of(const Call& call, const Packed& p, int64_t slot, int64_t expert) {
  const int64_t first = call.offsets[expert], rows = call.offsets[expert + 1] - first;
  const Form form = form_of<V>(call, p, rows);
  if (form != Form::kTiles) return {form, {}};
  return {form, call.inputs_of(p).tile_row(first, RowTiles(rows), slot - first, p.columns)};
}

// Writes one row of x as the input record of `slot`.
template <class V>
void represent_row(const Call& call, const Packed& p, int64_t slot, int64_t expert, InputPlace place, int thread) {
  const lancebill_work& work = *call.work;
  const RowBuffers rows = row_buffers(call, thread);
  load_row(work.x, work.x_type, call.row_of[slot] * work.x_stride, p.matrix->columns, rows.values);
  if (work.weight_on_input) {
    for (int64_t k = 0; k < p.matrix->columns; k++) rows.values[k] *= call.weight_of[slot];
  }
  write_input<V>(p, expert, place, rows, call.inputs_of(p), slot);
}

// Whether a token's input record is the same for all experts.
inline bool same_for_experts(const Call& call, const Packed& p) {
  const lancebill_matrix& m = *p.matrix;
  const bool own = m.pre_scale != nullptr || m.perm != nullptr || m.input_scale != nullptr;
  return call.by_tokens() && !call.work->weight_on_input && !own;
}

// Writes each token's inputs once in each form that its experts read. Tiles need a copy per slot, the others share it.
template <class V>
void represent_tokens(const Call& call, const Packed& p) {
  const lancebill_work& work = *call.work;
  const Inputs& inputs = call.inputs_of(p);
  parallel(work.threads, work.tokens, [&](int64_t token, int thread) {
    int64_t first_slot[kForms] = {-1, -1, -1};
    TileRow first_tile = {};
    for (int64_t choice = 0; choice < work.top_k; choice++) {
      const int64_t slot = call.slot_of[token * work.top_k + choice];
      if (slot < 0) continue;
      const int64_t expert = local_expert(call, token, choice);
      const InputPlace place = place_of<V>(call, p, slot, expert);
      int64_t& first = first_slot[static_cast<int>(place.form)];
      if (first < 0) {
        represent_row<V>(call, p, slot, expert, place, thread);
        first = slot;
        if (place.form == Form::kTiles) first_tile = place.tile;
      } else if (place.form == Form::kTiles) {
        if constexpr (V::tiles) V::copy_tile_row(p, first_tile, place.tile);
        inputs.factors[slot] = inputs.factors[first];
      } else {
        inputs.shared[slot] = first;
      }
    }
  });
}

template <class V>
void represent_inputs(const Call& call, const Packed& p) {
  const bool from_x = &p == &call.first || !call.two_gemms;
  if (from_x && same_for_experts(call, p)) return represent_tokens<V>(call, p);
  const int64_t slots = call.offsets[call.layer->experts];
  parallel(call.work->threads, (slots + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int thread) {
    for (int64_t slot = task * kRowsPerTask; slot < min_of((task + 1) * kRowsPerTask, slots); slot++) {
      const int64_t expert = expert_of(call, slot);
      const InputPlace place = place_of<V>(call, p, slot, expert);
      if (from_x) {
        represent_row<V>(call, p, slot, expert, place, thread);
        continue;
      }
      RowBuffers rows = row_buffers(call, thread);
      float* hidden = call.hidden + slot * call.hidden_stride();
      if (place.form == Form::kTiles) {
        rows.values = hidden;  // may change: nothing reads it afterwards
      } else {
        std::memcpy(rows.values, hidden, sizeof(float) * p.matrix->columns);
      }
      write_input<V>(p, expert, place, rows, call.inputs_of(p), slot);
    }
  });
}

// Row blocks of an expert per task: about `target`, rounded up to whole kernel calls; all of them with one thread.
template <class V>
int64_t blocks_per_task(const Call& call, const Packed& p, int64_t target) {
  return call.work->threads == 1 ? p.blocks : round_up(max_of<int64_t>(target, 1), V::blocks);
}

// The gate-up GEMM (or up alone) and the activation. A task is a range of row blocks of one expert.
template <class V>
void run_first_gemm(const Call& call) {
  const Packed& p = call.first;
  const int64_t target_tasks = int64_t{kTasksPerThread} * call.work->threads;
  const int64_t task_blocks = blocks_per_task<V>(call, p, call.actives * p.blocks / target_tasks);
  const int64_t expert_tasks = (p.blocks + task_blocks - 1) / task_blocks, tasks = call.actives * expert_tasks;
  const auto start = [&](int64_t task) {
    return call.active[task / expert_tasks] * int64_t{p.blocks} + task % expert_tasks * task_blocks;
  };
  parallel(call.work->threads, tasks, [&](int64_t task, int thread) {
    const int64_t expert = call.active[task / expert_tasks], base = expert * p.blocks, low = start(task);
    const int64_t high = min_of(low + task_blocks, base + p.blocks);
    const int64_t next = start(min_of(task + call.work->threads, tasks - 1));  // a guess: scheduling is dynamic
    multiply_blocks<V>(call, p, low, high, next, call.offsets[expert], call.offsets[expert + 1], thread,
                       ToHidden{call, base});
  });
}

// The form of an expert with the mean number of rows.
template <class V>
Form usual_form(const Call& call, const Packed& p) {
  return form_of<V>(call, p, call.offsets[call.layer->experts] / max_of(call.actives, 1));
}

// Row blocks of which a task of the down GEMM has a multiple. Kernels of all blocks are the fastest; tiles, panels, and
// threads that would have no task, need pairs. Other levels have kernels of pairs for one row only.
template <class V>
int64_t blocks_of_unit(const Call& call, const Packed& p) {
  const Form form = usual_form<V>(call, p);
  if (form == Form::kWords) return kPanelBlocks;
  const bool pairs = form == Form::kTiles || p.blocks / V::blocks < call.work->threads;
  return V::tiles && pairs ? 2 : V::blocks;
}

// The down GEMM. A task is a range of output columns, over all experts in order.
template <class V>
void run_last_gemm(const Call& call) {
  const Packed& p = call.last;
  const lancebill_work& work = *call.work;
  const bool whole_rows = call.summed_rows > kManyRows && usual_form<V>(call, p) != Form::kWords;
  const int64_t each = whole_rows ? kTasksOfManyRows : kTasksPerThread, logical = p.matrix->rows;
  const int64_t unit = blocks_of_unit<V>(call, p), units = (p.blocks + unit - 1) / unit;
  const int64_t tasks = work.threads == 1 ? 1 : min_of(units, each * work.threads);
  parallel(work.threads, tasks, [&](int64_t task, int thread) {
    const int64_t low = units * task / tasks * unit;
    const int64_t high = min_of(units * (task + 1) / tasks * unit, int64_t{p.blocks});
    const int64_t column = low * kRows, width = (high - low) * kRows;
    for (int64_t row = 0; row < call.summed_rows; row++) fill(call.sums_of(row) + column, width, 0);
    const int64_t later = min_of(task + work.threads, tasks - 1);  // a guess: scheduling is dynamic
    for (int32_t i = 0; i < call.actives; i++) {
      const int64_t expert = call.active[i], base = expert * p.blocks;
      const bool last = i + 1 == call.actives;
      const int64_t next = last ? call.active[0] * int64_t{p.blocks} + units * later / tasks * unit
                                : call.active[i + 1] * int64_t{p.blocks} + low;
      multiply_blocks<V>(call, p, base + low, base + high, next, call.offsets[expert], call.offsets[expert + 1], thread,
                         ToOutput{call, base});
    }
    for (int64_t row = 0; row < call.summed_rows && !call.sums_are_out(); row++) {
      store_row(call.sums_of(row) + column, min_of(width, logical - column), work.out_type, work.out,
                row * work.out_stride + column);
    }
  });
}

template <class V>
void run_layer(const Call& call) {
  if (call.two_gemms) {
    represent_inputs<V>(call, call.first);
    run_first_gemm<V>(call);
  }
  represent_inputs<V>(call, call.last);
  run_last_gemm<V>(call);
}

}  // namespace
}  // namespace lancebill
