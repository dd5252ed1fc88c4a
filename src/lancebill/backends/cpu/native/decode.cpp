// A whole decode step of a model: a list of small steps over a few rows of fp32, run one after the other. Between two
// matrices there is little to compute, so most of the time of a step would otherwise go to calling it.
#include <algorithm>

#include "convert.h"
#include "lancebill.h"
#include "parallel.h"
#include "row_kernels.h"

namespace lancebill {
namespace {

constexpr int64_t kTaskBytes = 32 << 10;  // of a dense matrix

const RowKernels* kernels_for(int32_t level) {
  if (level >= LANCEBILL_AVX512VNNI && rows_avx512 != nullptr) return rows_avx512();
  if (level >= LANCEBILL_AVX2 && rows_avx2 != nullptr) return rows_avx2();
  if (level == LANCEBILL_NEON && rows_neon != nullptr) return rows_neon();
  return rows_portable == nullptr ? nullptr : rows_portable();
}

struct Run {
  const lancebill_decode& call;
  const RowKernels& kernels;
  int32_t rows;  // of the next step

  const float* in(const lancebill_step& step, int64_t row) const { return step.input + row * step.in_stride; }
  float* out(const lancebill_step& step, int64_t row) const { return step.out + row * step.out_stride; }

  void norm(const lancebill_step& step) const {
    const float* weights = static_cast<const float*>(step.what);
    for (int64_t row = 0; row < rows; row++) {
      kernels.norm(in(step, row), weights, step.width, step.number, out(step, row));
    }
  }

  void dense(const lancebill_step& step) const {
    const auto* matrices = static_cast<const lancebill_dense*>(step.what);
    const int64_t bytes = matrices[0].columns * (matrices[0].type == LANCEBILL_F32 ? 4 : 2);
    const int64_t each = round_up(std::max<int64_t>(kTaskBytes / bytes, 1), kDenseRows);  // rows of a task
    int64_t tasks = 0;
    for (int32_t i = 0; i < step.count; i++) tasks += (matrices[i].rows + each - 1) / each;
    parallel(call.threads, tasks, [&](int64_t task, int) {
      int64_t column = 0;
      const lancebill_dense* matrix = matrices;
      for (;; matrix++) {
        const int64_t own = (matrix->rows + each - 1) / each;
        if (task < own) break;
        task -= own;
        column += matrix->rows;
      }
      const int64_t end = std::min<int64_t>((task + 1) * each, matrix->rows);
      kernels.dense(*matrix, task * each, end, step.input, step.in_stride, rows, step.out + column, step.out_stride);
    });
  }

  int32_t packed(const lancebill_step& step, bool experts) const {
    lancebill_work work = *static_cast<const lancebill_work*>(step.how);
    const int64_t offsets[2] = {0, rows};
    work.x = step.input;
    work.out = step.out;
    work.x_stride = step.in_stride;
    work.out_stride = step.out_stride;
    work.x_type = work.out_type = LANCEBILL_F32;
    if (experts) {
      work.tokens = rows;
    } else {
      work.offsets = offsets;
    }
    work.threads = call.threads;
    work.level = call.level;
    work.scratch = call.scratch;
    return lancebill_run(static_cast<const lancebill_layer*>(step.what), &work);
  }

  int32_t route(const lancebill_step& step) const {
    lancebill_routing routing = *static_cast<const lancebill_routing*>(step.how);
    routing.logits = step.input;
    routing.logits_type = LANCEBILL_F32;
    routing.stride = step.in_stride;
    routing.tokens = rows;
    routing.threads = 1;
    return lancebill_route(&routing);
  }

