// A whole layer on one level's vectors `V`: represent x, gate and up, represent h, down.
//
// Every output number is computed by one thread, in an order that depends on nothing but the number of rows of its
// expert: results do not depend on the number of threads, and no two threads ever add to the same number.
#pragma once

#include "activate.h"
#include "inputs.h"
#include "kernel.h"
#include "parallel.h"
#include "plan.h"

namespace lancebill {
namespace {

constexpr int kBlocks = 4;       // row blocks read at once: as many streams as memory likes
constexpr int kTasks = 4;        // tasks a thread, so that the last to finish is not far behind
constexpr int64_t kRowsATask = 4;  // input rows that are represented in one task

// v * row_scale + bias of the outputs of blocks that follow each other.
inline void finish_rows(const Packed& p, int64_t block, int64_t blocks, float* __restrict values) {
  const lancebill_matrix& m = *p.matrix;
  const int64_t first = block * kRows, count = blocks * kRows;
  if (m.row_scale != nullptr) {
    for (int64_t i = 0; i < count; i++) values[i] *= m.row_scale[first + i];
  }
  if (m.bias != nullptr) {
    for (int64_t i = 0; i < count; i++) values[i] += m.bias[first + i];
  }
}

inline void add_weighted(float* __restrict sums, const float* __restrict values, float weight, int64_t count) {
  for (int64_t i = 0; i < count; i++) sums[i] += weight * values[i];
}

// Where results of gate and up go: through the activation to the hidden row of their slot.
struct ToHidden {
  const Call& call;
  int64_t base;  // the expert's first block

  float* place(int64_t slot, int64_t block) const {
    return call.hidden + slot * call.hidden_stride() + (call.gated ? (block - base) / 2 : block - base) * kRows;
  }

  // Those of `blocks` blocks, sixteen of each; a gate's block and its up block come together.
  void take(int64_t slot, int64_t block, int64_t blocks, float* values) const {
    finish_rows(call.first, block, blocks, values);
    const int64_t per_output = call.gated ? 2 : 1;
    float* hidden = place(slot, block);
    for (int64_t b = 0; b < blocks; b += per_output, hidden += kRows) {
      activate(*call.layer, values + b * kRows, values + (b + 1) * kRows, hidden);
    }
  }
};

// Where results of the last product go: to their row of `out`, or weighted to the sums of their token.
struct ToOutput {
  const Call& call;
  int64_t base;

  const void* place(int64_t slot, int64_t block) const {
    const int64_t row = call.row_of[slot], column = (block - base) * kRows;
    if (call.by_tokens()) return call.sums_of(row) + column;
    const int64_t bytes = call.work->out_type == LANCEBILL_F32 ? 4 : 2;
    return static_cast<const uint8_t*>(call.work->out) + (row * call.work->out_stride + column) * bytes;
  }

