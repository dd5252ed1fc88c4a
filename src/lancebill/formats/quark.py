"""Quark, AMD's exporter: each number type has its own packing.

Two stages of quantisation give two scales. The scale of the later stage is stored as `weight_scale_2`,
so the order of the stages determines which one is the element's scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lancebill.errors import UnsupportedFormat
from lancebill.formats._floats import stores_plain_floats
from lancebill.formats._quark_config import QuarkPlan, find_entry, read_plan
from lancebill.formats._quark_storage import quark_scheme, scale_names
from lancebill.formats.base import (
    FLOAT_TYPES,
    FLOATS,
    SCALAR,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    checked,
    dense,
    optional,
    part,
)
from lancebill.numbers.dtypes import BF16, F16, F32, DType
from lancebill.numbers.spec import ActivationSpec

TOKEN_AXES = (0, 1, -2)  # values of `ch_axis` that mean one scale per token, for activations


class Quark(Format):
    name = "quark"
    used = frozenset({"global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "export"})
    ignored = frozenset(
        {
            "algo_config", "softmax_quant_spec", "quant_mode", "log_severity_level", "version", "kv_cache_group",
            "kv_cache_quant_config", "kv_cache_post_rope", "min_kv_scale",
        }
    )  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method == "quark"

    def scheme(self, config: Config, module: Module) -> Scheme:
        section = self._section(config, module)
        plan = read_plan(section.get("weight"), "weight", config.source) if section is not None else None
        if section is None or plan is None:
            return dense(module)
        if plan.dynamic or plan.outer_dynamic:
            raise UnsupportedFormat("dynamically quantised weights are not supported", where=config.source, got=section)
        if section.get("bias") is not None:
            raise UnsupportedFormat("a quantised bias is not supported", where=config.source, got=section["bias"])
        export = optional(config, "export", dict, {})
        pack = checked(export.get("pack_method") or "reorder", "pack_method", str, ("order", "reorder"), config.source)
        real = "real_quantized"  # the alternative stores dequantised floats
        checked(export.get("weight_format") or real, "weight_format", str, (real,), config.source)
        stored = [FLOAT_TYPES.get(module.dtype(name, default="F32"), F32) for name in scale_names(plan)]
        _input_plan(section, config.source)  # checked here too
        return quark_scheme(plan, plan.spec(*stored), _INPUT_PARTS, reorder=pack == "reorder")

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        section = self._section(config, module)
        plan = _input_plan(section, config.source) if section is not None else None
        if plan is None or (module.stored and not all(map(module.has, _static_scales(plan)))):
            return None
        return ActivationSpec(plan.spec(), static=not plan.dynamic)

    def _section(self, config: Config, module: Module) -> Mapping[str, Any] | None:
        """The most specific section of the config for this module; None if the module is unquantised."""
        source = config.source
        if find_entry(optional(config, "exclude", list, []), module.name, "exclude", source) is not None:
            return None
        if stores_plain_floats(module, (".weight_scale",)):
            return None
        layers = optional(config, "layer_quant_config", dict, {})
        key = find_entry(layers, module.name, "layer_quant_config", source)
        section = layers[key] if key is not None else None
        if section is None:  # every projection is linear
            section = optional(config, "layer_type_quant_config", dict, {}).get("Linear")
        if section is None:
            key, section = "global_quant_config", config.quant.get("global_quant_config")
        return dict(checked(section, key or "layer_type_quant_config", dict, (), source))

    def examples(self) -> Iterator[Example]:
        for name, weight, stored in _EXAMPLES:
            yield _example(name, weight, stored)
        yield _example("int4-order", {**_group("int4", 64), "symmetric": True}, F16, pack="order")
        static = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
        yield _example("fp8-static", _tensor("fp8_e4m3"), F32, static, {"input_scale": ()})
        second = {**_tensor("fp8_e4m3"), "is_scale_quant": True}
        nvfp4 = [_group("fp4", 16), second]
        dynamic = [{**_group("fp4", 16), "is_dynamic": True}, second]
        yield _example("nvfp4", nvfp4, F32, dynamic, {"input_global_scale": ()})


def _input_plan(section: Mapping[str, Any], source: str) -> QuarkPlan | None:
    plan = read_plan(section.get("input_tensors"), "input_tensors", source, rows=TOKEN_AXES)
    return replace(plan, dynamic=True) if plan is not None and plan.embedded else plan


def _static_scales(plan: QuarkPlan) -> list[str]:
    """The suffixes of the scales that the config says are in the file. Some files do not have them."""
    second = plan.outer is not None and not plan.outer_dynamic
    return [".input_scale"] * (not plan.dynamic) + [".input_scale_2"] * second


_INPUT_PARTS = (
    part("input_scale", ".input_scale", FLOATS, SCALAR, optional=True),
    part("input_zero_point", ".input_zero_point", ("I8", "U8", "I32"), SCALAR, optional=True),
    part("input_global_scale", ".input_scale_2", FLOATS, SCALAR, optional=True),
)


def _tensor(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": "per_tensor", "is_dynamic": False}


def _channel(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}


def _group(dtype: str, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": "per_group", "ch_axis": -1, "group_size": size, "is_dynamic": False}


_SYM, _ASYM = {"symmetric": True}, {"symmetric": False}
_E8M0 = {"scale_format": "e8m0"}
# (name, the weight's section, the float type of its stored scale)
_EXAMPLES: tuple[tuple[str, Any, DType], ...] = (
    ("int2-group", _group("int2", 32) | _SYM, F32),
    ("int2-channel", _channel("int2") | _ASYM, F32),
    ("int3-group", _group("int3", 32) | _SYM, F32),
    ("int3-group-zp", _group("int3", 32) | _ASYM, BF16),
    ("int3-channel-zp", _channel("int3") | _ASYM, F32),
    ("int4-group", _group("int4", 64) | _SYM, F16),
    ("int4-group-zp", _group("int4", 64) | _ASYM, F16),
    ("int4-channel-zp", _channel("int4") | _ASYM, F32),
    ("int4-tensor-zp", _tensor("int4") | _ASYM, F32),
    ("uint4-group", _group("uint4", 32) | _ASYM, BF16),
    ("int8-group-zp", _group("int8", 64) | _ASYM, F32),
    ("int8-channel", _channel("int8") | _SYM, F32),
    ("int8-tensor", _tensor("int8") | _SYM, F32),
    ("uint8-channel", _channel("uint8") | _ASYM, F32),
    ("uint8-group", _group("uint8", 32) | _ASYM, F32),
    ("fp8-channel", _channel("fp8_e4m3"), F32),
    ("fp8-e5m2-channel", _channel("fp8_e5m2"), BF16),
    ("fp8-block", {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 96]}, F32),
    ("mxfp4", _group("fp4", 32) | _E8M0, F32),
    ("mxfp6-e2m3", _group("fp6_e2m3", 32) | _E8M0, F32),
    ("mxfp6-e3m2", _group("fp6_e3m2", 32) | _E8M0, F32),
    ("fp4-e5m3", _group("fp4", 16) | {"scale_format": "e5m3"}, F32),
    ("int4-over-fp8", [_tensor("fp8_e4m3"), _channel("int4") | _SYM], F32),
    ("mx-fp4", {"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 32}, F32),
    ("mx-fp6-e2m3", {"dtype": "mx", "mx_element_dtype": "fp6_e2m3", "group_size": 32}, F32),
    ("mx-fp6-e3m2", {"dtype": "mx", "mx_element_dtype": "fp6_e3m2", "group_size": 32}, F32),
)


def _example(
    name: str,
    weight: Any,
    stored: DType,
    inputs: Any = None,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    pack: str = "reorder",
) -> Example:
    quant = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs},
        "export": {"pack_method": pack, "weight_format": "real_quantized"},
    }
    plan = read_plan(weight, "weight", "")
    assert plan is not None
    scheme = quark_scheme(plan, plan.spec(stored), _INPUT_PARTS, reorder=pack == "reorder")
    return Example(name, Config(quant=quant, method="quark"), scheme, inputs=input_shapes or {})


FORMAT = Quark()
