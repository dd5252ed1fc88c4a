#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "convert.h"
#include "inputs.h"

namespace lancebill {
namespace {

constexpr int kPlaneBase = 128;  // table entries are 128 * high + low: 7-bit planes cannot saturate vpmaddubsw (AVX2)
constexpr int kMaxEntry = kPlaneBase * kPlaneBase - 1;
constexpr int kMaxFloatEntry = (1 << 24) - 1;  // fp32 holds every integer up to it

constexpr int kScaleBytes[] = {0, 2, 2, 4, 1, 1, 1};  // by enum lancebill_scale
constexpr int kZeroBytes[] = {0, 1, 4, 1};            // by enum lancebill_zero

bool within(int32_t value, int32_t low, int32_t high) { return low <= value && value <= high; }

int minifloat_bias(int mantissa) { return (1 << (6 - mantissa)) - 1; }

float minifloat(uint32_t code, int mantissa) {
  const int bias = minifloat_bias(mantissa);
  const int exponent = static_cast<int>((code & 0x7f) >> mantissa);
  const float fraction = static_cast<float>(code & ((1u << mantissa) - 1)) / static_cast<float>(1 << mantissa);
  const float size = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return code & 0x80 ? -size : size;
}

bool has_valid_factor(const lancebill_matrix& m) {
  if (m.scale != LANCEBILL_SCALE_I8) return m.factor == 0 && m.zero != LANCEBILL_ZERO_OFFSET_I8;
  if (m.zero == LANCEBILL_ZERO_OFFSET_F32 || m.codes == LANCEBILL_BYTE || m.codes == LANCEBILL_FLOAT8) return false;
  const int32_t groups = m.factor / m.group;
  return groups >= 1 && m.factor % m.group == 0 && (groups & (groups - 1)) == 0;
}

// Whether the entries of a table are in range, and all else fits the kernel that multiplies them.
bool has_valid_table(const lancebill_matrix& m) {
  const auto [low, high] = std::minmax_element(m.table, m.table + 16);
  if (*low < 0 || *high > kMaxFloatEntry) return false;
  const bool integers = m.scale == LANCEBILL_SCALE_I8 || m.zero == LANCEBILL_ZERO_U8;
  return *high <= kMaxEntry || (m.input == LANCEBILL_INPUT_F32 && !integers);
}

bool is_valid(const lancebill_matrix& m) {
  const bool table = m.codes == LANCEBILL_TABLE4, floats = m.codes == LANCEBILL_FLOAT8;
  if (m.rows < 1 || m.columns < 1 || !within(m.codes, LANCEBILL_TABLE4, LANCEBILL_BITS6)) return false;
  if (m.group != 16 && m.group != 32 && m.group != 64 && m.group != 128) return false;
  if (!within(m.scale, LANCEBILL_SCALE_NONE, LANCEBILL_SCALE_I8)) return false;
  if (!within(m.zero, LANCEBILL_ZERO_NONE, LANCEBILL_ZERO_OFFSET_I8)) return false;
  if (!has_valid_factor(m)) return false;
  if (!within(m.input, LANCEBILL_INPUT_BF16, LANCEBILL_INPUT_E4M3)) return false;
  if (m.input_group < 0 || m.input_group % m.group != 0) return false;
  if (m.rotation < 0 || (m.rotation & (m.rotation - 1)) != 0) return false;
  if (m.rotation != 0 && m.columns % m.rotation != 0) return false;
  if (m.code_bytes == nullptr || (m.scale_bytes == nullptr) != (m.scale == LANCEBILL_SCALE_NONE)) return false;
  if ((m.zero_bytes == nullptr) != (m.zero == LANCEBILL_ZERO_NONE)) return false;
  if (floats && (!within(m.mantissa, 2, 4) || m.zero == LANCEBILL_ZERO_U8)) return false;
  if (table && !has_valid_table(m)) return false;
  if (!floats && !within(m.center, 0, table ? kMaxFloatEntry : kMaxEntry)) return false;
  // With a permutation, INT8 inputs quantised per group cannot keep one scale per group.
  return !(m.perm != nullptr && m.input == LANCEBILL_INPUT_INT8 && m.input_group != 0 && m.input_scale == nullptr);
}

int32_t fit_layer(const lancebill_layer& layer, Call& call) {
  if (layer.experts < 1 || layer.w13 == nullptr) return LANCEBILL_BAD_LAYER;
  if (!is_valid(*layer.w13) || (layer.w2 != nullptr && !is_valid(*layer.w2))) return LANCEBILL_BAD_MATRIX;
  call.two_gemms = layer.w2 != nullptr;
  if (!call.two_gemms) {
    call.last = describe(*layer.w13, false);
    return LANCEBILL_OK;
  }
  const bool ungated = within(layer.activation, LANCEBILL_RELU2_NO_MUL, LANCEBILL_GELU_TANH_NO_MUL);
  call.gated = within(layer.activation, LANCEBILL_SILU, LANCEBILL_SITU);
  call.intermediate = layer.w2->columns;
  if (!call.gated && !ungated) return LANCEBILL_BAD_LAYER;
  if (layer.w13->rows != layer.w2->columns * (call.gated ? 2 : 1)) return LANCEBILL_BAD_LAYER;
  const bool needs_limit = within(layer.activation, LANCEBILL_SWIGLUOAI, LANCEBILL_SWIGLUSTEP);
  if (needs_limit && layer.limit <= 0) return LANCEBILL_BAD_LAYER;
  call.first = describe(*layer.w13, call.gated);
  call.last = describe(*layer.w2, false);
  return LANCEBILL_OK;
}

int32_t fit_work(const lancebill_layer& layer, const lancebill_work& work, Call& call) {
  const bool indexed = call.by_tokens();
  if (indexed == (work.offsets != nullptr) || work.threads < 1) return LANCEBILL_BAD_WORK;
  if (!within(work.x_type, LANCEBILL_BF16, LANCEBILL_F32) || !within(work.out_type, LANCEBILL_BF16, LANCEBILL_F32)) {
    return LANCEBILL_BAD_WORK;
  }
  if (indexed && (work.tokens < 0 || work.top_k < 1)) return LANCEBILL_BAD_WORK;
  if (indexed && !(within(work.id_words, 1, 2) && within(work.weight_type, LANCEBILL_BF16, LANCEBILL_F32))) {
    return LANCEBILL_BAD_WORK;
  }
  call.slots = indexed ? int64_t{work.tokens} * work.top_k : work.offsets[layer.experts];
  call.summed_rows = indexed ? work.tokens : 0;
  return call.slots < 0 || (call.slots > 0 && (!work.x || !work.out)) ? LANCEBILL_BAD_WORK : LANCEBILL_OK;
}

// Allocates aligned pieces of the scratch memory; without memory it only counts bytes.
class ScratchAllocator {
 public:
  explicit ScratchAllocator(uint8_t* memory) : memory_(memory) {}

