"""AWQ: 4-bit integers and zero points packed along N in an interleaved order.

Only the `gemm` packing is supported, which MoE checkpoints use. Zero points are stored without
GPTQ's offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats._tuning_keys import TUNING_KEYS
from lancebill.formats.base import (
    BIAS,
    FLOAT_NAMES,
    FLOAT_TYPES,
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
from lancebill.formats.gptq import check_symmetric, group_block, grouped_integers, overridden
from lancebill.numbers.bit_packing import Nibbles, pack_awq, transposed, turn_awq
from lancebill.numbers.dtypes import BF16, F16
from lancebill.numbers.spec import ALL, CHANNEL, QuantSpec, group, int_spec
from lancebill.numbers.weight import LogicalWeight

BITS = 4
WORD = 8  # rows per word
# The config keys that can name the packing, and the names of gemm under each key.
ARRANGEMENTS = {
    "version": ("gemm",),
    "format": ("gemm",),
    "checkpoint_format": ("gemm", "awq"),
    "backend": ("autoawq", "auto"),
}
# Differences of unsupported packings, for the error message.
UNSUPPORTED = {
    "gemv": "packs along K, [N, K/8], with scales transposed and padded",
    "gemv_fast": "packs 16-bit words along K in tiles of four rows",
    "llm-awq": "packs 16-bit words along K in tiles of four rows",
    "marlin": "has tiles for a specific kernel",
    "exllama": "has tiles for a specific kernel",
    "ipex": "has tiles for a specific kernel",
}


@dataclass(frozen=True)
class AwqScheme(Scheme):
    """`qweight` [K, N^], `qzeros` [K/g, N^], `scales` [K/g, N]."""

    batched = True

    @property
    def views_codes(self) -> bool:
        return True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        codes = turn_awq(stored["codes"], n)
        scale = transposed(stored["scale"])
        zero = None
        if "zero" in stored:
            zero = _codes(turn_awq(stored["zero"], n)).to(torch.int16)
        if self.spec.zero is None:
            check_symmetric(zero, BITS, hint="set zero_point to true")
            zero = None
        return LogicalWeight(self.spec, codes, (scale,), zero)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        if weight.n % WORD:
            raise CannotEncode("AWQ packs eight rows per word", expected=f"a multiple of {WORD} rows", got=weight.n)
        zero = weight.zero
        if zero is None:
            # Not needed with zero_point=false, but most readers expect them.
            zero = torch.full_like(weight.scales[0], 1 << (BITS - 1), dtype=torch.int16)
        return {
            "codes": pack_awq(weight.codes.t()),
            "zero": pack_awq(zero.to(torch.uint8).t()),
            "scale": weight.scales[0].t().contiguous(),
        }


def _codes(codes: Tensor | Nibbles) -> Tensor:
    return codes.unpack() if isinstance(codes, Nibbles) else codes


def awq_scheme(spec: QuantSpec) -> AwqScheme:
    groups = "1" if spec.group == ALL else f"k/{spec.group}"
    parts = (
        part("codes", ".qweight", "I32", "k n^", bits=BITS),
        part("scale", ".scales", FLOAT_NAMES[spec.scales[0].dtype], f"{groups} n"),
        part("zero", ".qzeros", "I32", f"{groups} n^", bits=BITS, optional=spec.zero is None),
        BIAS,
    )
    return AwqScheme(spec, parts)


class Awq(Format):
    name = "awq"
    used = frozenset(
        {
            "bits", "w_bit", "group_size", "q_group_size", "zero_point", "pack_dtype", "modules_to_not_convert",
            "dynamic", "data_type", *ARRANGEMENTS,
        }
    )  # fmt: skip
    ignored = TUNING_KEYS | {
        "to_quant_block_names", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "method", "meta",
        "sym", "desc_act",
    }  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method == "awq"

    def scheme(self, config: Config, module: Module) -> Scheme:
        merged = overridden(config, module.name, self.used | self.ignored)
        if merged is None or self._is_unquantized(config, module):
            return dense(module)
        self._check_arrangement(merged)
        optional(merged, "data_type", str, "int", ("int",))
        checked(_either(merged, "bits", "w_bit"), "bits", int, (BITS,), config.source)
        size = checked(_either(merged, "group_size", "q_group_size"), "group_size", int, (), config.source)
        scale = FLOAT_TYPES.get(module.dtype(".scales", default="F16"), F16)
        zero_point = optional(merged, "zero_point", bool, True)
        return awq_scheme(int_spec(BITS, group_block(size, config.source), zero_point=zero_point, scale=scale))

    def _is_unquantized(self, config: Config, module: Module) -> bool:
        """By the stored tensors; without any, by the config's list of substrings of names."""
        if module.has(".qweight") or module.has(".weight"):
            return not module.has(".qweight")
        listed = optional(config, "modules_to_not_convert", list, [])
        return any(checked(entry, "modules_to_not_convert", str, (), config.source) in module.name for entry in listed)

    def _check_arrangement(self, config: Config) -> None:
        optional(config, "pack_dtype", str, "int32", ("int32",))
        for key, legal in ARRANGEMENTS.items():
            name = optional(config, key, str, legal[0]).lower()
            if name not in legal:
                raise UnsupportedFormat(
                    f"AWQ {name!r} {UNSUPPORTED.get(name, 'is unknown')}; only gemm is supported, which packs along N",
                    where=config.source,
                    expected=f"{key} {legal[0]}",
                    got=name,
                    hint="convert the checkpoint to gemm",
                )

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        if not grouped_integers(spec, (BITS,)):
            raise CannotEncode("AWQ stores 4-bit integers with 16-bit scales per group or channel", got=spec)
        return _config(spec, list(dense_modules) or None), awq_scheme(spec)

    def examples(self) -> Iterator[Example]:
        for spec in (
            int_spec(BITS, group(64), zero_point=True, scale=F16),
            int_spec(BITS, group(32), zero_point=True, scale=BF16),
            int_spec(BITS, group(64), scale=F16),
            int_spec(BITS, CHANNEL, zero_point=True, scale=F16),
        ):
            yield Example(str(spec), Config(quant=_config(spec, None), method="awq"), awq_scheme(spec))
        spec = int_spec(BITS, group(64), zero_point=True, scale=F16)
        old = {"w_bit": BITS, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
        yield Example("old-keys", Config(quant=old, method="awq"), awq_scheme(spec))


def _config(spec: QuantSpec, dense_modules: list[str] | None) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": spec.group or -1,
        "zero_point": spec.zero is not None,
        "version": "gemm",
        "modules_to_not_convert": dense_modules,
    }


def _either(config: Config, key: str, old_key: str) -> Any:
    """The value of a key or of its old name; if both are present they must agree."""
    new, old = config.quant.get(key), config.quant.get(old_key)
    if new is not None and old is not None and new != old:
        raise UnsupportedFormat(
            f"'{key}' and '{old_key}' disagree", where=config.source, expected=repr(new), got=repr(old)
        )
    return old if new is None else new


FORMAT = Awq()
