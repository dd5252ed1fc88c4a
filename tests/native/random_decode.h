// Random decode steps of one block of a model: attention over several sequences, a router, experts. Their results are
// compared with those of one thread; tests/backends/test_cpu_decode_program.py compares the steps with torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lancebill.h"
#include "random_case.h"

namespace {

// A matrix in one of the types that a step reads.
struct DenseMatrix {
  std::vector<uint8_t> bytes;
  lancebill_dense abi{};

  DenseMatrix(int rows, int columns) {
    abi.type = one_of({LANCEBILL_BF16, LANCEBILL_F16, LANCEBILL_F32});
    abi.rows = rows, abi.columns = columns;
    bytes.resize(size_t(rows) * columns * (abi.type == LANCEBILL_F32 ? 4 : 2));
    for (size_t i = 0; i < size_t(rows) * columns; i++) {
      const double v = normal() / std::sqrt(columns);
      if (abi.type == LANCEBILL_BF16) store_at(bytes, i, bf16_bits(v));
      if (abi.type == LANCEBILL_F16) store_at(bytes, i, f16_bits(v));
      if (abi.type == LANCEBILL_F32) store_at(bytes, i, static_cast<float>(v));
    }
    abi.weights = bytes.data();
  }
};

std::vector<float> normals(size_t count) {
  std::vector<float> values(count);
  for (float& v : values) v = static_cast<float>(normal());
  return values;
}

struct DecodeCase {
  Case layer;  // its experts
  int rows, hidden, queries, keys, dim, sequences, window;
  std::vector<DenseMatrix> qkv, rest;  // rest: after attention, of the router
  std::vector<float> x, norm, cos, sin;
  std::vector<int64_t> positions, capacities;
  std::vector<int32_t> picks;
};

void make_decode_case(DecodeCase& c) {
  do {
    c.layer = Case();
    make_case(c.layer);
  } while (c.layer.linear || c.layer.work.ids == nullptr);
  c.hidden = c.layer.w13.columns, c.rows = pick(1, pick(0, 3) ? 9 : 40), c.sequences = pick(1, 3);
  c.keys = pick(1, 3), c.queries = c.keys * pick(1, 3), c.dim = 2 * pick(2, 20), c.window = pick(0, 1) * pick(1, 6);
  for (int heads : {c.queries, c.keys, c.keys}) c.qkv.emplace_back(heads * c.dim, c.hidden);
  c.rest.emplace_back(c.hidden, c.queries * c.dim);
  c.rest.emplace_back(c.layer.layer.experts, c.hidden);
  c.x = normals(size_t(c.rows) * c.hidden), c.norm = normals(c.hidden);
  c.cos = normals(size_t(c.rows) * c.dim), c.sin = normals(size_t(c.rows) * c.dim);
  for (int row = 0; row < c.rows; row++) {  // row r is the next token of sequence r modulo their number
    c.positions.push_back(row / c.sequences);
    c.capacities.push_back(c.rows);
    if (row == 0 || pick(0, 1)) c.picks.push_back(row);
  }
}

// The picked rows after all steps.
int32_t run_decode(const DecodeCase& c, int32_t level, int32_t threads, std::vector<float>& out) {
  const int width = (c.queries + 2 * c.keys) * c.dim, experts = c.layer.layer.experts, top_k = c.layer.work.top_k;
  std::vector<float> x = c.x, normed(x.size()), qkv(size_t(c.rows) * width), sum(x.size());
  std::vector<float> attended(size_t(c.rows) * c.queries * c.dim), logits(size_t(c.rows) * experts);
  std::vector<int32_t> ids(size_t(c.rows) * top_k);
  std::vector<float> weights(ids.size());
  out.assign(c.picks.size() * c.hidden, NAN);

  std::vector<std::vector<float>> stored(2 * c.sequences, std::vector<float>(size_t(c.keys) * c.rows * c.dim));
  std::vector<void*> pointers;
  for (auto& each : stored) pointers.push_back(each.data());
  std::vector<void* const*> caches;
  for (int row = 0; row < c.rows; row++) caches.push_back(pointers.data() + 2 * (row % c.sequences));

  std::vector<lancebill_dense> matrices;
  for (const DenseMatrix& each : c.qkv) matrices.push_back(each.abi);
  lancebill_heads heads{};
  heads.queries = c.queries, heads.keys = c.keys, heads.dim = heads.angles = c.dim, heads.window = c.window;
  heads.scale = 0.3f;
  lancebill_routing routing{};
  routing.experts = experts, routing.top_k = top_k, routing.scale = 1, routing.renormalize = 1;
  routing.ids = ids.data(), routing.weights = weights.data();
  lancebill_work work = c.layer.work;
  work.ids = ids.data(), work.weights = weights.data(), work.tokens = c.rows;
  work.x = normed.data(), work.out = sum.data(), work.x_type = work.out_type = LANCEBILL_F32;
  work.x_stride = work.out_stride = c.hidden, work.threads = threads, work.level = level;
  const int64_t bytes = lancebill_scratch_bytes(&c.layer.layer, &work);
  if (bytes < 0) return static_cast<int32_t>(-bytes);
  const int64_t dense = lancebill_dense_bytes(c.rows, std::max(c.hidden, c.queries * c.dim));
  std::vector<uint8_t> memory(std::max(bytes, dense) + 64);
  void* scratch = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;

  std::vector<lancebill_step> steps;
  const auto add = [&](int32_t kind, const std::vector<float>& in, std::vector<float>& to, const void* what,
                       const void* how = nullptr, int32_t count = 1) {
    const size_t to_rows = kind == LANCEBILL_STEP_PICK ? c.picks.size() : c.rows;
    steps.push_back({kind, count, in.data(), to.data(), static_cast<int64_t>(in.size() / c.rows),
                     static_cast<int64_t>(to.size() / to_rows), c.hidden, 1e-5f, what, how});
  };
  add(LANCEBILL_STEP_NORM, x, normed, c.norm.data());
  add(LANCEBILL_STEP_DENSE, normed, qkv, matrices.data(), nullptr, 3);
  add(LANCEBILL_STEP_ATTENTION, qkv, attended, &heads);
  add(LANCEBILL_STEP_DENSE, attended, sum, &c.rest[0].abi);
  add(LANCEBILL_STEP_ADD, sum, x, nullptr);
  steps.back().number = 1;
  add(LANCEBILL_STEP_NORM, x, normed, c.norm.data());
  add(LANCEBILL_STEP_DENSE, normed, logits, &c.rest[1].abi);
  add(LANCEBILL_STEP_ROUTE, logits, logits, nullptr, &routing);
  add(LANCEBILL_STEP_EXPERTS, normed, sum, &c.layer.layer, &work);
  add(LANCEBILL_STEP_ADD, sum, x, nullptr);
  steps.back().number = 1;
  add(LANCEBILL_STEP_PICK, x, out, nullptr);

  lancebill_decode call{};
  call.steps = steps.data(), call.count = static_cast<int32_t>(steps.size()), call.rows = c.rows;
  call.threads = threads, call.level = level, call.scratch = scratch;
  call.cos = c.cos.data(), call.sin = c.sin.data();
  call.positions = c.positions.data(), call.capacities = c.capacities.data(), call.caches = caches.data();
  call.cache_type = LANCEBILL_F32;
  call.picked = static_cast<int32_t>(c.picks.size()), call.picks = c.picks.data();
  return lancebill_decode_step(&call);
}

}  // namespace
