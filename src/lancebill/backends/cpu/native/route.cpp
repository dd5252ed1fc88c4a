// flags: -ffp-contract=off
// From router logits to ids and weights, as lancebill.moe.routing defines it: scores in double, rounded once; ties go to
// the lowest index. One token takes a few microseconds, nearly all of them in exp, so there is no version per level.
#include <cmath>
#include <limits>

#include "convert.h"
#include "lancebill.h"
#include "parallel.h"

namespace lancebill {
namespace {

constexpr int kTokensPerTask = 32;  // about 100 us; waking a thread for less does not pay
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();  // for -inf, which marks excluded groups

float load(const void* row, int type, int64_t i) {
  if (type == LANCEBILL_F32) return static_cast<const float*>(row)[i];
  const uint16_t half = static_cast<const uint16_t*>(row)[i];
  return type == LANCEBILL_BF16 ? from_bf16(half) : from_f16(half);
}

float rounded(double score) { return static_cast<float>(score); }

// `values` may be `scores` itself. A NaN makes its score NaN, in a softmax all scores.
void score(int scoring, const float* values, int count, float* scores) {
  if (scoring == LANCEBILL_SCORING_SOFTMAX) {
    double largest = -kInfinity, parts[LANCEBILL_MOST_EXPERTS], total = 0;
    for (int i = 0; i < count; i++) largest = max_of<double>(largest, values[i]);
    for (int i = 0; i < count; i++) total += parts[i] = std::exp(values[i] - largest);
    for (int i = 0; i < count; i++) scores[i] = rounded(parts[i] / total);
    return;
  }
  for (int i = 0; i < count; i++) {
    const double x = values[i];
    switch (scoring) {
      case LANCEBILL_SCORING_SIGMOID: scores[i] = rounded(1 / (1 + std::exp(-x))); break;
      case LANCEBILL_SCORING_SQRTSOFTPLUS: scores[i] = rounded(std::sqrt(x > 20 ? x : std::log1p(std::exp(x)))); break;
      default: scores[i] = values[i];
    }
  }
}

// The order of top-k: NaN is above every number, as in torch.
bool above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Indices of the `count` largest values, largest first; of equal values the first comes first.
void first_largest(const float* values, int total, int count, int32_t* indices) {
  int held = 0;
  for (int i = 0; i < total; i++) {
    if (held == count && !above(values[i], values[indices[held - 1]])) continue;
    int place = held < count ? held++ : held - 1;
    for (; place > 0 && above(values[i], values[indices[place - 1]]); place--) indices[place] = indices[place - 1];
    indices[place] = i;
  }
}

// Sets the selection to -inf outside the strongest groups.
void exclude_groups(const lancebill_routing& r, float* selection) {
  const int size = r.experts / r.n_group;
  float strength[LANCEBILL_MOST_EXPERTS];
  int32_t kept[LANCEBILL_MOST_EXPERTS];
  for (int g = 0; g < r.n_group; g++) {
    int32_t best[2];
    const float* group = selection + g * size;
    first_largest(group, size, r.correction == nullptr ? 1 : 2, best);
    strength[g] = group[best[0]] + (r.correction == nullptr ? 0.0f : group[best[1]]);
  }
  first_largest(strength, r.n_group, r.topk_group, kept);
  bool chosen[LANCEBILL_MOST_EXPERTS] = {};
  for (int i = 0; i < r.topk_group; i++) chosen[kept[i]] = true;
  for (int i = 0; i < r.experts; i++) {
    if (!chosen[i / size]) selection[i] = -kInfinity;
  }
}

// Experts by token id; entries that are not an expert become -1, and so does padding (negative token ids).
void look_up(const lancebill_routing& r, int64_t token, int32_t* ids) {
  const int64_t row = r.input_ids[token];
  for (int slot = 0; slot < r.top_k; slot++) {
    int64_t id = -1;
    if (row >= 0) {
      const int64_t at = row * r.top_k + slot;
      id = r.table_is_int64 ? static_cast<const int64_t*>(r.table)[at] : static_cast<const int32_t*>(r.table)[at];
    }
    ids[slot] = id >= 0 && id < r.experts ? static_cast<int32_t>(id) : -1;
  }
}

void route_token(const lancebill_routing& r, int64_t token) {
  float values[LANCEBILL_MOST_EXPERTS], selection[LANCEBILL_MOST_EXPERTS];
  const int element = r.logits_type == LANCEBILL_F32 ? 4 : 2;
  const char* row = static_cast<const char*>(r.logits) + token * r.stride * element;
  for (int i = 0; i < r.experts; i++) {
    values[i] = load(row, r.logits_type, i) + (r.bias == nullptr ? 0.0f : r.bias[i]);
  }
  if (!r.after_top_k) score(r.scoring, values, r.experts, values);
  int32_t* ids = r.ids + token * r.top_k;
  if (r.input_ids != nullptr) {
    look_up(r, token, ids);
  } else {
    for (int i = 0; i < r.experts; i++) {
      selection[i] = values[i] + (r.correction == nullptr ? 0.0f : r.correction[i]);
      if (std::isnan(selection[i])) values[i] = selection[i];
      if (selection[i] < kLowest) selection[i] = kLowest;
    }
    if (r.n_group > 1) exclude_groups(r, selection);
    first_largest(selection, r.experts, r.top_k, ids);
  }

  float* weights = r.weights + token * r.top_k;
  float total = 0, identity = 0;
  for (int slot = 0; slot < r.top_k; slot++) weights[slot] = ids[slot] < 0 ? -kInfinity : values[ids[slot]];
  if (r.after_top_k) score(r.scoring, weights, r.top_k, weights);
  for (int slot = 0; slot < r.top_k; slot++) {
    if (ids[slot] < 0) weights[slot] = 0;
    total += weights[slot];
  }
  total += r.epsilon;
  const float divisor = r.renormalize && !(total <= 0) ? total : 1.0f;
  for (int slot = 0; slot < r.top_k; slot++) {
    weights[slot] = weights[slot] / divisor * r.scale;
    if (ids[slot] >= r.experts - r.zero_experts) {
      identity += weights[slot];
      ids[slot] = -1, weights[slot] = 0;
    }
  }
  if (r.identity != nullptr) r.identity[token] = identity;
}

bool possible(const lancebill_routing& r) {
  const int groups = max_of(r.n_group, 1);
  return r.experts >= 1 && r.experts <= LANCEBILL_MOST_EXPERTS && r.top_k >= 1 && r.top_k <= r.experts &&
         r.zero_experts >= 0 && r.zero_experts < r.experts && (r.zero_experts == 0 || r.identity != nullptr) &&
         r.experts % groups == 0 && r.topk_group <= r.n_group &&
         (r.n_group <= 1 || (r.topk_group >= 1 && r.top_k <= r.topk_group * (r.experts / groups))) &&
         (r.n_group <= 1 || r.correction == nullptr || r.experts / groups >= 2) && r.logits_type >= LANCEBILL_BF16 &&
         r.logits_type <= LANCEBILL_F32 && r.tokens >= 0 && r.threads >= 1 && (r.input_ids == nullptr || r.table != nullptr);
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

int32_t lancebill_route(const lancebill_routing* routing) {
  const lancebill_routing& r = *routing;
  if (!possible(r)) return LANCEBILL_BAD_WORK;
  for (int64_t token = 0; r.input_ids != nullptr && token < r.tokens; token++) {
    if (r.input_ids[token] >= r.vocabulary) return LANCEBILL_BAD_TOKEN;
  }
  parallel(r.threads, (r.tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    const int64_t first = task * kTokensPerTask;
    for (int64_t token = first; token < min_of<int64_t>(first + kTokensPerTask, r.tokens); token++) route_token(r, token);
  });
  return take_loop_status();
}