  // Rotates queries and keys, stores keys and values, then attends. All rows are stored first: rows of one sequence see
  // those before them.
  void attention(const lancebill_step& step) const {
    const auto& heads = *static_cast<const lancebill_heads*>(step.what);
    const int64_t dim = heads.dim, size = call.cache_type == LANCEBILL_F32 ? 4 : 2;
    const int64_t window = heads.window > 0 ? heads.window : INT64_MAX;
    for (int64_t row = 0; row < rows; row++) {
      float* queries = const_cast<float*>(in(step, row));
      float *keys = queries + heads.queries * dim, *values = keys + heads.keys * dim;
      for (int32_t head = 0; head < heads.queries + heads.keys; head++) {
        float* x = queries + head * dim;
        const float* weights = head < heads.queries ? heads.query_norm : heads.key_norm;
        if (weights != nullptr) kernels.norm(x, weights, dim, heads.eps, x);
        kernels.rotate(call.cos + row * heads.angles, call.sin + row * heads.angles, heads.angles, x);
      }
      for (int32_t head = 0; head < heads.keys; head++) {
        const int64_t place = (head * call.capacities[row] + call.positions[row]) * dim;
        kernels.store(keys + head * dim, dim, call.cache_type, cache(row, heads.layer, 0), place);
        kernels.store(values + head * dim, dim, call.cache_type, cache(row, heads.layer, 1), place);
      }
    }
    const int64_t shared = heads.queries / heads.keys;  // heads with the same keys
    const int64_t each = int64_t{rows} * heads.keys >= 2 * call.threads ? shared : 1;
    parallel(call.threads, int64_t{rows} * heads.queries / each, [&](int64_t task, int) {
      const int64_t row = task * each / heads.queries, head = task * each % heads.queries;
      const int64_t place = head / shared * call.capacities[row] * dim * size, end = call.positions[row] + 1;
      const char *keys = cache(row, heads.layer, 0) + place, *values = cache(row, heads.layer, 1) + place;
      const int64_t first = end > window ? end - window : 0;
      kernels.attend(in(step, row) + head * dim, each, keys, values, call.cache_type, dim, first, end, heads.scale,
                     out(step, row) + head * dim);
    });
  }

  char* cache(int64_t row, int32_t layer, int32_t values) const {
    return static_cast<char*>(call.caches[row][2 * layer + values]);
  }

  int32_t one(const lancebill_step& step) {
    switch (step.kind) {
      case LANCEBILL_STEP_NORM: return norm(step), LANCEBILL_OK;
      case LANCEBILL_STEP_DENSE: return dense(step), LANCEBILL_OK;
      case LANCEBILL_STEP_PACKED: return packed(step, false);
      case LANCEBILL_STEP_EXPERTS: return packed(step, true);
      case LANCEBILL_STEP_ROUTE: return route(step);
      case LANCEBILL_STEP_ATTENTION: return attention(step), LANCEBILL_OK;
      case LANCEBILL_STEP_ADD:
        for (int64_t row = 0; row < rows; row++) {
          const auto* by = static_cast<const float*>(step.what);  // one number for each row, through a sigmoid
          const float factor = by == nullptr ? step.number : kernels.sigmoid(by[row]);
          kernels.add(in(step, row), factor, step.width, out(step, row));
        }
        return LANCEBILL_OK;
      case LANCEBILL_STEP_PICK:
        rows = call.picked;
        for (int64_t row = 0; row < rows; row++) {
          std::copy_n(in(step, call.picks[row]), step.width, out(step, row));
        }
        return LANCEBILL_OK;
      case LANCEBILL_STEP_GATE:
        for (int64_t row = 0; row < rows; row++) {
          kernels.gate(*static_cast<const lancebill_layer*>(step.what), in(step, row), step.width, out(step, row));
        }
        return LANCEBILL_OK;
      default: return LANCEBILL_BAD_WORK;
    }
  }
};

}  // namespace
}  // namespace lancebill

using namespace lancebill;

int32_t lancebill_decode_step(const lancebill_decode* call) {
  if (call == nullptr || call->rows < 1 || call->threads < 1) return LANCEBILL_BAD_WORK;
  const RowKernels* kernels = kernels_for(call->level);
  if (kernels == nullptr) return LANCEBILL_NO_LEVEL;
  Run run{*call, *kernels, call->rows};
  for (int32_t i = 0; i < call->count && run.rows > 0; i++) {
    if (const int32_t status = run.one(call->steps[i])) return take_loop_status(), status;
  }
  return take_loop_status();
}
