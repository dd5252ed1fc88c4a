"""HQQ (`quant_method: hqq`): unsigned codes, with a float zero point and a scale per group.

The matrix is reshaped to one row per group. A byte holds codes of groups far apart, the first in its top bits, so the
stored tensor cannot be sliced. The library stores its settings next to each weight, as tensors too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lancebill.errors import BadValue, UnsupportedFormat
from lancebill.formats._floats import skip_list, stored_as, stores_plain_floats
from lancebill.formats._group_rows import pack_groups, unpack_groups
from lancebill.formats.base import (
    BIAS,
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
    part,
    require,
)
from lancebill.numbers.dtypes import uint_type
from lancebill.numbers.spec import CHANNEL, QuantSpec, Scale, Zero, group
from lancebill.numbers.weight import LogicalWeight

METHOD = "hqq"
BITS = (8, 4, 3, 2, 1)
PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # codes in a stored word: a byte, or an int32 for three bits
CODES, SCALE, ZERO = ".W_q", ".scale", ".zero"
WEIGHTS, SECOND = "weight_quant_params", ("scale_quant_params", "zero_quant_params")
# Settings that must have this value, and settings that do not change how weights are read.
FIXED = {"axis": 1, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
OTHER = (
    "packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip


@dataclass(frozen=True)
class HqqScheme(Scheme):
    """`W_q` [groups / codes per word, group size], `scale` and `zero` [groups, 1]."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        size, bits = self.spec.group or k, self.spec.dtype.bits
        expected = {**FIXED, "nbits": bits, "group_size": size}
        for role, value in expected.items():
            if role in stored and int(stored[role]) != value:
                raise BadValue(f"'{role}' contradicts the config", expected=value, got=int(stored[role]))
        if k % size:
            raise BadValue("groups span rows", expected=f"rows of a multiple of {size} columns", got=k)
        codes = unpack_groups(stored["codes"], bits, _shifts(bits))
        scale, zero = (stored[role].reshape(n, k // size) for role in ("scale", "zero"))
        return LogicalWeight(self.spec, codes[: n * k // size].reshape(n, k), (scale,), zero)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        words = pack_groups(weight, self.spec.group or weight.k, _shifts(self.spec.dtype.bits))
        assert weight.zero is not None
        return {"codes": words, "scale": weight.scales[0].reshape(-1, 1), "zero": weight.zero.reshape(-1, 1)}


def _shifts(bits: int) -> range:
    """The first code of a word is in its top bits."""
    return range(bits * (PER_WORD[bits] - 1), -1, -bits)


def hqq_scheme(bits: int, size: int | None, scale: str) -> HqqScheme:
    """`size`: columns of a group; None: whole rows."""
    dtype, block = FLOAT_TYPES[scale], CHANNEL if size is None else group(size)
    rows, columns, levels = ("n", "k", "n 1") if size is None else (f"n*k/{size}", str(size), f"n*k/{size} 1")
    rows = f"{rows}^" if bits != 3 else "n/10" if size is None else f"n*k/{10 * size}"
    flags = [part(name, f".{name}", ("U8", "I32", "I64", "BOOL"), SCALAR, optional=True) for name in FIXED]
    sizes = [part(name, f".{name}", ("I32", "I64"), SCALAR, optional=True) for name in ("nbits", "group_size")]
    others = [part(name, f".{name}", ("U8", "I32", "I64", "BOOL"), ("", "?"), optional=True) for name in OTHER]
    return HqqScheme(
        QuantSpec(uint_type(bits), (Scale(dtype, block),), Zero(dtype, block)),
        (
            part("codes", CODES, "I32" if bits == 3 else "U8", f"{rows} {columns}", bits=bits, whole=True),
            part("scale", SCALE, scale, levels),
            part("zero", ZERO, scale, levels),
            part("shape", ".shape", ("I64", "I32"), "2", optional=True),
            *flags,
            *sizes,
            *others,
            BIAS,
        ),
    )


class Hqq(Format):
    name = METHOD
    used = frozenset({"quant_config", "skip_modules"})
    ignored = frozenset({"offload_meta", "dynamic_config"})

    def matches(self, config: Config) -> bool:
        return config.method == METHOD

    def scheme(self, config: Config, module: Module) -> Scheme:
        skipped = not module.stored and module.name in skip_list(config, "skip_modules")
        settings = None if skipped else self._settings(config, module.name)
        if settings is None or stores_plain_floats(module, (CODES, SCALE)):
            return dense(module)
        for key in SECOND:
            if settings.get(key) is not None:
                raise UnsupportedFormat(f"'{key}': quantised scales are not supported", where=config.source)
        weights = checked(settings.get(WEIGHTS), WEIGHTS, dict, (), config.source)
        if weights.get("axis", 1) != 1:
            raise UnsupportedFormat(
                "groups along axis 0 hold columns of rows far apart, which no block describes",
                where=config.source,
                expected="axis 1",
                got=weights.get("axis"),
                hint="quantise with axis=1, which HQQ's kernels need too",
            )
        checked(weights.get("view_as_float", False), "view_as_float", bool, (False,), config.source)
        bits = checked(weights.get("nbits"), "nbits", int, BITS, config.source)
        size = weights.get("group_size")
        if size is not None and (type(size) is not int or size < 8 or size % 8):
            raise UnsupportedFormat("'group_size'", where=config.source, expected="a multiple of 8", got=repr(size))
        return hqq_scheme(bits, size, stored_as(module, (SCALE,), FLOATS))

    def _settings(self, config: Config, name: str) -> Mapping[str, Any] | None:
        """The module's own settings, listed under its name without numbers, or those of all; None: not quantised."""
        settings = require(config, "quant_config", dict)
        if WEIGHTS in settings:
            return dict(settings)
        tag = ".".join(word for word in name.split(".") if word not in ("model", "layers") and not word.isdecimal())
        own = settings.get(tag)
        return None if own is None else dict(checked(own, f"quant_config.{tag}", dict, (), config.source))

    def examples(self) -> Iterator[Example]:
        for bits in BITS:
            yield Example(f"{bits}-bit", _config(bits, 64), hqq_scheme(bits, 64, "BF16"), bias=bits == 4)
        yield Example("4-bit-rows-fp32", _config(4, None), hqq_scheme(4, None, "F32"))


def _config(bits: int, size: int | None) -> Config:
    weights = {"nbits": bits, "group_size": size, "axis": 1, "view_as_float": False}
    settings = {WEIGHTS: weights, **dict.fromkeys(SECOND)}
    return Config(quant={"quant_method": METHOD, "quant_config": settings, "skip_modules": ["lm_head"]}, method=METHOD)


FORMAT = Hqq()
