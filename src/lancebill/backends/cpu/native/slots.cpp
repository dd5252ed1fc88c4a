// The slots of a large batch: which experts its rows use, and the rows that use some of them. One thread passes once over
// them, which takes less time than to wake others, and without branches, because which expert comes next is anyone's guess.
#include <algorithm>
#include <vector>

#include "lancebill.h"

namespace {

// Where tables have the number of this slot's id. They have one more at either end, for ids that are no expert.
int32_t place_of(const lancebill_slots& slots, int64_t slot) {
  return std::clamp(slots.ids[slot], -1, slots.mapped) + 1;
}

}  // namespace

void lancebill_count_slots(const lancebill_slots* given, int32_t experts, double* counts) {
  const lancebill_slots& slots = *given;
  std::vector<int32_t> of_id(slots.mapped + 2);
  for (int64_t slot = 0; slot < slots.tokens * slots.top_k; slot++) of_id[place_of(slots, slot)]++;
  std::fill_n(counts, experts, 0.0);
  for (int32_t id = 0; id < slots.mapped; id++) {
    const int32_t expert = slots.expert_map[id];
    if (expert >= 0 && expert < experts) counts[expert] += of_id[id + 1];
  }
}

int64_t lancebill_take_rows(const lancebill_slots* given, int32_t* rows, int32_t* ids, float* weights) {
  const lancebill_slots& slots = *given;
  std::vector<uint8_t> is_expert(slots.mapped + 2);
  for (int32_t id = 0; id < slots.mapped; id++) is_expert[id + 1] = slots.expert_map[id] >= 0;
  int64_t taken = 0;
  for (int64_t token = 0; token < slots.tokens; token++) {
    const int64_t first = token * slots.top_k, last = first + slots.top_k;
    uint8_t used = 0;
    for (int64_t slot = first; slot < last; slot++) used |= is_expert[place_of(slots, slot)];
    if (!used) continue;
    std::copy(slots.ids + first, slots.ids + last, ids + taken * slots.top_k);
    std::copy(slots.weights + first, slots.weights + last, weights + taken * slots.top_k);
    rows[taken++] = static_cast<int32_t>(token);
  }
  return taken;
}