  template <class T>
  void allocate(T*& piece, int64_t count) {
    piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kUnit);
  }

  int64_t used() const { return used_; }

 private:
  uint8_t* memory_;
  int64_t used_ = 0;
};

// Whether `out` can hold the sums while they grow.
bool fits_sums(const Call& call) {
  const lancebill_work& work = *call.work;
  return call.summed_rows > 0 && work.out_type == LANCEBILL_F32 && work.out_stride == call.last.rows &&
         call.last.matrix->rows == call.last.rows && reinterpret_cast<uintptr_t>(work.out) % kUnit == 0;
}

void lay_out_inputs(ScratchAllocator& allocator, const Call& call, const Packed& packed, Inputs& inputs) {
  const bool tiles = call.tile_rows > 0 && fits_tiles(packed);
  inputs.stride = max_of(operand_bytes(packed), tiles ? tile_operand_bytes(packed) : int64_t{0});
  const int64_t spare = tiles ? kTileRows * kUnit : 0;  // the last tile is read in full
  allocator.allocate(inputs.records, call.slots * inputs.stride + spare);
  allocator.allocate(inputs.shared, call.slots);
  allocator.allocate(inputs.factors, call.slots);
}

GroupArray group_array(int bytes, bool factored, int32_t groups, int32_t record_groups) {
  GroupArray array;
  array.row = kRows * bytes;
  array.factors = factored ? kRows * static_cast<int32_t>(sizeof(float)) : 0;
  array.record_shift = factored ? __builtin_ctz(static_cast<uint32_t>(record_groups)) : 0;
  array.block = array.record_of(groups + (1 << array.record_shift) - 1);
  return array;
}

// Whether codes less their zero point are 16-bit integers, and sums of their products with the inputs 32-bit integers.
bool fits_words(const Packed& p) {
  const lancebill_matrix& m = *p.matrix;
  if (p.in_floats || planes_of(p) != 2 || m.factor > kPanelColumns) return false;
  const int32_t top = m.codes == LANCEBILL_TABLE4 ? p.top : m.codes == LANCEBILL_BYTE ? 255 : 63;
  const int32_t zero = m.zero == LANCEBILL_ZERO_U8 ? 255 : m.center;
  const int64_t largest = std::max(top, zero), inputs = static_cast<int64_t>(kTop[2]) * m.group;
  return top <= 255 && largest * inputs <= INT32_MAX;
}

}  // namespace

