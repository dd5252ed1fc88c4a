"""GPTQ: integers packed along K, zero points packed along N, an optional act-order.

Version 1 stores every zero point minus one, version 2 stores them unchanged (`_gptq_zeros.py`).
Symmetric checkpoints store zero points too; these are checked to be the middle code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats._act_order import group_order, reordered, to_natural_order, unlike_natural
from lancebill.formats._gptq_zeros import Zeros, pack_zeros, unpack_zeros, version_1
from lancebill.formats._patterns import Pattern, compile_pattern
from lancebill.formats._tuning_keys import TUNING_KEYS
from lancebill.formats.base import (
    BIAS,
    FLOAT_NAMES,
    FLOAT_TYPES,
    Config,
    Example,
    Format,
    Module,
    Part,
    Scheme,
    checked,
    dense,
    optional,
    outside,
    part,
    require,
)
from lancebill.numbers.bit_packing import pack_bits, transposed, turned_stream_codes
from lancebill.numbers.dtypes import BF16, F16
from lancebill.numbers.spec import ALL, CHANNEL, Block, QuantSpec, group, int_spec
from lancebill.numbers.unusual import unusual
from lancebill.numbers.weight import LogicalWeight

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqScheme(Scheme):
    """`qweight` [K^, N], `qzeros` [K/g, N^], `scales` [K/g, N], `g_idx` [K]."""

    batched = True

    zeros: Zeros = Zeros.UNNAMED
    desc_act: bool = False

    @property
    def zero_range(self) -> tuple[int, int]:
        return self.zeros.range(self.spec.dtype.bits)

    @property
    def act_order(self) -> bool:
        return self.desc_act

    @property
    def views_codes(self) -> bool:
        return self.spec.dtype.bits == 4 and not self.desc_act

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        bits = self.spec.dtype.bits
        codes = turned_stream_codes(stored["codes"], bits, k)
        scale = transposed(stored["scale"])
        zero = None
        symmetric = self.spec.zero is None
        if "zero" in stored and not (symmetric and self._all_middle(stored["zero"], n)):
            zeros = unpack_zeros(stored["zero"], bits, n, self.zeros, symmetric=symmetric)
            zero = transposed(zeros).to(torch.int16)
        if symmetric:
            check_symmetric(zero, bits, hint="set sym to false, or check checkpoint_format (v1 stores zero - 1)")
            zero = None
        perm = self._perm(stored["perm"], k) if "perm" in stored else None
        return reordered(LogicalWeight(self.spec, codes, (scale,), zero), perm)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        bits = self.spec.dtype.bits
        codes, g_idx = to_natural_order(weight, self.spec.group or weight.k)
        zero = weight.zero
        if zero is None:
            zero = torch.full_like(weight.scales[0], 1 << (bits - 1), dtype=torch.int16)
        return {
            "codes": pack_bits(codes, bits, torch.int32).t().contiguous(),
            "zero": pack_zeros(zero.t(), bits, self.zeros),
            "scale": weight.scales[0].t().contiguous(),
            "perm": g_idx,
        }

    def _all_middle(self, words: Tensor, n: int) -> bool:
        """Whether all stored zero points are the middle code, as far as whole words tell."""
        bits = self.spec.dtype.bits
        if n * bits % 32 or 32 % bits:
            return False
        middle = (1 << (bits - 1)) - (self.zeros is not Zeros.PLAIN)
        word = sum(middle << shift for shift in range(0, 32, bits))
        return not unusual((words != word - (word >> 31 << 32)).any())

    def _perm(self, g_idx: Tensor, k: int) -> Tensor | None:
        size = self.spec.group or k
        if self.desc_act:
            return group_order(g_idx, size)
        # Some writers store all zeros; in a shard the indices start at the shard's first group.
        start = g_idx[..., :1]
        if unusual(g_idx.any() & ((start < 0).any() | unlike_natural(g_idx - start, size))):
            raise BadValue("g_idx reorders columns but desc_act is false", hint="set desc_act to true")
        return None


def check_symmetric(zero: Tensor | None, bits: int, hint: str) -> None:
    """Raise unless the zero points of a symmetric weight, if stored, are all the middle code."""
    if zero is None or not zero.numel():
        return
    middle, (low, high) = 1 << (bits - 1), (int(end) for end in torch.aminmax(zero))
    if (low, high) != (middle, middle):
        raise BadValue(
            "the config says symmetric but the zero points are not all the middle code",
            expected=middle,
            got=f"{low} to {high}",
            hint=hint,
        )


def gptq_scheme(spec: QuantSpec, *, zeros: Zeros, desc_act: bool) -> GptqScheme:
    """The scheme of a spec."""
    groups = "1" if spec.group == ALL else f"k/{spec.group}"
    bits = spec.dtype.bits
    scale = FLOAT_NAMES[spec.scales[0].dtype]
    parts: tuple[Part, ...] = (
        part("codes", ".qweight", "I32", "k^ n", bits=bits),
        part("scale", ".scales", scale, f"{groups} n"),
        part("zero", ".qzeros", "I32", f"{groups} n^", bits=bits, optional=spec.zero is None),
        part("perm", ".g_idx", "I32", "k", optional=not desc_act, whole=desc_act),
        BIAS,
    )
    return GptqScheme(spec, parts, zeros, desc_act)


def group_block(size: int, source: str) -> Block:
    """The block of a `group_size`; -1 means the whole row."""
    if size != -1 and size < 1:
        raise UnsupportedFormat("group_size must be positive or -1", where=source, got=size)
    return CHANNEL if size == -1 else group(size)


def grouped_integers(spec: QuantSpec, bits: Sequence[int]) -> bool:
    """Whether GPTQ and AWQ can store `spec`: integers with 16-bit scales per group or channel."""
    if not spec.scales or spec.dtype.bits not in bits:
        return False
    scale = spec.scales[0]
    plain = int_spec(spec.dtype.bits, scale.block, zero_point=spec.zero is not None, scale=scale.dtype)
    return spec == plain and scale.block[0] == 1 and scale.dtype in (F16, BF16)


class Gptq(Format):
    name = "gptq"
    used = frozenset(
        {
            "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "pack_dtype", "dynamic",
            "is_marlin_format", "data_type", "meta", "autoround_version",
        }
    )  # fmt: skip
    ignored = TUNING_KEYS - used | {
        "to_quant_block_names", "method", "modules_in_block_to_quantize", "static_groups",
        "damp_auto_increment", "quantizer",
        "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "use_exllama",
        "max_input_length", "exllama_config", "cache_block_outputs", "tokenizer", "use_cuda_fp16",
        "model_name_or_path", "model_file_base_name", "act_group_aware", "mse", "backend",
    }  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method in ("gptq", "gptq_v2")

    def scheme(self, config: Config, module: Module) -> Scheme:
        merged = overridden(config, module.name, self.used | self.ignored)
        if merged is None or (module.has(".weight") and not module.has(".qweight")):
            return dense(module)
        bits = require(merged, "bits", int, BITS)
        block = group_block(require(merged, "group_size", int), config.source)
        optional(merged, "pack_dtype", str, "int32", ("int32",))
        optional(merged, "data_type", str, "int", ("int",))
        scale = FLOAT_TYPES.get(module.dtype(".scales", default="F16"), F16)
        spec = int_spec(bits, block, zero_point=not optional(merged, "sym", bool, True), scale=scale)
        desc_act = optional(merged, "desc_act", bool, False) and block != CHANNEL  # a single group has no order
        return gptq_scheme(spec, zeros=self._zeros(merged, bits), desc_act=desc_act)

    def _zeros(self, config: Config, bits: int) -> Zeros:
        """From the version under any of its keys."""
        version = optional(config, "checkpoint_format", str, optional(config, "format", str, config.method))
        if optional(config, "is_marlin_format", bool, False):
            version = "marlin"
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedFormat(
                f"the tensors are in the layout of a specific kernel ({version!r}), not in GPTQ's",
                where=config.source,
                expected="checkpoint_format gptq or gptq_v2",
                got=version,
                hint="export the checkpoint again as gptq",
            )
        return version_1(config.quant, bits) if version == "gptq" else Zeros.PLAIN

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        if not grouped_integers(spec, BITS):
            raise CannotEncode(
                "GPTQ stores 2-, 3-, 4- and 8-bit integers with 16-bit scales per group or channel", got=spec
            )
        # Version 1 stores a zero point of 0 in several ways.
        version, zeros = ("gptq", Zeros.UNNAMED) if spec.zero is None else ("gptq_v2", Zeros.PLAIN)
        config = _config(spec, version, desc_act=False)
        config["dynamic"] = _left_out(dense_modules)
        return config, gptq_scheme(spec, zeros=zeros, desc_act=False)

    def leave_rest(self, config: Mapping[str, Any], experts: str, dense: Sequence[str]) -> dict[str, Any]:
        return {**config, "dynamic": {f"-:{outside(experts)}": {}, **_left_out(dense)}}

    def examples(self) -> Iterator[Example]:
        for bits in BITS:
            for sym in (True, False):
                for version in ("gptq", "gptq_v2"):
                    yield self._example(int_spec(bits, group(64), zero_point=not sym, scale=F16), version)
            for quantizer in ("gptqmodel:7.6.0", *(["gptqmodel:6.0.3"] if bits == 3 else [])):
                spec = int_spec(bits, group(64), zero_point=True, scale=F16)
                yield self._example(spec, "gptq", quantizer=quantizer)
        yield self._example(int_spec(4, group(32), zero_point=True, scale=F16), "gptq", desc_act=True)
        yield self._example(int_spec(4, CHANNEL, scale=F16), "gptq")
        yield self._example(int_spec(8, CHANNEL, scale=BF16), "gptq_v2")

    def _example(self, spec: QuantSpec, version: str, *, desc_act: bool = False, quantizer: str = "") -> Example:
        words = [str(spec), version, *(["actorder"] if desc_act else []), *([quantizer] if quantizer else [])]
        meta = {"meta": {"quantizer": [quantizer]}} if quantizer else {}
        config = Config(quant={**_config(spec, version, desc_act=desc_act), **meta}, method="gptq")
        zeros = self._zeros(config, spec.dtype.bits)
        return Example("-".join(words), config, gptq_scheme(spec, zeros=zeros, desc_act=desc_act))


def _config(spec: QuantSpec, version: str, *, desc_act: bool) -> dict[str, Any]:
    """The quantisation section of config.json."""
    return {
        "quant_method": "gptq",
        "bits": spec.dtype.bits,
        "group_size": spec.group or -1,
        "sym": spec.zero is None,
        "desc_act": desc_act,
        "checkpoint_format": version,
    }


def _left_out(modules: Sequence[str]) -> dict[str, Any]:
    return {f"-:(?:{'|'.join(map(re.escape, modules))})$": {}} if modules else {}


def overridden(config: Config, name: str, known: frozenset[str]) -> Config | None:
    """`config` with its `dynamic` rules applied to one module; None if they leave the module unquantised.

    The first pattern that matches from the start of the name wins; "-:" means unquantised.
    """
    rule = next((rule for rule in _rules(config) if rule[1].match(name)), None)
    if rule is None:
        return config
    pattern, _, values = rule
    if pattern.startswith("-:"):
        return None
    changes = checked(values, f"dynamic.{pattern}", dict, (), config.source)
    unknown = sorted(set(changes) - known)
    if unknown:
        raise UnsupportedFormat(
            f"dynamic rule {pattern!r} has unknown keys", where=config.source, got=", ".join(unknown)
        )
    return replace(config, quant={**config.quant, **changes})


@lru_cache(maxsize=64)
def _rules(config: Config) -> tuple[tuple[str, Pattern, Any], ...]:
    """The `dynamic` rules: the key as written, the compiled pattern, and the value."""
    rules = optional(config, "dynamic", dict, {})
    patterns = (rule.removeprefix("+:").removeprefix("-:") for rule in rules)
    return tuple((rule, compile_pattern(p, "dynamic", config.source), rules[rule]) for rule, p in zip(rules, patterns))


FORMAT = Gptq()
