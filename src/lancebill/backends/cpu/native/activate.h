// The functions between the two products, sixteen values at a time, in fp32: lancebill.moe.activation says what they are.
#pragma once

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

// Single comparisons, NaN passes through: vectors have instructions for these, and none for a choice of three.
inline float below(float x, float limit) { return limit < x ? limit : x; }
inline float above(float x, float limit) { return limit > x ? limit : x; }
inline float between(float x, float limit) { return above(below(x, limit), -limit); }

// e^x to about one unit in the last place; beyond the range of fp32's normal numbers it stays at the ends, and so it does
// for NaN: whoever calls multiplies by x. Sizes are compared as integers: comparing floats, compilers work out the ends'
// results beforehand, and choose among three that are all computed.
inline float exponential(float x) {
  const float bounded = with_sign(bits_as<float>(least(bits_as<uint32_t>(magnitude(x)), bits_as<uint32_t>(87.0f))), x);
  const float power = rint_small(bounded * 1.44269504f);
  const float rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;  // ln 2 in two parts
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  float sum = 1.0f / 5040;
  for (float factor : kTaylor) sum = sum * rest + factor;
  return sum * bits_as<float>((to_int(power) + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
inline float silu(float x) { return x / (1.0f + exponential(-x)); }
inline float gelu(float x) { return 0.5f * x * (1.0f + __builtin_erff(x * 0.707106781f)); }
inline float gelu_tanh(float x) {  // 1 + tanh(z) = 2 sigmoid(2z)
  return x * sigmoid(2 * 0.797884561f * (x + 0.044715f * x * x * x));
}

template <class Function>
LANCEBILL_INLINE void sixteen(float* __restrict out, Function function) {
  for (int i = 0; i < kRows; i++) out[i] = function(i);
}

// out = function(gate) * up, for functions without a gate function(gate).
inline void activate(const lancebill_layer& layer, const float* __restrict gate, const float* __restrict up,
                     float* __restrict out) {
  const float limit = layer.limit > 0 ? layer.limit : __builtin_inff(), alpha = layer.alpha, beta = layer.beta;
  switch (layer.activation) {
    case LANCEBILL_SILU:
      return sixteen(out, [=](int i) { return silu(below(gate[i], limit)) * between(up[i], limit); });
    case LANCEBILL_GELU:
      return sixteen(out, [=](int i) { return gelu(gate[i]) * up[i]; });
    case LANCEBILL_GELU_TANH:
      return sixteen(out, [=](int i) { return gelu_tanh(gate[i]) * up[i]; });
    case LANCEBILL_SWIGLUOAI:
      return sixteen(out, [=](int i) {
        const float g = below(gate[i], limit);
        return g * sigmoid(g * alpha) * (between(up[i], limit) + beta);
      });
    case LANCEBILL_SWIGLUSTEP:
      return sixteen(out, [=](int i) { return below(silu(gate[i]), limit) * between(up[i], limit); });
    case LANCEBILL_SITU:
      return sixteen(out, [=](int i) {
        const float squashed = layer.limit > 0 ? limit * __builtin_tanhf(up[i] / limit) : up[i];
        return beta * __builtin_tanhf(gate[i] / beta) * sigmoid(gate[i]) * squashed;
      });
    case LANCEBILL_RELU2_NO_MUL:
      return sixteen(out, [=](int i) { return gate[i] < 0 ? 0 : gate[i] * gate[i]; });
    case LANCEBILL_SILU_NO_MUL:
      return sixteen(out, [=](int i) { return silu(gate[i]); });
    case LANCEBILL_GELU_NO_MUL:
      return sixteen(out, [=](int i) { return gelu(gate[i]); });
    case LANCEBILL_GELU_TANH_NO_MUL:
      return sixteen(out, [=](int i) { return gelu_tanh(gate[i]); });
    default:
      __builtin_trap();  // `plan` let no other pass
  }
}

}  // namespace
}  // namespace lancebill
