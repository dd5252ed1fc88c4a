"""FP8 (`quant_method: fp8`): e4m3 per tensor, channel or block, as in DeepSeek-V3.

`weight_scale_inv` multiplies despite its name. Only files of GPTQModel divide by it, and their config records that.
Scales keep their stored dtype; the power-of-two scales of later checkpoints are bytes and are never converted.
`fbgemm_fp8` is the per-channel variant; `mxfp8` has a power of two for 32 columns, as in MiniMax-M3. The experts are
MXFP4, or compressed-tensors' NVFP4, if the config says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import _ct_schemes as ct
from lancebill.formats._floats import (
    EXPONENTS,
    PACKED_FP4,
    WEIGHT,
    FloatScheme,
    is_unquantized,
    mxfp4_scheme,
    scale_part,
    stored_as,
)
from lancebill.formats._tuning_keys import AUTO_ROUND_KEYS
from lancebill.formats.base import (
    BIAS,
    FLOAT_NAMES,
    FLOAT_TYPES,
    FLOATS,
    SCALAR,
    Config,
    Example,
    Format,
    Loading,
    Module,
    Scheme,
    dense,
    optional,
    part,
)
from lancebill.numbers.dtypes import E4M3, E8M0, F32, DType
from lancebill.numbers.spec import (
    CHANNEL,
    DIV,
    FP8_BLOCK_SIDES,
    FP8_CHANNEL,
    FP8_TENSOR,
    MUL,
    MXFP4,
    MXFP8,
    NVFP4_DIV,
    TENSOR,
    ActivationSpec,
    Block,
    QuantSpec,
    fp8_spec,
    group,
)

DEEPSEEK_V4 = "deepseek_v4"  # a model type with its own format: see deepseek_v4.py
POWER_OF_TWO = "ue8m0"
BY_ROW = ("fbgemm_fp8", "w8a8_fp8")  # other names of the method, with one scale per row
MX = "mxfp8"  # and with one power of two per group

_SCALE = (".weight_scale", ".weight_scale_inv", "_scale_inv", "_scale")
_SCALE_INV = (".weight_scale_inv", "_scale_inv", ".weight_scale", "_scale")
_INPUT_DIVISOR = part("input_global_scale", ".input_global_scale", "F32", SCALAR, optional=True)
_INPUT_SCALE = (".input_scale", ".activation_scale", "_activation_scale")
_E4M3_NAMES = ("e4m3", "float8_e4m3fn")
# What GPTQModel writes beside its scales, where the tensors or other keys say the same.
_GPTQMODEL_KEYS = frozenset({"checkpoint_format", "method", "pack_dtype", "meta", "desc_act", "weight_scale_method"})
# Writers use different keys for the storage type of the experts.
_PACKED_EXPERTS = {"moe_quant_algo": ("NVFP4",), "moe_quant_format": ("nvfp4-pack-quantized",)}  # MiniMax-M3.1's
_EXPERT_KEYS = {"store_dtype": ("mxfp4",), "routed_experts_quant_method": ("mxfp4",), "expert_dtype": ("fp4", "fp8")}


def fp8_scheme(spec: QuantSpec, stored_scale: str, *, static: bool = False) -> FloatScheme:
    """e4m3 with one level of scales, stored in the given dtype."""
    block = spec.scales[0].block
    suffix = _SCALE if block in (TENSOR, CHANNEL) else _SCALE_INV
    inputs = part("input_scale", _INPUT_SCALE, FLOATS, SCALAR, optional=not static)
    codes = part("codes", WEIGHT, "F8_E4M3", "n k")
    return FloatScheme(spec, (codes, scale_part("scale", suffix, spec.scales[0], stored=stored_scale), inputs, BIAS))


def stored_scale(config: Config, module: Module, suffix: tuple[str, ...]) -> tuple[str, DType]:
    """The stored dtype of the scales and its number type; bytes are exponents if the config says so."""
    usual = POWER_OF_TWO if config.method == MX else "float"
    fmt = optional(config, "scale_fmt", str, usual, (POWER_OF_TWO, "float"))
    types = {"F32": F32, **FLOAT_TYPES, "F8_E8M0": E8M0, **({"U8": E8M0} if fmt == POWER_OF_TWO else {})}
    stored = stored_as(module, suffix, tuple(types))
    return stored, types[stored]


def block_sides(config: Config) -> Block | None:
    """`weight_block_size` as (rows, columns); None if scales are per tensor or channel."""
    sides = optional(config, "weight_block_size", (list, tuple), None)
    if sides is None:
        return MXFP8.scales[0].block if config.method == MX else None
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise UnsupportedFormat(
            "unsupported value of 'weight_block_size'", where=config.source, expected="two sizes or null", got=sides
        )
    return sides[0], sides[1]


class Fp8(Format):
    name = "fp8"
    used = frozenset(
        {
            "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "ignored_layers",
            "modules_to_not_convert", "format", "weight_scale_semantics", "mxfp4_block_size", *_EXPERT_KEYS,
            *_PACKED_EXPERTS,
        }
    )  # fmt: skip
    ignored = (
        frozenset({"dequantize", "modules_to_convert", "kv_cache_scheme", "kv_cache_quant_algo", "activation_scale_ub"})
        | AUTO_ROUND_KEYS
        | _GPTQMODEL_KEYS
    )

    def matches(self, config: Config) -> bool:
        return config.method in ("fp8", MX, *BY_ROW) and config.model.get("model_type") != DEEPSEEK_V4

    def scheme(self, config: Config, module: Module) -> Scheme:
        if is_unquantized(config, module, _SCALE):
            return dense(module)
        for key in ("fmt", "format"):
            optional(config, key, str, "e4m3", _E4M3_NAMES)
        static = optional(config, "activation_scheme", str, "dynamic", ("dynamic", "static")) == "static"
        expert_types = {optional(config, key, str, None, legal) for key, legal in _EXPERT_KEYS.items()}
        if {"mxfp4", "fp4"} & expert_types and module.dtype(*WEIGHT) in PACKED_FP4:
            optional(config, "mxfp4_block_size", int, MXFP4.group, (MXFP4.group,))
            stored = stored_as(module, WEIGHT, PACKED_FP4), stored_as(module, _SCALE, EXPONENTS)
            return mxfp4_scheme(WEIGHT, _SCALE, stored)
        packed = {optional(config, key, str, None, legal) for key, legal in _PACKED_EXPERTS.items()}
        if None not in packed and any(map(module.has, ct.PACKED)):
            return ct.floats(NVFP4_DIV, (_INPUT_DIVISOR,))
        scale_name, scale = stored_scale(config, module, _SCALE)
        spec = fp8_spec(self._block(config, module), scale=scale)
        if optional(config, "weight_scale_semantics", str, None, ("inverse",)):
            spec = _dividing(spec)
        return fp8_scheme(spec, scale_name, static=static)

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        spec = self.scheme(config, module).spec
        if spec.dtype != E4M3:
            return None
        if spec == MXFP8:
            return ActivationSpec(MXFP8)
        if optional(config, "activation_scheme", str, "dynamic") == "static":
            return ActivationSpec(FP8_TENSOR, static=True)
        return ActivationSpec(fp8_spec(group(spec.group)) if block_sides(config) else FP8_CHANNEL)

    def _block(self, config: Config, module: Module) -> Block:
        """The config's block if it has one, else by the shape of the stored scale."""
        sides = block_sides(config)
        if sides is not None:
            return sides
        weight = next((module.stored[s] for s in WEIGHT if module.has(s)), None)
        scale = next((module.stored[s] for s in _SCALE if module.has(s)), None)
        if scale is None:
            return CHANNEL if config.method in BY_ROW else TENSOR
        stacked = len(weight.shape) - 2 if weight else 0  # the first axis of a stacked tensor is the experts
        return TENSOR if math.prod(scale.shape[stacked:]) == 1 else CHANNEL

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        scale = spec.scales[0] if len(spec.scales) == 1 else None
        if spec.dtype != E4M3 or scale is None or scale.op != MUL or spec.zero or spec.minimum:
            raise CannotEncode("FP8 stores e4m3 with one multiplying scale per tensor, channel or block", got=spec)
        by_block = min(scale.block) > 1
        if not by_block and scale.block not in (TENSOR, CHANNEL):
            raise CannotEncode("FP8 has scales per tensor, channel or block, not per group", got=spec)
        stored = {**FLOAT_NAMES, **({E8M0: "F8_E8M0"} if by_block else {})}.get(scale.dtype)
        if stored is None:
            raise CannotEncode("FP8 has float scales; block scales may also be powers of two", got=spec)
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(scale.block) if by_block else None,
            "modules_to_not_convert": list(dense_modules),
        }
        if scale.dtype == E8M0:
            config["scale_fmt"] = POWER_OF_TWO
        return config, fp8_scheme(spec, stored)

    def in_transformers(self, spec: QuantSpec) -> Loading:
        return Loading.YES if min(spec.scales[0].block) > 1 else Loading.NO

    def examples(self) -> Iterator[Example]:
        blocks = {"weight_block_size": [128, 128]}
        exponents = {**blocks, "scale_fmt": POWER_OF_TWO}
        for stored, quant in (("F32", blocks), ("BF16", blocks), ("F8_E8M0", exponents), ("U8", exponents)):
            spec = fp8_spec(FP8_BLOCK_SIDES, scale=FLOAT_TYPES.get(stored, E8M0))
            yield Example(f"block-{stored}", _config(quant), fp8_scheme(spec, stored), 320, 448)
        for name, block in (("tensor", TENSOR), ("channel", CHANNEL)):
            yield Example(f"{name}-dynamic", _config({}), fp8_scheme(fp8_spec(block), "F32"), bias=True)
        static = fp8_scheme(fp8_spec(TENSOR), "F32", static=True)
        yield Example("tensor-static", _config({"activation_scheme": "static"}), static, inputs={"input_scale": (1,)})
        for method in BY_ROW:
            yield Example(method, _config({}, method), fp8_scheme(fp8_spec(CHANNEL), "F32"))
        yield Example(MX, _config({}, MX), fp8_scheme(MXFP8, "U8"))
        inverse = {"weight_scale_semantics": "inverse", "format": "float8_e4m3fn"}
        yield Example("channel-inverse", _config(inverse), fp8_scheme(_dividing(fp8_spec(CHANNEL)), "F32"))
        experts = mxfp4_scheme(WEIGHT, _SCALE, ("U8", "U8"))
        yield Example("mxfp4-experts", _config({**blocks, "store_dtype": "mxfp4"}), experts)


def _dividing(spec: QuantSpec) -> QuantSpec:
    return replace(spec, scales=(replace(spec.scales[0], op=DIV),))


def _config(quant: Mapping[str, Any], method: str = "fp8") -> Config:
    return Config(quant={"quant_method": method, "activation_scheme": "dynamic", **quant}, method=method)


FORMAT = Fp8()
