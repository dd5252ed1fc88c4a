"""GPTQ: integers packed along K, zero points packed along N, an optional act-order.

Version 1 stores every zero point minus one, which after unpacking and adding back spans 1 .. 2**b;
version 2 stores it as it is. Symmetric checkpoints still carry zero points: they are checked
against the constant they stand for, never trusted or ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colibri.dtypes import BF16, F16, ZERO16
from colibri.errors import BadValue, CannotEncode, UnsupportedFormat
from colibri.formats.base import (
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
    part,
    require,
)
from colibri.packing import pack_bits, unpack_bits
from colibri.quant import ALL, CHANNEL, QuantSpec, group, int_spec, is_integer
from colibri.weight import LogicalWeight

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqScheme(Scheme):
    """`qweight` [K^, N], `qzeros` [K/g, N^], `scales` [K/g, N], `g_idx` [K]."""

    offset: int = 1  # what the stored zero points lack: 1 in version 1
    desc_act: bool = False

    @property
    def zero_range(self) -> tuple[int, int]:
        return self.offset, (1 << self.spec.dtype.bits) - 1 + self.offset

    @property
    def act_order(self) -> bool:
        return self.desc_act

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        bits = self.spec.dtype.bits
        codes = unpack_bits(stored["codes"].t(), bits, k)
        scale = stored["scale"].t().contiguous()
        zero = None
        if "zero" in stored:
            zero = (unpack_bits(stored["zero"], bits, n).to(torch.int16) + self.offset).t().contiguous()
        if self.spec.zero is None:
            self._check_symmetric(zero)
            zero = None
        perm = self._perm(stored.get("perm"), k)
        if perm is not None:
            codes = codes[:, perm.long()]
        return LogicalWeight(self.spec, codes, (scale,), zero, perm=perm)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        bits, k = self.spec.dtype.bits, weight.k
        codes, size = weight.codes, self.spec.group or k
        g_idx = torch.arange(k, dtype=torch.int32, device=codes.device) // size
        if weight.perm is not None:
            natural = torch.empty_like(codes)
            natural[:, weight.perm.long()] = codes
            codes, order = natural, g_idx
            g_idx = torch.empty_like(order)
            g_idx[weight.perm.long()] = order
        zero = weight.zero
        if zero is None:
            zero = torch.full_like(weight.scales[0], 1 << (bits - 1), dtype=torch.int16)
        stored_zero = (zero - self.offset).to(torch.uint8).t()
        return {
            "codes": pack_bits(codes, bits, torch.int32).t().contiguous(),
            "zero": pack_bits(stored_zero, bits, torch.int32),
            "scale": weight.scales[0].t().contiguous(),
            "perm": g_idx,
        }

    def _check_symmetric(self, zero: Tensor | None) -> None:
        middle = 1 << (self.spec.dtype.bits - 1)
        if zero is not None and bool((zero != middle).any()):
            raise BadValue(
                "the config says symmetric but the zero points are not all the middle code",
                expected=middle,
                got=f"{int(zero.min())} to {int(zero.max())}",
                hint="set sym to false, or check checkpoint_format (v1 stores zero points minus one)",
            )

    def _perm(self, g_idx: Tensor | None, k: int) -> Tensor | None:
        """The sorting permutation of an act-order; None where the order is natural."""
        if g_idx is None:
            return None
        size = self.spec.group or k
        natural = torch.arange(k, dtype=torch.int32, device=g_idx.device) // size
        trivial = not self.desc_act and not bool(g_idx.any())  # some writers leave zeros
        if trivial or torch.equal(g_idx - g_idx[:1], natural):  # a shard's groups start anywhere
            return None
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order], natural):
            raise BadValue("g_idx does not give each group its share of columns", expected=f"{size} columns a group")
        if not self.desc_act:
            raise BadValue("g_idx reorders columns but desc_act is false", hint="set desc_act to true")
        return order.to(torch.int32)


def gptq_scheme(spec: QuantSpec, *, offset: int, desc_act: bool) -> GptqScheme:
    """The scheme for one combination of bits, group and version (AutoRound shares it)."""
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
    return GptqScheme(spec, parts, offset, desc_act)


class Gptq(Format):
    name = "gptq"
    used = frozenset({"bits", "group_size", "sym", "desc_act", "checkpoint_format", "dynamic"})
    ignored = frozenset(
        {
            "lm_head", "pack_dtype", "meta", "modules_in_block_to_quantize", "static_groups",
            "damp_percent", "damp_auto_increment", "true_sequential", "quantizer", "version", "dataset",
            "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size",
            "pad_token_id", "use_exllama", "max_input_length", "exllama_config", "cache_block_outputs",
            "tokenizer", "use_cuda_fp16", "model_name_or_path", "model_file_base_name", "is_marlin_format",
        }
    )  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method in ("gptq", "gptq_v2")

    def scheme(self, config: Config, module: Module) -> Scheme:
        overrides = self._overrides(config, module.name)
        if overrides is None or (module.has(".weight") and not module.has(".qweight")):
            return dense(module)
        merged = Config(config.model, {**config.quant, **overrides}, config.method, config.source)
        bits = require(merged, "bits", int, BITS)
        size = require(merged, "group_size", int)
        if size != -1 and size < 1:
            raise UnsupportedFormat("group_size is positive or -1", where=config.source, got=size)
        default = "gptq_v2" if config.method == "gptq_v2" else "gptq"
        version = optional(merged, "checkpoint_format", str, default, ("gptq", "gptq_v2"))
        scale = FLOAT_TYPES.get(module.dtype(".scales", default="F16"), F16)
        block = CHANNEL if size == -1 else group(size)
        spec = int_spec(bits, block, zero_point=not optional(merged, "sym", bool, True), scale=scale)
        desc_act = optional(merged, "desc_act", bool, False) and size != -1
        return gptq_scheme(spec, offset=int(version == "gptq"), desc_act=desc_act)

    def _overrides(self, config: Config, name: str) -> Mapping[str, Any] | None:
        """The `dynamic` rule for this module: first match wins, "-:" means unquantised (None)."""
        rules = optional(config, "dynamic", dict, {})
        for pattern, values in rules.items():
            if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
                if pattern.startswith("-:"):
                    return None
                return dict(checked(values, f"dynamic.{pattern}", dict, (), config.source))
        return {}

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        ok = is_integer(spec) and spec.dtype.bits in BITS and len(spec.scales) == 1 and not spec.minimum
        scale = spec.scales[0] if spec.scales else None
        if not ok or scale is None or scale.block[0] != 1 or scale.dtype not in (F16, BF16):
            raise CannotEncode("GPTQ holds 2-, 3-, 4- and 8-bit integers by group or channel", got=spec)
        if spec.zero is not None and spec.zero.dtype != ZERO16:
            raise CannotEncode("GPTQ holds integer zero points", got=spec)
        config = {
            "quant_method": "gptq",
            "bits": spec.dtype.bits,
            "group_size": spec.group or -1,
            "sym": spec.zero is None,
            "desc_act": False,
            "checkpoint_format": "gptq_v2" if spec.zero is not None else "gptq",
            "dynamic": {f"-:{re.escape(name)}$": {} for name in dense_modules},
        }
        return config, gptq_scheme(spec, offset=int(spec.zero is None), desc_act=False)

    def examples(self) -> Iterator[Example]:
        for bits in BITS:
            for sym in (True, False):
                for version, offset in (("gptq", 1), ("gptq_v2", 0)):
                    spec = int_spec(bits, group(64), zero_point=not sym, scale=F16)
                    yield self._example(spec, version, offset, desc_act=False)
        yield self._example(int_spec(4, group(32), zero_point=True, scale=F16), "gptq", 1, desc_act=True)
        yield self._example(int_spec(4, CHANNEL, scale=F16), "gptq", 1, desc_act=False)
        yield self._example(int_spec(8, CHANNEL, scale=BF16), "gptq_v2", 0, desc_act=False)

    def _example(self, spec: QuantSpec, version: str, offset: int, *, desc_act: bool) -> Example:
        quant = {
            "quant_method": "gptq",
            "bits": spec.dtype.bits,
            "group_size": spec.group or -1,
            "sym": spec.zero is None,
            "desc_act": desc_act,
            "checkpoint_format": version,
        }
        name = f"{spec}-{version}{'-actorder' if desc_act else ''}"
        return Example(name, Config(quant=quant, method="gptq"), gptq_scheme(spec, offset=offset, desc_act=desc_act))


FORMAT = Gptq()
