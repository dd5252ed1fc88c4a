"""Humming's own format (`quant_method: humming`): any number type, packed along K into 32-bit words.

Integers are offset binary, whatever sign the config gives them. Integer zero points are packed along N. Weights may be
rotated by Hadamard matrices, and so must be their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import UnsupportedFormat
from lancebill.formats._floats import LEVEL_ROLES, is_unquantized, scale_axes, stored_as, to_level
from lancebill.formats.base import (
    BIAS,
    FLOAT_NAMES,
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
    part,
)
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.numbers.bit_packing import pack_bits, stream_codes, unpack_bits
from lancebill.numbers.dtypes import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    F32,
    UE5M3,
    ZERO16,
    DType,
    biased_type,
    uint_type,
)
from lancebill.numbers.spec import ALL, CHANNEL, TENSOR, Block, QuantSpec, Scale, Zero, group
from lancebill.numbers.weight import LogicalWeight

METHOD = "humming"
BLOCKS = tuple(1 << power for power in range(1, 10))  # columns of a block of a rotation
# Each setting and its aliases.
NAMES = {
    "dtype": ("b_dtype", "weight_dtype", "dtype"),
    "group": ("weight_scale_group_size", "group_size"),
    "group_n": ("weight_scale_group_size_n", "group_size_n"),
    "type": ("weight_scale_type", "scale_type"),
    "type_2": ("weight_scale_2_type", "scale_2_type"),
    "scale": ("bs_dtype", "weight_scale_dtype", "scale_dtype"),
}
FLOAT_CODES: dict[str, DType] = {
    "float4e2m1": E2M1, "float6e2m3": E2M3, "float6e3m2": E3M2, "float8e4m3": E4M3, "float8e5m2": E5M2,
}  # fmt: skip
INTEGERS = {f"{sign}int{bits}": bits for sign in ("u", "") for bits in range(2, 9)}
# Types of small scales, and how they are stored; other scales are floats of the dtype in the file.
SMALL_SCALES: dict[str, tuple[DType, str]] = {
    "float8e8m0": (E8M0, "F8_E8M0"), "float8e4m3": (E4M3, "F8_E4M3"), "float8e5m2": (E5M2, "F8_E5M2"),
    "float8e5m3": (UE5M3, "U8"),
}  # fmt: skip
STORED_SCALES = {**FLOAT_NAMES, **dict(SMALL_SCALES.values())}
WEIGHT, SCALE, SCALE_2, ZERO = (
    (f".{name}", f"_{name}") for name in ("weight", "weight_scale", "weight_scale_2", "zero_point")
)


@dataclass(frozen=True)
class HummingScheme(Scheme):
    """`weight` int32 [N, K^], one tensor per level of scales, `zero_point` packed along N or as floats."""

    batched = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead, bits = self.lead(stored), self.spec.dtype.bits
        codes = stream_codes(stored["codes"].reshape(*lead, n, -1), bits, k)
        scales = tuple(to_level(stored[r], level, n, k, lead) for r, level in zip(LEVEL_ROLES, self.spec.scales))
        zero = None
        if self.spec.zero is not None:
            packed = self.spec.zero.dtype == ZERO16
            zero = unpack_bits(stored["zero"].mT, bits, n).mT.to(torch.int16) if packed else stored["zero"]
            zero = to_level(zero.contiguous(), self.spec.zero, n, k, lead)
        return LogicalWeight(self.spec, codes, scales, zero)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        bits = self.spec.dtype.bits
        stored = {"codes": pack_bits(weight.codes, bits, torch.int32)}
        for role, level in zip(LEVEL_ROLES, weight.scales):
            described = self.part(role)
            assert described is not None
            name = described.dtypes[0]
            stored[role] = level.reshape(described.shapes(weight.n, weight.k, name)[0]).view(TORCH_DTYPES[name])
        if weight.zero is not None:
            packed = self.spec.zero is not None and self.spec.zero.dtype == ZERO16
            zero = weight.zero
            stored["zero"] = pack_bits(zero.to(torch.uint8).t(), bits, torch.int32).t().contiguous() if packed else zero
        return stored


def humming_scheme(spec: QuantSpec) -> HummingScheme:
    bits = spec.dtype.bits
    parts = [part("codes", (*WEIGHT, ""), "I32", "n k^", bits=bits)]
    parts += [_level(r, s, level) for r, s, level in zip(LEVEL_ROLES, (SCALE, SCALE_2), spec.scales)]
    if spec.zero is not None:
        columns = "1" if spec.zero.block[1] == ALL else f"k/{spec.zero.block[1]}"
        if spec.zero.dtype == ZERO16:
            parts.append(part("zero", ZERO, "I32", f"n^ {columns}", bits=bits))
        else:
            parts.append(part("zero", ZERO, FLOAT_NAMES[spec.zero.dtype], f"n {columns}"))
    return HummingScheme(spec, (*parts, BIAS))


def _level(role: str, suffix: tuple[str, ...], level: Scale) -> Part:
    axes = SCALAR[::-1] if level.block == TENSOR else scale_axes(level.block)
    axes = axes[::-1] if role == LEVEL_ROLES[1] and level.block == CHANNEL else axes  # [N], not [N, 1]
    return part(role, suffix, STORED_SCALES[level.dtype], axes)


class HummingFormat(Format):
    name = METHOD
    used = frozenset(
        {*(key for keys in NAMES.values() for key in keys), "has_zero_point", "is_fp_zero_point", "hadamard_block_size",
         "ignored_layers", "modules_to_not_convert"}
    )  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method == METHOD

    def scheme(self, config: Config, module: Module) -> Scheme:
        if is_unquantized(config, module, SCALE):
            return dense(module)
        return humming_scheme(_spec(config, module))

    def examples(self) -> Iterator[Example]:
        settings: tuple[dict[str, Any], ...] = (
            {"dtype": "uint4", "group_size": 64},
            {"dtype": "int3", "group_size": 64, "has_zero_point": True},
            {"dtype": "uint5"},
            {"dtype": "uint5", "group_size": 128, "hadamard_block_size": 32},
            {"dtype": "uint4", "group_size": 32, "has_zero_point": True, "is_fp_zero_point": True},
            {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
            {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
            {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e5m3", "scale_2_type": "channel"},
            {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
            {"dtype": "float6e3m2", "scale_type": "tensor"},
        )
        for quant in settings:
            config = Config(quant={"quant_method": METHOD, **quant}, method=METHOD)
            spec = _spec(config, Module(""))
            yield Example(str(spec), config, humming_scheme(spec), 256, 256, bias="scale_dtype" not in quant)


def _spec(config: Config, module: Module) -> QuantSpec:
    block = _setting(config, ("hadamard_block_size",), int, 0)
    rotation = checked(block, "hadamard_block_size", int, BLOCKS, config.source) if block > 1 else 0
    return replace(_stored_spec(config, module), rotation=rotation)


def _stored_spec(config: Config, module: Module) -> QuantSpec:
    dtype = _setting(config, NAMES["dtype"], str, None, (*INTEGERS, *FLOAT_CODES))
    block = _block(config)
    named = _setting(config, NAMES["scale"], str, None, (*SMALL_SCALES, "float16", "bfloat16", "float32"))
    floating = FLOAT_TYPES[stored_as(module, SCALE, FLOATS)]
    by_row = block[0] == 1
    scale = SMALL_SCALES[named][0] if named in SMALL_SCALES else floating if by_row else F32
    scales: tuple[Scale, ...] = (Scale(scale, block),)
    second = _setting(config, NAMES["type_2"], str, "none", ("none", "tensor", "channel"))
    if second == "tensor":
        scales += (Scale(F32, TENSOR),)
    elif second == "channel":
        scales += (Scale(FLOAT_TYPES[stored_as(module, SCALE_2, FLOATS)], CHANNEL),)
    if dtype in FLOAT_CODES:
        return QuantSpec(FLOAT_CODES[dtype], scales)
    bits = INTEGERS[dtype]
    if not _setting(config, ("has_zero_point",), bool, False):
        return QuantSpec(biased_type(bits), scales)
    floats = _setting(config, ("is_fp_zero_point",), bool, False)
    zero = FLOAT_TYPES[stored_as(module, ZERO, FLOATS)] if floats else ZERO16
    return QuantSpec(uint_type(bits), scales, Zero(zero, block))


def _block(config: Config) -> Block:
    size, rows = (_setting(config, NAMES[key], int, 0) for key in ("group", "group_n"))
    if size < 0 or rows < 0:
        raise UnsupportedFormat("the size of a group", where=config.source, expected="0 or more", got=min(size, rows))
    natural = "block" if rows > 1 else "group" if size else "channel"
    kind = _setting(config, NAMES["type"], str, natural, ("tensor", "channel", "group", "block"))
    if kind == "block" and not (rows and size):
        raise UnsupportedFormat("blocks need two sizes", where=config.source, got=[rows, size])
    return {"tensor": TENSOR, "channel": CHANNEL, "group": group(size) if size else CHANNEL, "block": (rows, size)}[
        kind
    ]


def _setting(config: Config, keys: tuple[str, ...], kind: type, default: Any, legal: tuple[str, ...] = ()) -> Any:
    """The value of a setting under any of its names."""
    key = next((key for key in keys if config.quant.get(key) is not None), None)
    if key is None:
        if default is None and keys == NAMES["dtype"]:
            raise UnsupportedFormat("the config has no number type", where=config.source, expected=" or ".join(keys))
        return default
    return checked(config.quant[key], key, kind, legal, config.source)


FORMAT = HummingFormat()
