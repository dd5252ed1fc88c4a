"""Reads and writes the config of compressed-tensors: groups, their targets and their arguments.

Each group lists targets: module names, patterns ("re:"), or classes; every projection has the class
"Linear". Reading returns a `ConfigGroup`; writing starts from a spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lancebill.errors import UnsupportedFormat
from lancebill.formats._patterns import Pattern, compile_pattern
from lancebill.formats.base import Config, checked, require
from lancebill.numbers.dtypes import E2M1, E4M3, E8M0, UE5M3
from lancebill.numbers.spec import (
    CHANNEL,
    MXFP4,
    MXFP6_E2M3,
    MXFP8,
    NVFP4_DIV,
    TENSOR,
    Block,
    QuantSpec,
    Scale,
    group,
    is_integer,
)

PACK, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
MIXED = "mixed-precision"  # each group names its own format
ONE_LEVEL = "nvfp4-e5m3-pack-quantized"  # AutoRound's: scales with a wide exponent, so no scale of the whole matrix
# Formats that determine the spec: the spec and its `strategy` in the config.
FIXED: dict[str, tuple[QuantSpec, str]] = {
    "nvfp4-pack-quantized": (NVFP4_DIV, "tensor_group"),
    "mxfp4-pack-quantized": (MXFP4, "group"),
    "mxfp6-pack-quantized": (MXFP6_E2M3, "group"),
    "mxfp8-quantized": (MXFP8, "group"),
    ONE_LEVEL: (QuantSpec(E2M1, (Scale(UE5M3, group(16)),)), "tensor_group"),
}
READ = (PACK, INT, FLOAT, NAIVE, *FIXED)
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}
VERSION = "0.20.0"  # the release whose files ours follow

_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_ARG_KEYS = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")


@dataclass(frozen=True)
class Args:
    """The quantisation arguments of weights or of activations."""

    bits: int
    kind: str  # int | float
    symmetric: bool
    strategy: str
    block: Block
    dynamic: bool | str
    reordered: bool  # actorder "group": g_idx assigns columns to groups
    scale_dtype: str


@dataclass(frozen=True)
class ConfigGroup:
    """One config group without its targets."""

    weights: Args | None
    inputs: Args | None
    format: str | None


def find_group(config: Config, name: str) -> ConfigGroup | None:
    """The group that quantises a module, or None. Both halves of a fused projection must have the same group."""
    targets, ignore = _all_targets(config)
    names = [name]
    if not ignore.match(name) and not any(t.match(name) for t in targets.values()):
        parent, _, last = name.rpartition(".")
        names = [f"{parent}.{half}" for half in FUSED.get(last, ())] or names
    keys = {_choose(half, targets, ignore) for half in names}
    if len(keys) > 1:
        raise UnsupportedFormat(
            "the halves of a fused projection belong to different groups",
            where=f"{config.source}, module {name}",
            got=", ".join(sorted(str(key) for key in keys)),
        )
    key = keys.pop()
    return None if key is None else _group(config, key)


# The functions below are cached: they run once per config, not once per module.


@lru_cache(maxsize=64)
def _all_targets(config: Config) -> tuple[dict[str, Targets], Targets]:
    """The targets of each group, and the ignored modules."""
    targets = {}
    for key, value in require(config, "config_groups", dict).items():
        section = read_section(value, f"config_groups.{key}", _GROUP_KEYS, config.source)
        targets[key] = read_targets(section.get("targets"), f"config_groups.{key}.targets", config.source)
    return targets, read_targets(config.quant.get("ignore"), "ignore", config.source)


@lru_cache(maxsize=256)
def _group(config: Config, key: str) -> ConfigGroup:
    return read_group(require(config, "config_groups", dict)[key], f"config_groups.{key}", config.source)


def read_group(value: Mapping[str, Any], key: str, source: str) -> ConfigGroup:
    if value.get("output_activations") is not None:
        raise UnsupportedFormat(f"quantised outputs are not supported: '{key}.output_activations'", where=source)
    fmt = value.get("format")
    weights, inputs = (
        None if value.get(side) is None else _read_args(value[side], f"{key}.{side}", source)
        for side in ("weights", "input_activations")
    )
    return ConfigGroup(weights, inputs, None if fmt is None else checked(fmt, f"{key}.format", str, READ, source))


@dataclass(frozen=True)
class Targets:
    """Names, classes among them, and patterns of names."""

    exact: frozenset[str]
    patterns: tuple[Pattern, ...]

    def match(self, name: str) -> bool:
        return name in self.exact or self.match_pattern(name)

    def match_pattern(self, name: str) -> bool:
        return any(p.match(name) for p in self.patterns)


def read_targets(value: Any, key: str, source: str) -> Targets:
    entries = [] if value is None else checked(value, key, list, (), source)
    if not all(isinstance(e, str) for e in entries):
        raise UnsupportedFormat(f"'{key}' must be a list of names", where=source, got=entries)
    patterns = tuple(compile_pattern(e.removeprefix("re:"), key, source) for e in entries if e.startswith("re:"))
    return Targets(frozenset(e for e in entries if not e.startswith("re:")), patterns)


def _choose(name: str, targets: Mapping[str, Targets], ignore: Targets) -> str | None:
    """The most specific target wins: names before patterns before classes."""
    if ignore.match(name):
        return None
    by_name = next((key for key, t in targets.items() if name in t.exact), None)
    by_pattern = next((key for key, t in targets.items() if t.match_pattern(name)), None)
    return by_name or by_pattern or next((key for key, t in targets.items() if "Linear" in t.exact), None)


def _read_args(value: Any, key: str, source: str) -> Args:
    values = read_section(value, key, _ARG_KEYS, source)

    def get(name: str, kind: type | tuple[type, ...], default: Any, legal: Sequence[Any] = ()) -> Any:
        value = values.get(name)
        value = value.lower() if isinstance(value, str) else value
        return default if value is None else checked(value, f"{key}.{name}", kind, legal, source)

    size = get("group_size", int, None)
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = get("strategy", str, implied, _STRATEGIES)
    order = get("actorder", (bool, str), False, (True, False, "group", "dynamic", "weight", "static"))
    return Args(
        bits=get("num_bits", int, 8, range(1, 9)),
        kind=get("type", str, "int", ("int", "float")),
        symmetric=get("symmetric", bool, True),
        strategy=strategy,
        block=_block(strategy, size, values.get("block_structure"), key, source),
        dynamic=get("dynamic", (bool, str), False, (True, False, "local")),
        reordered=order in (True, "group", "dynamic") and strategy == "group",
        scale_dtype=get("scale_dtype", str, "").removeprefix("torch."),
    )


def _block(strategy: str, size: int | None, structure: Any, key: str, source: str) -> Block:
    if strategy in ("group", "tensor_group"):
        if size is None or size < 1:
            raise UnsupportedFormat(f"'{key}.group_size' must be positive", where=source, got=size)
        return group(size)
    if strategy != "block":
        return TENSOR if strategy == "tensor" else CHANNEL
    sides = structure.split("x") if isinstance(structure, str) else structure  # old files have "128x128"
    try:
        rows, columns = (int(side) for side in sides)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise UnsupportedFormat(
            f"cannot use the value of '{key}.block_structure'", where=source, expected="[rows, columns]", got=structure
        )
    return rows, columns


def read_section(value: Any, key: str, known: set[str], source: str) -> Mapping[str, Any]:
    """A nested dictionary; raises for unknown keys."""
    section: Mapping[str, Any] = checked(value, key, dict, (), source)
    unknown = sorted(str(k) for k, v in section.items() if k not in known and v is not None)
    if unknown:
        raise UnsupportedFormat(f"unknown keys in '{key}'", where=source, expected=sorted(known), got=unknown)
    return section


def write_config(
    fmt: str, spec: QuantSpec, inputs: Mapping[str, Any] | None = None, ignore: Sequence[str] = ()
) -> dict[str, Any]:
    """A quantisation config as compressed-tensors writes it, with one group for all projections."""
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weight_args(spec),
                "input_activations": inputs,
                "output_activations": None,
                "format": fmt,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def add_group(config: Mapping[str, Any], section: Mapping[str, Any], targets: Sequence[str]) -> dict[str, Any]:
    """The config with one more group for `targets`, which are described by `section`.

    It comes last: transformers takes the first group for experts.
    """
    groups = dict(config["config_groups"])
    groups[f"group_{len(groups)}"] = {**section, "targets": list(targets)}
    formats = {made["format"] for made in groups.values()}
    return {**config, "format": formats.pop() if len(formats) == 1 else MIXED, "config_groups": groups}


def weight_args(spec: QuantSpec) -> dict[str, Any]:
    """The arguments that describe `spec`."""
    rows, columns = block = spec.scales[0].block
    strategy = {TENSOR: "tensor", CHANNEL: "channel"}.get(block, "group" if rows == 1 else "block")
    args: dict[str, Any] = {
        "num_bits": spec.dtype.bits,
        "type": "int" if is_integer(spec) else "float",
        "symmetric": spec.zero is None,
        "strategy": "tensor_group" if columns == 16 and spec.dtype == E2M1 else strategy,
        "group_size": columns if strategy == "group" else None,
        "dynamic": False,
    }
    if strategy == "block":
        args["block_structure"] = [rows, columns]
    if spec.scales[0].dtype in (E4M3, E8M0):
        args["scale_dtype"] = "torch.uint8" if spec.scales[0].dtype == E8M0 else "torch.float8_e4m3fn"
    return args


def dynamic_args(strategy: str, size: int | None = None, kind: str = "float") -> dict[str, Any]:
    """The arguments of 8-bit activations with dynamic scales."""
    return {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "group_size": size, "dynamic": True,
    }  # fmt: skip
