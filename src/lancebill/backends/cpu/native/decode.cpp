// A whole decode step of a model: a list of small steps over a few rows of fp32, run one after the other. Between two
// matrices there is little to compute, so most of the time of a step would otherwise go to calling it.
#include <algorithm>
#include <vector>

#include "convert.h"
#include "lancebill.h"
#include "parallel.h"
#include "plan.h"
#include "row_kernels.h"

namespace lancebill {
namespace {

constexpr int64_t kTaskBytes = 32 << 10;  // of a dense matrix
constexpr int64_t kTaskRows = 8;          // of what is computed row by row
constexpr int64_t kTasksPerThread = 16;   // of attention: sequences differ in length, so threads take several
constexpr int64_t kBlockTokens = 16;      // of one sequence that are attended to in blocks, at least

const RowKernels* kernels_for(int32_t level) {
  if (level >= LANCEBILL_AMX && rows_amx != nullptr) return rows_amx();
  if (level >= LANCEBILL_AVX512BW && rows_avx512 != nullptr) return rows_avx512();
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

  // one(row) for all rows; few of them are computed sooner than other threads could take them.
  template <class Function>
  void each_row(const Function& one) const {
    const int64_t each = rows >= 2 * kTaskRows ? kTaskRows : rows;
    parallel(call.threads, (rows + each - 1) / each, [&](int64_t task, int) {
      for (int64_t row = task * each; row < std::min<int64_t>((task + 1) * each, rows); row++) one(row);
    });
  }

  void norm(const lancebill_step& step) const {
    const float* weights = static_cast<const float*>(step.what);
    each_row([&](int64_t row) { kernels.norm(in(step, row), weights, step.width, step.number, out(step, row)); });
  }

  void add(const lancebill_step& step) const {
    const auto* by = static_cast<const float*>(step.what);  // one number for each row, through a sigmoid
    each_row([&](int64_t row) {
      kernels.add(in(step, row), by == nullptr ? step.number : kernels.sigmoid(by[row]), step.width, out(step, row));
    });
  }

  void gate(const lancebill_step& step) const {
    const auto& how = *static_cast<const lancebill_layer*>(step.what);
    each_row([&](int64_t row) { kernels.gate(how, in(step, row), step.width, out(step, row)); });
  }

  static bool uses_tiles(const lancebill_dense& matrix) {
    return matrix.type == LANCEBILL_BF16 && matrix.rows >= kDenseTileRows && matrix.columns % kDenseTileColumns == 0;
  }

  // The rows of x for tiles, in scratch memory; nothing where tiles are not used.
  DenseInputs tile_inputs(const lancebill_step& step) const {
    const auto* matrices = static_cast<const lancebill_dense*>(step.what);
    const int32_t fewest = call.tile_rows == 0 ? kTileRowsByDefault : call.tile_rows;
    const bool tiles = kernels.tiles != nullptr && call.scratch != nullptr && fewest > 0 && rows >= fewest;
    if (!tiles || std::none_of(matrices, matrices + step.count, uses_tiles)) return {};
    const int64_t columns = matrices[0].columns;
    const int64_t blocks = (rows + kDenseBlock - 1) / kDenseBlock, numbers = kDenseBlock * kDenseParts * columns;
    uint16_t* start = static_cast<uint16_t*>(call.scratch);
    const DenseInputs inputs = {start, reinterpret_cast<float*>(start + blocks * numbers)};
    parallel(call.threads, blocks, [&](int64_t block, int) {
      const int64_t first = block * kDenseBlock, count = std::min<int64_t>(kDenseBlock, rows - first);
      kernels.tiles->write(in(step, first), step.in_stride, count, columns,
                           {inputs.numbers + block * numbers, inputs.factors + first});
    });
    return inputs;
  }

  bool uses_panels(const lancebill_dense& matrix) const {
    return matrix.rows >= kernels.panels->block && kernels.panels->rows(matrix.columns) > 0;
  }

  // The rows of x for panels, in scratch memory; null where panels are not used.
  const float* panel_inputs(const lancebill_step& step) const {
    const auto* matrices = static_cast<const lancebill_dense*>(step.what);
    const DensePanels& panels = *kernels.panels;
    const auto uses = [&](const lancebill_dense& matrix) { return uses_panels(matrix); };
    const int64_t columns = matrices[0].columns, blocks = (rows + panels.block - 1) / panels.block;
    if (call.scratch == nullptr || rows < panels.from(columns)) return nullptr;
    if (std::none_of(matrices, matrices + step.count, uses)) return nullptr;
    float* start = static_cast<float*>(call.scratch);
    parallel(call.threads, blocks, [&](int64_t block, int) {
      const int64_t first = block * panels.block, count = std::min<int64_t>(panels.block, rows - first);
      panels.write(in(step, first), step.in_stride, count, columns, start + first * panels.columns_of(columns));
    });
    return start;
  }

  void dense(const lancebill_step& step) const {
    const auto* matrices = static_cast<const lancebill_dense*>(step.what);
    const int64_t bytes = matrices[0].columns * (matrices[0].type == LANCEBILL_F32 ? 4 : 2);
    const DenseInputs tiles = tile_inputs(step);
    const float* panels = tiles.numbers == nullptr ? panel_inputs(step) : nullptr;
    const int64_t multiple = tiles.numbers != nullptr ? 2 * kDenseTileRows
                             : panels != nullptr      ? kernels.panels->rows(matrices[0].columns)
                                                      : kernels.dense_rows;
    const int64_t each = round_up(std::max<int64_t>(kTaskBytes / bytes, 1), multiple);  // rows of a task
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
      const int64_t first = task * each, end = std::min<int64_t>(first + each, matrix->rows);
      float* out = step.out + column;
      int64_t rest = first;  // from here on rows are neither in tiles nor in panels
      if (tiles.numbers != nullptr && uses_tiles(*matrix)) {
        rest = end - (end - first) % kDenseTileRows;
        if (rest > first) kernels.tiles->multiply(*matrix, first, rest, tiles, rows, out, step.out_stride);
      } else if (panels != nullptr && uses_panels(*matrix)) {
        rest = end - (end - first) % kernels.panels->block;
        const int64_t next = first + call.threads * each;  // of a thread that takes turns with the others
        if (rest > first) kernels.panels->multiply(*matrix, first, rest, next, panels, rows, out, step.out_stride);
      }
      if (end > rest) kernels.dense(*matrix, rest, end, step.input, step.in_stride, rows, out, step.out_stride);
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
    routing.threads = call.threads;
    return lancebill_route(&routing);
  }

  // Rotates queries and keys, stores keys and values, then attends. All rows are stored first: rows of one sequence see
  // those before them.
  void attention(const lancebill_step& step) const {
    const auto& heads = *static_cast<const lancebill_heads*>(step.what);
    const int64_t dim = heads.dim;
    each_row([&](int64_t row) {
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
    });
    const auto spans = spans_of(heads);
    const int64_t shared = heads.queries / heads.keys;  // heads with the same keys
    const int64_t pieces = static_cast<int64_t>(spans.size());
    const int64_t each = pieces * heads.keys >= 2 * call.threads ? shared : 1;
    const int64_t groups = pieces * heads.queries / each;
    const int64_t tasks = std::min(groups, kTasksPerThread * call.threads);  // taking one may take longer than a group
    parallel(call.threads, tasks, [&](int64_t task, int) {
      for (int64_t group = groups * task / tasks; group < groups * (task + 1) / tasks; group++) {
        attend(step, spans[group * each / heads.queries], group * each % heads.queries, each);
      }
    });
  }

  // Neighbouring tokens of one sequence that are attended to together, or single ones.
  struct Span {
    int64_t row, tokens;
  };

  std::vector<Span> spans_of(const lancebill_heads& heads) const {
    const int64_t most = kAttendRows / (heads.queries / heads.keys);
    const bool blocks = call.tile_rows >= 0 && heads.dim <= kAttendDim && most > 0;
    std::vector<Span> spans;
    for (int64_t row = 0, end; row < rows; row = end) {
      end = row + 1;
      while (end < rows && call.caches[end] == call.caches[row] && call.positions[end] == call.positions[end - 1] + 1) {
        end++;
      }
      const int64_t tokens = blocks && end - row >= kBlockTokens ? most : 1;
      for (int64_t first = row; first < end; first += tokens) spans.push_back({first, std::min(tokens, end - first)});
    }
    return spans;
  }

  // Heads [head, head + count), which have the same keys and values.
  void attend(const lancebill_step& step, Span span, int64_t head, int64_t count) const {
    const auto& heads = *static_cast<const lancebill_heads*>(step.what);
    const int64_t dim = heads.dim, size = call.cache_type == LANCEBILL_F32 ? 4 : 2;
    const int64_t window = heads.window > 0 ? heads.window : INT64_MAX;
    const int64_t place = head / (heads.queries / heads.keys) * call.capacities[span.row] * dim * size;
    const char *keys = cache(span.row, heads.layer, 0) + place, *values = cache(span.row, heads.layer, 1) + place;
    const int64_t position = call.positions[span.row], end = position + 1;
    const float* q = in(step, span.row) + head * dim;
    float* result = out(step, span.row) + head * dim;
    if (span.tokens > 1) {
      return kernels.attend_block({q, result, step.in_stride, step.out_stride, span.tokens, count, dim, position, window,
                                   heads.scale, keys, values, call.cache_type});
    }
    kernels.attend(q, count, keys, values, call.cache_type, dim, end > window ? end - window : 0, end, heads.scale,
                   result);
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
      case LANCEBILL_STEP_ADD: return add(step), LANCEBILL_OK;
      case LANCEBILL_STEP_PICK:
        rows = call.picked;
        for (int64_t row = 0; row < rows; row++) {
          std::copy_n(in(step, call.picks[row]), step.width, out(step, row));
        }
        return LANCEBILL_OK;
      case LANCEBILL_STEP_GATE: return gate(step), LANCEBILL_OK;
      default: return LANCEBILL_BAD_WORK;
    }
  }
};

}  // namespace
}  // namespace lancebill

using namespace lancebill;

int64_t lancebill_dense_bytes(int64_t rows, int64_t columns) {
  const int64_t blocks = (rows + kDenseBlock - 1) / kDenseBlock;
  const int64_t tiles = kDenseParts * columns * sizeof(uint16_t) + sizeof(float);
  const int64_t panels = (columns + kDenseBlock) * sizeof(float);
  return blocks * kDenseBlock * std::max(tiles, panels);
}

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
