"""AutoRound: a rounding method that stores its results in other formats.

`packing_format` names the format. This file translates configs: a module's bits, group size and
symmetry become a config of GPTQ, AWQ, FP8 or compressed-tensors, and that format does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lancebill.errors import UnsupportedFormat
from lancebill.formats import awq, compressed_tensors, fp8, gptq
from lancebill.formats._ct_config import FIXED, ONE_LEVEL, weight_args, write_config
from lancebill.formats._gptq_zeros import Zeros
from lancebill.formats._patterns import Pattern, compile_pattern
from lancebill.formats._tuning_keys import TUNING_KEYS
from lancebill.formats.base import Config, Example, Format, Module, Scheme, checked, dense, optional, require
from lancebill.numbers.dtypes import F16
from lancebill.numbers.spec import MXFP4, MXFP8, NVFP4_DIV, ActivationSpec, QuantSpec, group, int_spec

GPTQ, GPTQ_V2, AWQ, FLOATS, FP8, FAKE = "gptq", "gptq_v2", "awq", "floats", "fp8", "fake"
PACKINGS = {
    "auto_round:auto_gptq": GPTQ,
    "auto_round:gptq": GPTQ,
    "auto": GPTQ,
    "auto_round:gptqmodel": GPTQ_V2,  # these two store zero points without an offset
    "auto_round": GPTQ_V2,
    "auto_round:auto_awq": AWQ,
    "auto_round:awq": AWQ,
    "auto_round:llm_compressor": FLOATS,
    "auto_round:llm_compressor_nvfp4_e5m3": FLOATS,
    "auto_round:fp8": FP8,
    "auto_round:fp8_static": FP8,
    "auto_round:fake": FAKE,  # rounded, but stored as floats
}
DATA_TYPES = (
    "int",
    "mx_fp",
    "nv_fp",
    "nvfp4_v2",
    "fp",
)  # prefixes; what follows describes the rounding, which does not matter here
# (data type, bits, group size) -> spec and its name in compressed-tensors
FLOAT_SPECS: dict[tuple[str, int, int], tuple[str, QuantSpec]] = {
    ("mx_fp", 4, 32): ("mxfp4-pack-quantized", MXFP4),
    ("mx_fp", 8, 32): ("mxfp8-quantized", MXFP8),
    ("nv_fp", 4, 16): ("nvfp4-pack-quantized", NVFP4_DIV),
    ("nvfp4_v2", 4, 16): (ONE_LEVEL, FIXED[ONE_LEVEL][0]),
}
PER_MODULE = frozenset(
    {"bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic"}
)
FP8_KEYS = ("fmt", "activation_scheme", "weight_block_size")
UNREADABLE = ("rotation_config", "hadamard_config", "super_bits", "super_group_size")
UNQUANTIZED = 16  # a module with this many bits or more is not quantised


class AutoRound(Format):
    name = "auto-round"
    used = PER_MODULE | {
        "packing_format", "desc_act", "extra_config", "block_name_to_quantize", "to_quant_block_names",
        "modules_to_not_convert", "autoround_version", *UNREADABLE, *FP8_KEYS,
    }  # fmt: skip
    ignored = TUNING_KEYS - used | {
        "backend",
        "vllm_backend",
        "static_kv_dtype",
        "static_attention_dtype",
        "regex_config",
        "model_free",
    }

    def matches(self, config: Config) -> bool:
        return config.method in ("auto-round", "auto_round", "intel/auto-round", "inc")

    def scheme(self, config: Config, module: Module) -> Scheme:
        delegated = self._delegate(config, module)
        return dense(module) if delegated is None else delegated[0].scheme(delegated[1], module)

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        delegated = self._delegate(config, module)
        return None if delegated is None else delegated[0].activations(delegated[1], module)

    def _delegate(self, config: Config, module: Module) -> tuple[Format, Config] | None:
        """The format that stores this module and its translated config; None if the module is unquantised."""
        for key in UNREADABLE:
            if config.quant.get(key):
                raise UnsupportedFormat(f"'{key}' is not supported", where=config.source)
        merged = _merged(config, module)
        if merged is None or require(merged, "bits", int) >= UNQUANTIZED:
            return None
        source = config.source
        data_type = _data_type(optional(merged, "data_type", str, "int"), "data_type", source)
        usual = "auto_round:fp8" if data_type == "fp" else "auto_round:auto_gptq"
        packing = optional(config, "packing_format", str, usual, tuple(PACKINGS))
        kind = PACKINGS[packing]
        if kind == FAKE:
            return None
        if (kind == FP8) != (data_type == "fp") or (kind == FLOATS) != (data_type in ("mx_fp", "nv_fp", "nvfp4_v2")):
            raise UnsupportedFormat(f"{packing} cannot store data_type {data_type}", where=source)
        if kind == FP8:
            checked(merged.quant["bits"], "bits with data_type fp", int, (8,), source)
            quant = {key: config.quant.get(key) for key in (*FP8_KEYS, "modules_to_not_convert")}
            return fp8.FORMAT, replace(config, quant=quant, method="fp8")
        if kind == FLOATS:
            quant = _float_config(merged, data_type)
            return compressed_tensors.FORMAT, replace(config, quant=quant, method="compressed-tensors")
        checked(merged.quant.get("act_bits") or UNQUANTIZED, "act_bits with data_type int", int, (16, 32), source)
        shared = {"bits": merged.quant["bits"], "group_size": require(merged, "group_size", int)}
        symmetric = optional(merged, "sym", bool, True)
        if kind == AWQ:
            skipped = config.quant.get("modules_to_not_convert")
            quant = {**shared, "zero_point": not symmetric, "modules_to_not_convert": skipped}
            return awq.FORMAT, replace(config, quant=quant, method="awq")
        kept = {key: config.quant.get(key) for key in ("desc_act", "autoround_version")}
        quant = {**shared, **kept, "sym": symmetric, "checkpoint_format": kind}
        return gptq.FORMAT, replace(config, quant=quant, method="gptq")

    def examples(self) -> Iterator[Example]:
        for symmetric in (True, False):
            spec = int_spec(4, group(64), zero_point=not symmetric, scale=F16)
            integers = {"bits": 4, "group_size": 64, "sym": symmetric, "data_type": "int"}
            v1, v2 = (gptq.gptq_scheme(spec, zeros=zeros, desc_act=False) for zeros in (Zeros.UNNAMED, Zeros.PLAIN))
            yield _example(integers, "auto_round:auto_gptq", v1)
            yield _example(integers, "auto_round:gptqmodel", v2)
            yield _example(integers, "auto_round:auto_awq", awq.awq_scheme(spec))
        for data_type, bits, size in FLOAT_SPECS:
            floats = {"bits": bits, "group_size": size, "sym": True, "data_type": data_type}
            yield _example(floats, "auto_round:llm_compressor", None)
        for block in (None, [128, 128]):
            floats = {"bits": 8, "group_size": block or -1, "sym": True, "data_type": "fp", "weight_block_size": block}
            yield _example(floats, "auto_round:fp8", None)
        acts = {"act_bits": 4, "act_data_type": "nv_fp4_with_static_gs", "act_group_size": 16}
        floats = {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp", **acts}
        yield _example(floats, "auto_round:llm_compressor", None, {"input_global_scale": (1,)})


def _merged(config: Config, module: Module) -> Config | None:
    """`config` with the `extra_config` of this module; None if the module is outside all blocks.

    An exact name takes precedence over patterns, which are searched anywhere in the name.
    """
    extra = optional(config, "extra_config", dict, {})
    parts = module.name.split(".")
    endings = (".".join(parts[i:]) for i in range(len(parts)))  # the config may have short names such as lm_head
    entry = next((name for name in endings if name in extra), None)
    if entry is None:
        entry = next((key for key, pattern in _patterns(config) if pattern.search(module.name)), None)
    if entry is None:
        return config if module.stored or _in_blocks(config, module.name) else None
    changes = checked(extra[entry], f"extra_config.{entry}", dict, (), config.source)
    unknown = sorted(key for key, value in changes.items() if key not in PER_MODULE and value is not None)
    if unknown:
        raise UnsupportedFormat(
            f"extra_config for {entry!r} has unknown keys", where=config.source, got=", ".join(unknown)
        )
    return replace(config, quant={**config.quant, **{k: v for k, v in changes.items() if v is not None}})


@lru_cache(maxsize=64)
def _patterns(config: Config) -> tuple[tuple[str, Pattern], ...]:
    """The keys of `extra_config` that contain regular expression characters, compiled once per config."""
    keys = [key for key in optional(config, "extra_config", dict, {}) if re.search(r"[*+?^$()\[\]{}|\\]", key)]
    return tuple((key, compile_pattern(key, "extra_config", config.source)) for key in keys)


def _in_blocks(config: Config, name: str) -> bool:
    """Whether a module is inside a block that the config lists for quantisation."""
    blocks = config.quant.get("block_name_to_quantize") or config.quant.get("to_quant_block_names")
    if blocks is None:
        return True
    listed = (
        blocks.split(",")
        if isinstance(blocks, str)
        else checked(blocks, "block_name_to_quantize", list, (), config.source)
    )
    return any(f"{name}.".startswith(f"{block}.") for block in listed)


def _data_type(name: str, key: str, source: str) -> str:
    data_type = next((prefix for prefix in DATA_TYPES if name.startswith(prefix)), None)
    if data_type is None:
        raise UnsupportedFormat(f"unsupported value of '{key}'", where=source, expected=", ".join(DATA_TYPES), got=name)
    return data_type


def _float_config(config: Config, data_type: str) -> dict[str, Any]:
    """The compressed-tensors config of these weights and activations."""
    sizes = require(config, "bits", int), require(config, "group_size", int)
    fmt, spec = _float_spec(data_type, *sizes, config.source)
    bits = checked(config.quant.get("act_bits") or UNQUANTIZED, "act_bits", int, (4, 8, 16, 32), config.source)
    if bits >= UNQUANTIZED:
        return write_config(fmt, spec)
    act_type = _data_type(optional(config, "act_data_type", str, data_type), "act_data_type", config.source)
    size = optional(config, "act_group_size", int, spec.group)
    _, inputs = _float_spec(act_type, bits, size, config.source)
    dynamic = "local" if inputs == NVFP4_DIV else True
    return write_config(fmt, spec, {**weight_args(inputs), "dynamic": dynamic})


def _float_spec(data_type: str, bits: int, size: int, source: str) -> tuple[str, QuantSpec]:
    spec = FLOAT_SPECS.get((data_type, bits, size))
    if spec is None:
        raise UnsupportedFormat(
            "unsupported AutoRound float type",
            where=source,
            expected=" or ".join(f"{d} {b} bits group {g}" for d, b, g in FLOAT_SPECS),
            got=f"{data_type} {bits} bits group {size}",
        )
    return spec


def _example(
    values: Mapping[str, Any], packing: str, scheme: Scheme | None, inputs: Mapping[str, tuple[int, ...]] | None = None
) -> Example:
    quant = {"quant_method": "auto-round", **values, "packing_format": packing}
    config = Config(quant=quant, method="auto-round")
    scheme = scheme or FORMAT.scheme(config, Module(""))
    return Example(f"{packing}-{scheme.spec}{'-static' if inputs else ''}", config, scheme, inputs=inputs or {})


FORMAT = AutoRound()