Packed describe(const lancebill_matrix& m, bool gated) {
  Packed p;
  p.matrix = &m;
  p.strip = m.codes == LANCEBILL_TABLE4 ? 2 : 1;
  p.rows = gated ? 2 * round_up(m.rows / 2, kRows) : round_up(m.rows, p.strip * kRows);
  p.columns = round_up(m.columns, std::max(m.group, kTileColumns));
  p.blocks = static_cast<int32_t>(p.rows / kRows);
  p.groups = static_cast<int32_t>(p.columns / m.group);
  p.strip_bytes = p.columns * kRows;
  if (m.codes == LANCEBILL_BITS6) p.strip_bytes = p.strip_bytes / kSixBitUnits * kSixBitLines;
  p.record_groups = m.factor == 0 ? p.groups : m.factor / m.group;
  p.scale = group_array(kScaleBytes[m.scale], m.scale == LANCEBILL_SCALE_I8, p.groups, p.record_groups);
  p.zero = group_array(kZeroBytes[m.zero], m.zero == LANCEBILL_ZERO_OFFSET_I8, p.groups, p.record_groups);
  p.top = m.codes == LANCEBILL_TABLE4 ? *std::max_element(m.table, m.table + 16) : 0;
  p.in_floats = m.codes == LANCEBILL_FLOAT8 || p.top > kMaxEntry;
  p.plain_entries = m.codes == LANCEBILL_TABLE4;
  for (int i = 0; i < 16; i++) p.plain_entries = p.plain_entries && m.table[i] == i;
  p.unit = m.step * (m.scale == LANCEBILL_SCALE_E4M3 ? kE4m3Unit : 1);
  constexpr int kFp16Bias = 15;
  if (m.codes == LANCEBILL_FLOAT8) p.minifloat_unit = std::ldexp(1.0f, kFp16Bias - minifloat_bias(m.mantissa));
  p.fits_words = fits_words(p);
  const int32_t center = m.zero == LANCEBILL_ZERO_U8 ? 0 : m.center;
  for (int i = 0; i < 16; i++) p.values[i] = static_cast<float>(m.table[i] - center);
  for (uint32_t i = 0; i < 256; i++) {
    p.minifloats[i] = m.codes == LANCEBILL_FLOAT8 ? minifloat(i, m.mantissa) : 0;
  }
  return p;
}

bool fits_tiles(const Packed& packed) {
  const lancebill_matrix& m = *packed.matrix;
  const bool quantised = m.input == LANCEBILL_INPUT_INT8 || m.input == LANCEBILL_INPUT_E4M3;
  return m.input == LANCEBILL_INPUT_BF16 || (quantised && (m.input_group == 0 || m.input_scale != nullptr));
}

int32_t plan(const lancebill_layer* layer, const lancebill_work* work, bool tiles, Call& call) {
  if (layer == nullptr) return LANCEBILL_BAD_LAYER;
  if (work == nullptr) return LANCEBILL_BAD_WORK;
  call.layer = layer;
  call.work = work;
  if (const int32_t status = fit_layer(*layer, call)) return status;
  if (const int32_t status = fit_work(*layer, *work, call)) return status;
  if (tiles && work->tile_rows >= 0) call.tile_rows = work->tile_rows == 0 ? kTileRowsByDefault : work->tile_rows;
  return LANCEBILL_OK;
}

