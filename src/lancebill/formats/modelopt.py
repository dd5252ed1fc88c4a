"""ModelOpt: FP8, NVFP4, MX types and integers, with one algorithm for all modules or one per module.

NVFP4 multiplies by `weight_scale_2`; compressed-tensors divides. Exclusions are shell wildcards that
also exclude everything below a matching module. 4-bit integers of two neighbouring rows share a byte.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats._ct_config import FUSED
from lancebill.formats._floats import PACKED_FP4, WEIGHT, FloatScheme, scale_part, stores_plain_floats
from lancebill.formats._integers import ROWS, PlainInts, SignedNibbles
from lancebill.formats.base import (
    BIAS,
    FLOAT_TYPES,
    FLOATS,
    SCALAR,
    Config,
    Example,
    Format,
    Module,
    Part,
    Scheme,
    checked,
    dense,
    optional,
    part,
)
from lancebill.numbers.dtypes import BF16, F32, DType
from lancebill.numbers.spec import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    TENSOR,
    ActivationSpec,
    QuantSpec,
    group,
    int_spec,
    is_integer,
)

MIXED = "MIXED_PRECISION"
GROUPS = (16, 32, 64, 128, 256)  # of algorithms without a fixed group
# Suffixes of the module's name; the second is used for stacked experts.
SCALE = (".weight_scale", "_weight_scale")
MX_SCALE = (".weight_scale", ".weight_scale_inv", "_weight_scale")  # MiniMax-M3 is published with the second
SCALE_2 = (".weight_scale_2", "_weight_scale_2")
INPUT_SCALE = (".input_scale", "_input_scale")
PRE_QUANT_SCALE = (".pre_quant_scale", "_pre_quant_scale")


@dataclass(frozen=True)
class Algorithm:
    """What a `quant_algo` stores, and the number format of a module's input."""

    spec: QuantSpec
    scale_axes: tuple[str, ...]
    inputs: ActivationSpec | None = None
    calibrated: bool = False  # `inputs` applies only if an input_scale is stored
    smoothed: bool = False  # inputs may be multiplied by a pre_quant_scale per column
    grouped: bool = False  # the config has the group size; `spec` has the default

    def with_group(self, size: int | None) -> Algorithm:
        """The same algorithm with the group size of a config."""
        if not (self.grouped and size):
            return self
        first, *rest = self.spec.scales
        spec = replace(self.spec, scales=(replace(first, block=group(size)), *rest))
        return replace(self, spec=spec, scale_axes=(f"n k/{size}",))