  void take(int64_t slot, int64_t block, int64_t blocks, float* values) const {
    const lancebill_work& work = *call.work;
    finish_rows(call.last, block, blocks, values);
    const int64_t row = call.row_of[slot], column = (block - base) * kRows;
    if (!call.by_tokens()) {
      const int64_t count = least(blocks * kRows, call.last.matrix->rows - column);
      return store_row(values, count, work.out_type, work.out, row * work.out_stride + column);
    }
    const float weight = work.weight_on_input ? 1.0f : call.weight_of[slot];
    add_weighted(call.sums_of(row) + column, values, weight, blocks * kRows);
  }
};

// A few input rows against `Blocks` row blocks. Where results go was last touched some experts ago: it is asked for
// before, and there when they are.
template <class V, int Blocks, int Rows, class Results>
LANCEBILL_INLINE int64_t some_rows(const Packed& p, const Streams& s, const Inputs& inputs, int64_t block, int64_t slot,
                                 const Results& results) {
  alignas(64) float out[Rows][Blocks][kRows];
  const uint8_t* records[Rows];
  for (int r = 0; r < Rows; r++) {
    records[r] = inputs.record(slot + r);
    LANCEBILL_EACH(b, Blocks) __builtin_prefetch(results.place(slot + r, block + b), 1);
  }
  product<V, Blocks, Rows>(p, s, records, out);
  for (int r = 0; r < Rows; r++) results.take(slot + r, block, Blocks, out[r][0]);
  return Rows;
}

template <class V, int Blocks, class Results>
void all_rows(const Packed& p, const Inputs& inputs, int64_t block, int64_t next, int64_t slot, int64_t end,
              const Results& results) {
  const Streams s = streams(p, block, next);
  constexpr int kThree = V::rows > 3 && Blocks == kBlocks ? 3 : 2;  // decode steps have experts with three: one pass
  while (slot < end) {
    if (end - slot >= V::rows) {
      slot += some_rows<V, Blocks, V::rows>(p, s, inputs, block, slot, results);
    } else if (end - slot >= kThree) {
      slot += some_rows<V, Blocks, kThree>(p, s, inputs, block, slot, results);
    } else if (end - slot >= 2) {
      slot += some_rows<V, Blocks, 2>(p, s, inputs, block, slot, results);
    } else {
      slot += some_rows<V, Blocks, 1>(p, s, inputs, block, slot, results);
    }
  }
}

template <class V>
bool takes_tiles(const Call& call, const Packed& p, int64_t rows) {
  return V::tiles && call.tile_rows > 0 && rows >= call.tile_rows && fits_tiles(p);
}

// What the kernels do for one expert: blocks [low, high), numbered over all experts, by the slots [slot, end). Results
// may come in any order. `next`: the block read after these.
template <class V, class Results>
void blocks_product(const Call& call, const Packed& p, int64_t low, int64_t high, int64_t next, int64_t slot, int64_t end,
                    int thread, const Results& results) {
  const Inputs& inputs = call.inputs_of(p);
  if constexpr (V::tiles) {
    if (takes_tiles<V>(call, p, end - slot)) {
      return V::tile_product(call, p, low, high, next, slot, end, thread, results);
    }
  }
  (void)thread;
  int64_t block = low;
  for (; block + kBlocks <= high; block += kBlocks) {
    all_rows<V, kBlocks>(p, inputs, block, block + kBlocks < high ? block + kBlocks : next, slot, end, results);
  }
  for (; block < high; block += 2) {  // few blocks are left; gate and up stay together
    if (block + 2 <= high) {
      all_rows<V, 2>(p, inputs, block, next, slot, end, results);
    } else {
      all_rows<V, 1>(p, inputs, block, next, slot, end, results);
    }
  }
}

// The expert of each sorted slot is found by its place: slots are few, experts ascending.
inline int64_t expert_of(const Call& call, int64_t slot) {
  int64_t low = 0, high = call.layer->experts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (call.offsets[middle] <= slot ? low : high) = middle;
  }
  return low;
}

// One row of x as the expert of `slot` takes it.
template <class V>
void represent_row(const Call& call, const Packed& p, int64_t slot, int64_t expert, bool tiles, int thread) {
  const lancebill_work& work = *call.work;
  const RowBuffers rows = row_buffers(call, thread);
  load_row(work.x, work.x_type, call.row_of[slot] * work.x_stride, p.matrix->columns, rows.values);
  if (work.weight_on_input) {
    for (int64_t k = 0; k < p.matrix->columns; k++) rows.values[k] *= call.weight_of[slot];
  }
  write_input<V>(p, expert, tiles, rows, call.inputs_of(p), slot);
}

// Whether all experts take a token alike.
inline bool same_for_experts(const Call& call, const Packed& p) {
  const lancebill_matrix& m = *p.matrix;
  const bool own = m.pre_scale != nullptr || m.perm != nullptr || m.input_scale != nullptr;
  return call.by_tokens() && !call.work->weight_on_input && !own;
}

// The slots of each token: represented once for tiles, which need copies side by side, and once for the other kernels.
template <class V>
void represent_tokens(const Call& call, const Packed& p) {
  const lancebill_work& work = *call.work;
  const Inputs& inputs = call.inputs_of(p);
  parallel(work.threads, work.tokens, [&](int64_t token, int thread) {
    int64_t made[2] = {-1, -1};
    for (int64_t i = token * work.top_k; i < (token + 1) * work.top_k; i++) {
      const int64_t expert = work.ids[i], slot = call.slot_of[i];
      if (slot < 0) continue;
      const bool tiles = takes_tiles<V>(call, p, call.offsets[expert + 1] - call.offsets[expert]);
      if (made[tiles] < 0) {
        represent_row<V>(call, p, slot, expert, tiles, thread);
        made[tiles] = slot;
      } else if (tiles) {
        std::memcpy(inputs.own(slot), inputs.own(made[tiles]), tile_operand_bytes(p));
        inputs.factors[slot] = inputs.factors[made[tiles]];
      } else {
        inputs.shared[slot] = made[tiles];
      }
    }
  });
}

template <class V>
void represent_inputs(const Call& call, const Packed& p) {
  const bool from_x = &p == &call.first || !call.two_products;
  if (from_x && same_for_experts(call, p)) return represent_tokens<V>(call, p);
  const int64_t slots = call.offsets[call.layer->experts];
  parallel(call.work->threads, (slots + kRowsATask - 1) / kRowsATask, [&](int64_t task, int thread) {
    for (int64_t slot = task * kRowsATask; slot < least((task + 1) * kRowsATask, slots); slot++) {
      const int64_t expert = expert_of(call, slot);
      const bool tiles = takes_tiles<V>(call, p, call.offsets[expert + 1] - call.offsets[expert]);
      if (from_x) {
        represent_row<V>(call, p, slot, expert, tiles, thread);
        continue;
      }
      const RowBuffers rows = row_buffers(call, thread);
      std::memcpy(rows.values, call.hidden + slot * call.hidden_stride(), sizeof(float) * p.matrix->columns);
      write_input<V>(p, expert, tiles, rows, call.inputs_of(p), slot);
    }
  });
}

// Row blocks of an expert that are one task: about `wanted`; all of them where no other thread waits for some.
inline int64_t blocks_a_task(const Call& call, const Packed& p, int64_t wanted) {
  return call.work->threads == 1 ? p.blocks : round_up(most<int64_t>(wanted, 1), kBlocks);
}

// Gate and up, or up alone, and the activation: tasks are (expert, run of row blocks).
template <class V>
void first_product(const Call& call) {
  const Packed& p = call.first;
  const int64_t wanted = int64_t{kTasks} * call.work->threads;
  const int64_t each = blocks_a_task(call, p, call.actives * p.blocks / wanted);
  const int64_t runs = (p.blocks + each - 1) / each, tasks = call.actives * runs;
  const auto start = [&](int64_t task) { return call.active[task / runs] * int64_t{p.blocks} + task % runs * each; };
  parallel(call.work->threads, tasks, [&](int64_t task, int thread) {
    const int64_t expert = call.active[task / runs], base = expert * p.blocks, low = start(task);
    const int64_t high = least(low + each, base + p.blocks);
    const int64_t next = start(least(task + call.work->threads, tasks - 1));  // a guess: tasks go to whoever is free
    blocks_product<V>(call, p, low, high, next, call.offsets[expert], call.offsets[expert + 1], thread,
                      ToHidden{call, base});
  });
}

// Down: tasks are runs of output columns, each through all experts in order.
template <class V>
void last_product(const Call& call) {
  const Packed& p = call.last;
  const lancebill_work& work = *call.work;
  const int64_t each = blocks_a_task(call, p, p.blocks / (2 * work.threads)), logical = p.matrix->rows;
  parallel(work.threads, (p.blocks + each - 1) / each, [&](int64_t task, int thread) {
    const int64_t low = task * each, high = least(low + each, int64_t{p.blocks});
    const int64_t column = low * kRows, width = (high - low) * kRows;
    for (int64_t row = 0; row < call.summed_rows; row++) fill(call.sums_of(row) + column, width, 0);
    for (int32_t i = 0; i < call.actives; i++) {
      const int64_t expert = call.active[i], base = expert * p.blocks;
      const int64_t next = call.active[least(i + 1, call.actives - 1)] * int64_t{p.blocks} + low;
      blocks_product<V>(call, p, base + low, base + high, next, call.offsets[expert], call.offsets[expert + 1], thread,
                        ToOutput{call, base});
    }
    for (int64_t row = 0; row < call.summed_rows; row++) {
      store_row(call.sums_of(row) + column, least(width, logical - column), work.out_type, work.out,
                row * work.out_stride + column);
    }
  });
}

template <class V>
void run_layer(const Call& call) {
  if (call.two_products) {
    represent_inputs<V>(call, call.first);
    first_product<V>(call);
  }
  represent_inputs<V>(call, call.last);
  last_product<V>(call);
}

}  // namespace
}  // namespace lancebill