int64_t lay_out(Call& call, uint8_t* memory) {
  ScratchAllocator allocator(memory);
  allocator.allocate(call.offsets, call.layer->experts + 1);
  allocator.allocate(call.active, call.layer->experts);
  allocator.allocate(call.row_of, call.slots);
  allocator.allocate(call.weight_of, call.slots);
  allocator.allocate(call.slot_of, call.by_tokens() ? call.slots : 0);
  if (call.two_gemms) {
    lay_out_inputs(allocator, call, call.first, call.first_inputs);
    allocator.allocate(call.hidden, call.slots * call.hidden_stride());
  }
  lay_out_inputs(allocator, call, call.last, call.last_inputs);
  allocator.allocate(call.sums, call.summed_rows * call.last.rows);
  if (memory != nullptr && fits_sums(call)) call.sums = static_cast<float*>(call.work->out);
  call.row_floats = max_of(call.first.columns, call.last.columns);
  const int64_t expanded = call.tile_rows > 0 ? 2 * 2 * kRows * 2 * call.row_floats : 0;  // two pairs of row blocks
  call.per_thread_bytes = round_up(3 * 4 * call.row_floats + expanded, 4096);         // no page is shared by threads
  allocator.allocate(call.per_thread, call.per_thread_bytes * call.work->threads);
  return allocator.used();
}

static float routing_weight(const lancebill_work& work, int64_t token, int64_t choice) {
  if (work.weights == nullptr) return 1;
  float weight;
  load_row(work.weights, work.weight_type, token * work.weight_row + choice * work.weight_column, 1, &weight);
  return weight;
}

int32_t local_expert(const Call& call, int64_t token, int64_t choice) {
  const lancebill_work& work = *call.work;
  const int32_t* at = work.ids + token * work.id_row + choice * work.id_column;
  int64_t id = *at;
  if (work.id_words == 2) std::memcpy(&id, at, sizeof id);
  if (work.expert_map != nullptr) id = id >= 0 && id < work.mapped ? work.expert_map[id] : -1;
  return id >= 0 && id < call.layer->experts ? static_cast<int32_t>(id) : -1;
}

int32_t sort_slots(Call& call) {
  const lancebill_work& work = *call.work;
  const int32_t experts = call.layer->experts;
  std::memset(call.offsets, 0, sizeof(int64_t) * (experts + 1));
  if (!call.by_tokens()) {
    std::copy_n(work.offsets, experts + 1, call.offsets);
    for (int64_t s = 0; s < call.slots; s++) {
      call.row_of[s] = work.rows == nullptr ? s : work.rows[s];
      call.weight_of[s] = 1;
    }
  } else {
    for (int64_t token = 0; token < work.tokens; token++) {
      for (int64_t choice = 0; choice < work.top_k; choice++) {
        const int32_t expert = local_expert(call, token, choice);
        if (expert >= 0) call.offsets[expert]++;
      }
    }
    int64_t end = 0;  // turn counts into ends; filling each expert backwards from its end keeps the order of ids
    for (int32_t e = 0; e < experts; e++) call.offsets[e] = end += call.offsets[e];
    call.offsets[experts] = end;
    for (int64_t token = work.tokens; token-- > 0;) {
      for (int64_t choice = work.top_k; choice-- > 0;) {
        const int32_t expert = local_expert(call, token, choice);
        const int64_t s = expert < 0 ? -1 : --call.offsets[expert];
        call.slot_of[token * work.top_k + choice] = s;
        if (s < 0) continue;
        call.row_of[s] = token;
        call.weight_of[s] = routing_weight(work, token, choice);
      }
    }
  }
  call.actives = 0;
  for (int32_t e = 0; e < experts; e++) {
    if (call.offsets[e] > call.offsets[e + 1]) return LANCEBILL_BAD_WORK;
    if (call.offsets[e] < call.offsets[e + 1]) call.active[call.actives++] = e;
  }
  return LANCEBILL_OK;
}

}  // namespace lancebill
