"""DeepSeek-V4: tensors `weight` and `scale`, block FP8 everywhere except routed experts, which may be FP4.

`expert_dtype` in the config is the dtype of the experts ("fp4" by default) but does not say which
modules are experts; a weight stored as bytes is one. NVIDIA's re-export has NVFP4 experts
(`moe_quant_algo`) with ModelOpt's tensor names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lancebill.formats._floats import (
    EXPONENTS,
    PACKED_FP4,
    FloatScheme,
    is_unquantized,
    mxfp4_scheme,
    scale_part,
    stored_as,
)
from lancebill.formats.base import (
    SCALAR,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    Stored,
    checked,
    dense,
    optional,
    part,
)
from lancebill.formats.fp8 import DEEPSEEK_V4, POWER_OF_TWO, block_sides, stored_scale
from lancebill.numbers.dtypes import E4M3, E8M0, F32
from lancebill.numbers.spec import FP8_BLOCK_SIDES, NVFP4, ActivationSpec, QuantSpec, fp8_spec, group

_WEIGHT, _SCALE = (".weight",), (".scale",)


def _fp8_scheme(spec: QuantSpec, stored: str) -> FloatScheme:
    codes = part("codes", _WEIGHT, "F8_E4M3", "n k")
    return FloatScheme(spec, (codes, scale_part("scale", _SCALE, spec.scales[0], stored=stored)))


def _nvfp4_scheme(stored: str) -> FloatScheme:
    parts = (
        part("codes", _WEIGHT, stored, "n k^", bits=4),
        part("scale", ".weight_scale", "F8_E4M3", "n k/16"),
        part("scale_2", ".weight_scale_2", "F32", SCALAR),
        part("input_scale", ".input_scale", "F32", SCALAR, optional=True),
    )
    return FloatScheme(NVFP4, parts)


class DeepseekV4(Format):
    name = "deepseek_v4"
    used = frozenset(
        {
            "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "ignored_layers", "modules_to_not_convert",
            "expert_dtype", "moe_quant_algo",
        }
    )  # fmt: skip
    # ModelOpt repeats here which modules are NVFP4, which their tensors say too.
    ignored = frozenset(
        {
            "dequantize", "modules_to_convert", "producer", "quant_algo", "kv_cache_quant_algo", "group_size",
            "quantized_layers", "ignore", "config_groups",
        }
    )  # fmt: skip
    model_keys = frozenset({"expert_dtype", "moe_quant_algo"})

    def matches(self, config: Config) -> bool:
        return config.method in ("fp8", "deepseek_v4_fp8") and config.model.get("model_type") == DEEPSEEK_V4

    def scheme(self, config: Config, module: Module) -> Scheme:
        if is_unquantized(config, module, (*_SCALE, ".weight_scale")):
            return dense(module)
        optional(config, "fmt", str, "e4m3", ("e4m3",))
        optional(config, "activation_scheme", str, "dynamic", ("dynamic",))
        experts = _config_value(config, "expert_dtype", "fp4", ("fp4", "fp8"))
        algorithm = _config_value(config, "moe_quant_algo", "", ("NVFP4",))
        stored = module.dtype(*_WEIGHT, default="F8_E4M3")
        if stored in PACKED_FP4 and experts == "fp4":
            if algorithm and not any(map(module.has, _SCALE)):  # layers that predict further tokens keep MXFP4
                return _nvfp4_scheme(stored)
            return mxfp4_scheme(_WEIGHT, _SCALE, (stored, stored_as(module, _SCALE, EXPONENTS)))
        name, scale = stored_scale(config, module, _SCALE)
        return _fp8_scheme(fp8_spec(block_sides(config) or FP8_BLOCK_SIDES, scale=scale), name)

    def expert_module(self, config: Config, name: str) -> Module:
        """Only headers tell the experts' fp4 from the fp8 of all other modules."""
        fp4 = _config_value(config, "expert_dtype", "fp4", ("fp4", "fp8")) == "fp4"
        return Module(name, {_WEIGHT[0]: Stored(PACKED_FP4[0], ())} if fp4 else {})

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        """FP8 per group for FP8 weights, NVFP4 if it was calibrated; nothing is declared for MXFP4."""
        spec = self.scheme(config, module).spec
        if spec == NVFP4:
            return ActivationSpec(NVFP4) if module.has(".input_scale") else None
        return ActivationSpec(fp8_spec(group(spec.group))) if spec.dtype == E4M3 else None

    def examples(self) -> Iterator[Example]:
        for stored in PACKED_FP4:
            yield Example(f"fp4-{stored}", _config({}), mxfp4_scheme(_WEIGHT, _SCALE, (stored, "F8_E8M0")))
        for stored, scale in (("F8_E8M0", E8M0), ("F32", F32)):
            scheme = _fp8_scheme(fp8_spec(FP8_BLOCK_SIDES, scale=scale), stored)
            yield Example(f"fp8-{stored}", _config({"expert_dtype": "fp8"}), scheme, 320, 448)
        yield Example("nvfp4", _config({"moe_quant_algo": "NVFP4"}), _nvfp4_scheme("U8"), inputs={"input_scale": ()})


def _config_value(config: Config, key: str, default: str, legal: tuple[str, ...]) -> str:
    """The value in the quantisation section, or else in the model's config: V4 has such keys in either."""
    value = config.quant.get(key, config.model.get(key))
    return default if value is None else str(checked(value, key, str, legal, config.source))


def _config(model: Mapping[str, Any]) -> Config:
    quant = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": POWER_OF_TWO, "weight_block_size": [128, 128]}
    return Config({"model_type": DEEPSEEK_V4, **model}, quant, "fp8")


FORMAT = DeepseekV4()