STATIC_FP8 = ActivationSpec(FP8_TENSOR, static=True)
INT4, INT8 = int_spec(4, group(128), scale=F32), int_spec(8, scale=F32)
ALGORITHMS = {
    "FP8": Algorithm(FP8_TENSOR, SCALAR, STATIC_FP8, calibrated=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(FP8_CHANNEL, ("n", "n 1"), ActivationSpec(FP8_CHANNEL)),
    "FP8_PB_WO": Algorithm(FP8_BLOCK, ("n/128 1 k/128 1", "n/128 k/128")),
    "NVFP4": Algorithm(NVFP4, ("n k/16",), ActivationSpec(NVFP4), calibrated=True),
    "NVFP4_AWQ": Algorithm(NVFP4, ("n k/16",), ActivationSpec(NVFP4), calibrated=True, smoothed=True),
    "W4A16_NVFP4": Algorithm(NVFP4, ("n k/16",)),
    "W4A8_NVFP4_FP8": Algorithm(NVFP4, ("n k/16",), STATIC_FP8, calibrated=True, grouped=True),
    "MXFP8": Algorithm(MXFP8, ("n k/32",), ActivationSpec(MXFP8)),
    "MXFP4": Algorithm(MXFP4, ("n k/32",), ActivationSpec(MXFP4)),
    "W4A8_MXFP4_FP8": Algorithm(MXFP4, ("n k/32",), STATIC_FP8, calibrated=True),
    "W4A16_AWQ": Algorithm(INT4, ("n k/128",), smoothed=True, grouped=True),
    "W4A8_AWQ": Algorithm(INT4, ("n k/128",), STATIC_FP8, calibrated=True, smoothed=True, grouped=True),
    "W8A16": Algorithm(INT8, ("n", "n 1")),
    "W8A8_SQ_PER_CHANNEL": Algorithm(
        INT8, ("n", "n 1"), ActivationSpec(int_spec(8, TENSOR, scale=F32), static=True), calibrated=True, smoothed=True
    ),
}


class ModelOpt(Format):
    name = "modelopt"
    used = frozenset({"quant_algo", "group_size", "exclude_modules", "ignore", "quantized_layers", "config_groups"})
    ignored = frozenset(
        {
            "kv_cache_quant_algo", "kv_cache_scheme", "producer", "quant_library", "pre_quant_scale",
            "has_zero_point", "version", "weights", "input_activations",
        }
    )  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method in ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")

    def scheme(self, config: Config, module: Module) -> Scheme:
        algorithm = _algorithm(config, module)
        if algorithm is None:
            return dense(module)
        return _build(algorithm, FLOAT_TYPES.get(module.dtype(*SCALE, default="F32"), F32))

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        algorithm = _algorithm(config, module)
        if algorithm is None:
            return None
        has_input_scale = any(module.has(s) for s in INPUT_SCALE)
        return algorithm.inputs if has_input_scale or not algorithm.calibrated else None

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        """NVFP4 is written weight-only, because input scales cannot be calibrated here."""
        scale = spec.scales[0].dtype if spec.scales else F32
        for name in ("W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"):
            scheme = _build(ALGORITHMS[name], scale if scale in FLOAT_TYPES.values() else F32)
            if scheme.spec == spec:
                return _config(name, dense_modules), scheme
        raise CannotEncode(
            "ModelOpt cannot store this spec",
            expected="nvfp4, fp8-tensor, fp8-channel, fp8-block or mxfp8",
            got=spec,
            hint="ModelOpt's NVFP4 multiplies by the global scale" if len(spec.scales) == 2 else None,
        )

    def examples(self) -> Iterator[Example]:
        for name, algorithm in ALGORITHMS.items():
            n, k = (512, 512) if algorithm.spec == FP8_BLOCK or algorithm.grouped else (128, 256)
            inputs: dict[str, tuple[int, ...]] = {"input_scale": ()} if algorithm.calibrated else {}
            inputs |= {"pre_quant_scale": (k,)} if algorithm.smoothed else {}
            config = Config(quant=_config(name), method="modelopt")
            yield Example(name, config, _build(algorithm, F32), n, k, inputs)
        bf16 = _build(ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"], BF16)
        quant = {"quant_algo": "fp8_per_channel_per_token", "exclude_modules": ["lm_head"]}
        yield Example("bf16-scales", Config(quant=quant, method="modelopt"), bf16, bias=True)
        wide = ALGORITHMS["W4A8_NVFP4_FP8"].with_group(32)
        config = Config(quant={"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}, method="modelopt")
        yield Example("nvfp4-g32", config, _build(wide, F32))
        groups = {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
            "group_1": {"targets": ["*self_attn*"], "weights": {"num_bits": 8, "type": "float"}},
        }
        mixed = {"quant_algo": MIXED, "config_groups": groups, "ignore": ["lm_head"]}
        scheme = _build(ALGORITHMS["W4A16_NVFP4"], F32)
        yield Example("mixed-precision", Config(quant=mixed, method="modelopt_mixed"), scheme)


@lru_cache(maxsize=64)
def _build(algorithm: Algorithm, scale: DType) -> Scheme:
    """The scheme of an algorithm, with the scale dtype found in the file."""
    spec = algorithm.spec
    if spec.scales[0].dtype in FLOAT_TYPES.values():
        spec = replace(spec, scales=(replace(spec.scales[0], dtype=scale),))
    first = scale_part("scale", MX_SCALE if spec == MXFP8 else SCALE, spec.scales[0], algorithm.scale_axes)
    rest = [part("input_scale", INPUT_SCALE, FLOATS, SCALAR, optional=True), BIAS]
    if algorithm.smoothed:
        rest.append(part("pre_quant_scale", PRE_QUANT_SCALE, FLOATS, "k", optional=True))
    if is_integer(spec):
        return _integers(spec, first, rest)
    bits = spec.dtype.bits
    codes = (
        part("codes", WEIGHT, "F8_E4M3", "n k") if bits == 8 else part("codes", WEIGHT, PACKED_FP4, "n k^", bits=bits)
    )
    if len(spec.scales) == 2:
        rest.append(part("scale_2", SCALE_2, FLOATS[::-1], SCALAR))
    return FloatScheme(spec, (codes, first, *rest))


def _integers(spec: QuantSpec, scale: Part, rest: Sequence[Part]) -> Scheme:
    """W4A8 also stores the scale of an fp8 copy of the weights, which does not change them."""
    if spec.dtype.bits == 8:
        return PlainInts(spec, (part("codes", WEIGHT, "I8", "n k"), scale, *rest))
    copy = part("scale_2", SCALE_2, FLOATS, SCALAR, optional=True)
    return SignedNibbles(spec, (part("codes", WEIGHT, "U8", "n^ k", bits=4), scale, copy, *rest), ROWS)


def _algorithm(config: Config, module: Module) -> Algorithm | None:
    """The algorithm of a module, or None if it is unquantised. Both halves of a fused projection must agree."""
    if stores_plain_floats(module, SCALE):
        return None
    parent, _, last = module.name.rpartition(".")
    halves = [f"{parent}.{half}" for half in FUSED.get(last, ())]
    named, algorithm = _choose(config, module.name)
    if not named and halves:
        algorithms = {_choose(config, half)[1] for half in halves}
        if len(algorithms) > 1:
            raise UnsupportedFormat(
                "the halves of a fused projection have different algorithms",
                where=f"{config.source}, module {module.name}",
                got=", ".join(sorted(str(algo and algo.spec) for algo in algorithms)),
            )
        algorithm = algorithms.pop()
    if algorithm is not None and config.quant.get("group_size") is None:
        return algorithm.with_group(_stored_group(module, algorithm.spec))
    return algorithm


def _stored_group(module: Module, spec: QuantSpec) -> int | None:
    """Columns per scale, by the headers: config.json has no `group_size`, hf_quant_config.json has.

    Integers share a byte with those of the next row, mini-floats with those of the next column.
    """
    codes, scales = (next((module.stored[s] for s in names if module.has(s)), None) for names in (WEIGHT, SCALE))
    if codes is None or scales is None or not codes.shape or not scales.shape or not scales.shape[-1]:
        return None
    size = codes.shape[-1] * (1 if is_integer(spec) else 8 // spec.dtype.bits) // scales.shape[-1]
    return size if size in GROUPS else None


def _choose(config: Config, name: str) -> tuple[bool, Algorithm | None]:
    """Whether the config names this module or a parent, and the module's algorithm."""
    excluded = [*optional(config, "exclude_modules", list, []), *optional(config, "ignore", list, [])]
    if _matches(name, excluded, "exclude_modules", config.source):
        return True, None
    algo = optional(config, "quant_algo", str, MIXED).upper()
    if algo != MIXED:
        return False, _checked_algorithm(algo, config.quant.get("group_size"), "quant_algo", config.source)
    layers = optional(config, "quantized_layers", dict, {})
    if not layers:
        return _from_groups(config, name)
    key = next((n for n in (name, *_parents(name)) if n in layers), None)
    if key is None:
        return False, None
    where = f"quantized_layers.{key}"
    entry = checked(layers[key], where, dict, (), config.source)
    algo = checked(entry.get("quant_algo"), f"{where}.quant_algo", str, (), config.source).upper()
    return True, _checked_algorithm(algo, entry.get("group_size"), f"{where}.quant_algo", config.source)


def _checked_algorithm(algo: str, group_size: Any, key: str, source: str) -> Algorithm:
    checked(algo, key, str, tuple(ALGORITHMS), source)
    algorithm = ALGORITHMS[algo]
    if group_size is None:
        return algorithm
    fixed = (algorithm.spec.group,) if algorithm.spec.group else (0, -1)
    size = checked(group_size, f"group_size with {algo}", int, GROUPS if algorithm.grouped else fixed, source)
    return algorithm.with_group(size)


def _from_groups(config: Config, name: str) -> tuple[bool, Algorithm | None]:
    """The newer style: the group whose targets match; names take precedence over the class "Linear"."""
    groups = optional(config, "config_groups", dict, {})
    if not groups:
        expected = "'quant_algo' of all modules, or 'quantized_layers' or 'config_groups'"
        raise UnsupportedFormat(
            "the config names no algorithm",
            where=config.source,
            expected=expected,
            got=f"keys {', '.join(sorted(config.quant))}",
            hint="the algorithms of the layers may be in hf_quant_config.json: copy it from the model's page",
        )
    fallback: str | None = None
    for key, value in groups.items():
        entry = checked(value, f"config_groups.{key}", dict, (), config.source)
        targets = checked(entry.get("targets", ["Linear"]), f"config_groups.{key}.targets", list, (), config.source)
        if _matches(name, targets, f"config_groups.{key}.targets", config.source):
            return True, _group_algorithm(entry, f"config_groups.{key}", config.source)
        if "Linear" in targets and fallback is None:
            fallback = key
    if fallback is None:
        return False, None
    return False, _group_algorithm(groups[fallback], f"config_groups.{fallback}", config.source)


def _group_algorithm(entry: Mapping[str, Any], key: str, source: str) -> Algorithm:
    """The algorithm that matches a group's arguments."""
    weights = checked(entry.get("weights"), f"{key}.weights", dict, (), source)
    size, strategy = weights.get("group_size"), weights.get("strategy")
    kind = (weights.get("type"), weights.get("num_bits"), size or None)
    if kind == ("float", 4, 16):
        return ALGORITHMS["W4A16_NVFP4" if entry.get("input_activations") is None else "NVFP4"]
    if kind == ("float", 8, 32):
        return ALGORITHMS["MXFP8"]
    if kind == ("float", 8, None) and strategy == "channel":
        return ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"]
    if kind == ("float", 8, None) and strategy in (None, "tensor"):
        inputs = checked(entry.get("input_activations") or {}, f"{key}.input_activations", dict, (), source)
        checked(inputs.get("dynamic", False), f"{key}.input_activations.dynamic with FP8", bool, (False,), source)
        return ALGORITHMS["FP8"]
    if kind[:2] == ("int", 4):
        return _checked_algorithm("W4A16_AWQ", size, f"{key}.weights", source)
    if kind == ("int", 8, None):
        return ALGORITHMS["W8A16" if entry.get("input_activations") is None else "W8A8_SQ_PER_CHANNEL"]
    raise UnsupportedFormat(f"no algorithm matches '{key}.weights'", where=source, got=dict(weights))


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _matches(name: str, patterns: Sequence[Any], key: str, source: str) -> bool:
    """Whether a name or wildcard of the list matches the module or one of its parents."""
    if not all(isinstance(p, str) for p in patterns):
        raise UnsupportedFormat(f"'{key}' must be a list of names", where=source, got=list(patterns))
    plain, wild = _sorted(tuple(patterns))
    return any(module in plain or wild.match(module) for module in (name, *_parents(name)))


@lru_cache(maxsize=64)
def _sorted(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """Names and wildcards, split: large models list hundreds of names but few wildcards."""
    wild = [p for p in patterns if re.search(r"[*?\[]", p)]
    return frozenset(patterns), re.compile("|".join(map(fnmatch.translate, wild)) or "(?!)")


def _config(algo: str, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The quantisation section of config.json; engines read group sizes and exclusions from it."""
    spec = ALGORITHMS[algo].spec
    return {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "group_size": spec.group or None,
        "ignore": list(ignore),
    }


FORMAT = ModelOpt()
