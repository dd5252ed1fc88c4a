// The activation functions between the two GEMMs, in fp32, sixteen values at a time; lancebill.moe.activation defines
// them.
#pragma once

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

// One comparison each, so that compilers emit vector min and max. NaN passes through.
inline float clamp_high(float x, float limit) { return limit < x ? limit : x; }
inline float clamp_low(float x, float limit) { return limit > x ? limit : x; }
inline float clamp_both(float x, float limit) { return clamp_low(clamp_high(x, limit), -limit); }

// e^x to about one unit in the last place, with x clamped to [-87, 87]. NaN is clamped too; callers multiply by x,
// which keeps it. Clamps integers: with float comparisons compilers precompute the results at both limits and then
// select among three values instead of vectorising a min.
inline float exponential(float x) {
  const float bounded = with_sign(bits_as<float>(min_of(bits_as<uint32_t>(magnitude(x)), bits_as<uint32_t>(87.0f))), x);
  const float power = rint_small(bounded * 1.44269504f);
  const float remainder = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;  // ln 2 in two parts
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  float sum = 1.0f / 5040;
  for (float factor : kTaylor) sum = sum * remainder + factor;
  return sum * bits_as<float>((to_int(power) + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
inline float silu(float x) { return x / (1.0f + exponential(-x)); }
inline float gelu(float x) { return 0.5f * x * (1.0f + __builtin_erff(x * 0.707106781f)); }
inline float gelu_tanh(float x) {  // 1 + tanh(z) = 2 sigmoid(2z)
  return x * sigmoid(2 * 0.797884561f * (x + 0.044715f * x * x * x));
}

template <class Function>
LANCEBILL_INLINE void for_each_row(float* __restrict out, Function function) {
  for (int i = 0; i < kRows; i++) out[i] = function(i);
}

// out = function(gate) * up; without a gate, out = function(gate).
inline void activate(const lancebill_layer& layer, const float* __restrict gate, const float* __restrict up,
                     float* __restrict out) {
  const float limit = layer.limit > 0 ? layer.limit : __builtin_inff(), alpha = layer.alpha, beta = layer.beta;
  switch (layer.activation) {
    case LANCEBILL_SILU:
      return for_each_row(out, [=](int i) { return silu(clamp_high(gate[i], limit)) * clamp_both(up[i], limit); });
    case LANCEBILL_GELU:
      return for_each_row(out, [=](int i) { return gelu(gate[i]) * up[i]; });
    case LANCEBILL_GELU_TANH:
      return for_each_row(out, [=](int i) { return gelu_tanh(gate[i]) * up[i]; });
    case LANCEBILL_SWIGLUOAI:
      return for_each_row(out, [=](int i) {
        const float g = clamp_high(gate[i], limit);
        return g * sigmoid(g * alpha) * (clamp_both(up[i], limit) + beta);
      });
    case LANCEBILL_SWIGLUSTEP:
      return for_each_row(out, [=](int i) { return clamp_high(silu(gate[i]), limit) * clamp_both(up[i], limit); });
    case LANCEBILL_SITU:
      return for_each_row(out, [=](int i) {
        const float squashed = layer.limit > 0 ? limit * __builtin_tanhf(up[i] / limit) : up[i];
        return beta * __builtin_tanhf(gate[i] / beta) * sigmoid(gate[i]) * squashed;
      });
    case LANCEBILL_RELU2_NO_MUL:
      return for_each_row(out, [=](int i) { return gate[i] < 0 ? 0 : gate[i] * gate[i]; });
    case LANCEBILL_SILU_NO_MUL:
      return for_each_row(out, [=](int i) { return silu(gate[i]); });
    case LANCEBILL_GELU_NO_MUL:
      return for_each_row(out, [=](int i) { return gelu(gate[i]); });
    case LANCEBILL_GELU_TANH_NO_MUL:
      return for_each_row(out, [=](int i) { return gelu_tanh(gate[i]); });
    default:
      __builtin_trap();  // `plan` rejects all others
  }
}

}  // namespace
}  // namespace lancebill
