// One dense matrix times a few rows: the dense step of a decode step, for engines that run all other steps themselves.
#include <cstdlib>
#include <memory>

#include "lancebill.h"

int32_t lancebill_linear(const void *weights, int32_t type, int32_t rows, int32_t columns, const float *bias,
                         const float *x, int64_t x_stride, int32_t count, float *out, int64_t out_stride,
                         int32_t threads, int32_t level) {
  const lancebill_dense matrix = {weights, bias, type, rows, columns};
  lancebill_step step = {};
  step.kind = LANCEBILL_STEP_DENSE;
  step.count = 1;
  step.input = x;
  step.in_stride = x_stride;
  step.out = out;
  step.out_stride = out_stride;
  step.what = &matrix;
  lancebill_decode call = {};
  call.steps = &step;
  call.count = 1;
  call.rows = count;
  call.threads = threads;
  call.level = level;
  call.tile_rows = -1;  // the order of a sum shall not depend on the number of rows
  const std::unique_ptr<void, decltype(&std::free)> scratch(std::malloc(lancebill_dense_bytes(count, columns)),
                                                             std::free);
  call.scratch = scratch.get();  // without it, a slower way
  return lancebill_decode_step(&call);
}
