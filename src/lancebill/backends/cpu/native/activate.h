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

// use(function) with the layer's function of a gate and an up value; without a gate it ignores the second.
template <class Use>
LANCEBILL_INLINE void with_activation(const lancebill_layer& layer, const Use& use) {
  const float limit = layer.limit > 0 ? layer.limit : __builtin_inff(), alpha = layer.alpha, beta = layer.beta;
  switch (layer.activation) {
    case LANCEBILL_SILU:
      return use([=](float gate, float up) { return silu(clamp_high(gate, limit)) * clamp_both(up, limit); });
    case LANCEBILL_GELU:
      return use([=](float gate, float up) { return gelu(gate) * up; });
    case LANCEBILL_GELU_TANH:
      return use([=](float gate, float up) { return gelu_tanh(gate) * up; });
    case LANCEBILL_SWIGLUOAI:
      return use([=](float gate, float up) {
        const float g = clamp_high(gate, limit);
        return g * sigmoid(g * alpha) * (clamp_both(up, limit) + beta);
      });
    case LANCEBILL_SWIGLUSTEP:
      return use([=](float gate, float up) { return clamp_high(silu(gate), limit) * clamp_both(up, limit); });
    case LANCEBILL_SITU:
      return use([=](float gate, float up) {
        const float squashed = layer.limit > 0 ? limit * __builtin_tanhf(up / limit) : up;
        return beta * __builtin_tanhf(gate / beta) * sigmoid(gate) * squashed;
      });
    case LANCEBILL_RELU2_NO_MUL:
      return use([=](float gate, float) { return gate < 0 ? 0 : gate * gate; });
    case LANCEBILL_SILU_NO_MUL:
      return use([=](float gate, float) { return silu(gate); });
    case LANCEBILL_GELU_NO_MUL:
      return use([=](float gate, float) { return gelu(gate); });
    case LANCEBILL_GELU_TANH_NO_MUL:
      return use([=](float gate, float) { return gelu_tanh(gate); });
    default:
      __builtin_trap();  // `plan` rejects all others
  }
}

// Sixteen values.
template <class Function>
LANCEBILL_INLINE void apply(const Function& function, const float* __restrict gate, const float* __restrict up,
                            float* __restrict out) {
  for (int i = 0; i < kRows; i++) out[i] = function(gate[i], up[i]);
}

inline void activate(const lancebill_layer& layer, const float* __restrict gate, const float* __restrict up,
                     float* __restrict out) {
  with_activation(layer, [=](auto function) __attribute__((always_inline)) { apply(function, gate, up, out); });
}

}  // namespace
}  // namespace lancebill
