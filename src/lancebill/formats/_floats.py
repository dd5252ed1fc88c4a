"""What the formats that store mini-floats as they are have in common.

FP8, gpt-oss, DeepSeek-V4, ModelOpt and the float formats of compressed-tensors differ in names,
dtypes and shapes, all of which a `Part` says; the numbers lie alike. How a stored level of scales
becomes a canonical one and back serves the integer formats too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import escape

import torch
from torch import Tensor

from lancebill.errors import CannotEncode, WrongShape
from lancebill.formats._patterns import runs
from lancebill.formats.base import (
    BIAS,
    FLOAT_NAMES,
    FLOATS,
    SCALAR,
    Config,
    Module,
    Part,
    Scheme,
    checked,
    codes_of,
    optional,
    part,
)
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.numbers.bit_packing import pack_bits, unpack_bits
from lancebill.numbers.dtypes import E4M3, E8M0, DType
from lancebill.numbers.spec import CHANNEL, MXFP4, TENSOR, Block, Level
from lancebill.numbers.weight import LogicalWeight

PACKED_FP4 = ("U8", "I8")  # what two fp4 codes in a byte are stored as
EXPONENTS = ("F8_E8M0", "U8")  # what power-of-two scales are stored as
WEIGHT = (".weight", "")
LEVEL_ROLES = ("scale", "scale_2")  # the roles of a spec's levels, innermost first
_LEVEL_DTYPES: dict[DType, str | tuple[str, ...]] = {**FLOAT_NAMES, E4M3: "F8_E4M3", E8M0: ("U8", "F8_E8M0")}


@dataclass(frozen=True)
class FloatScheme(Scheme):
    """Mini-floats and their scales as they lie: a byte a code, or a bit stream along K (fp4: the even
    column in the low nibble), and one tensor for each level of scales."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        codes = unpack_bits(stored["codes"].reshape(n, -1), self.spec.dtype.bits, k)
        scales = (place(stored[role], level, n, k) for level, role in zip(self.spec.scales, LEVEL_ROLES))
        return LogicalWeight(self.spec, codes, tuple(scales))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        codes = pack_bits(weight.codes, self.spec.dtype.bits, torch.uint8)
        tensors = {"codes": codes, **dict(zip(LEVEL_ROLES, weight.scales))}
        return {role: put(tensor, self.part(role), weight.n, weight.k) for role, tensor in tensors.items()}


def place(tensor: Tensor, level: Level, n: int, k: int) -> Tensor:
    """A stored level as canonical codes in the level's shape, whichever way its ones were spelled."""
    shape = level.shape(n, k)
    if tensor.numel() != math.prod(shape):
        raise WrongShape("a level does not fit its matrix", expected=list(shape), got=list(tensor.shape))
    return (codes_of(tensor) if level.dtype.bits <= 8 else tensor).reshape(shape)


def put(tensor: Tensor, stored: Part | None, n: int, k: int) -> Tensor:
    """The inverse of `place`: the first spelling of the part, its bytes under the stored dtype."""
    assert stored is not None
    name = stored.dtypes[0]
    shape = stored.shapes(n, k, name)[0]
    if tensor.numel() != math.prod(shape):
        raise CannotEncode("rows must end with a whole block", where=stored.role, expected=list(shape), got=f"K = {k}")
    return tensor.reshape(shape).view(TORCH_DTYPES[name])


def scale_part(
    role: str, suffix: tuple[str, ...], level: Level, axes: tuple[str, ...] = (), *, stored: str = ""
) -> Part:
    """A level of the spec as a stored tensor: in the dtype found in a file, or in the level's own."""
    return part(role, suffix, stored or _LEVEL_DTYPES[level.dtype], axes or scale_axes(level.block))


def scale_axes(block: Block) -> tuple[str, ...]:
    """The shapes in use for one number a block; the first is the one that is written."""
    if block == TENSOR:
        return SCALAR
    if block == CHANNEL:
        return ("n 1", "n")
    rows = "n" if block[0] == 1 else f"n/{block[0]}"
    return (f"{rows} k/{block[1]}",)


def mxfp4_scheme(weight: tuple[str, ...], scale: tuple[str, ...], stored: tuple[str, str]) -> FloatScheme:
    """MXFP4 in plain matrices, codes [n, k/2] and exponents [n, k/32], of the `stored` dtypes."""
    codes = part("codes", weight, stored[0], "n k^", bits=4)
    return FloatScheme(MXFP4, (codes, scale_part("scale", scale, MXFP4.scales[0], stored=stored[1]), BIAS))


def stored_as(module: Module, suffix: tuple[str, ...], legal: Sequence[str]) -> str:
    """The dtype a tensor is stored in; where that is not legal, the one to ask for."""
    stored = module.dtype(*suffix, default=legal[0])
    return stored if stored in legal else legal[0]


def left_alone(config: Config, module: Module, scales: tuple[str, ...]) -> bool:
    """In the skip list, or plainly unquantised: a wide weight with no scale beside it."""
    listed_keys = ("ignored_layers", "modules_to_not_convert")
    return stored_plain(module, scales) or module.name in skip_list(config, *listed_keys)


def stored_plain(module: Module, scales: tuple[str, ...]) -> bool:
    """Whether the file holds 16- or 32-bit floats for this module: then no config can mean otherwise."""
    return module.dtype(*WEIGHT, default="") in FLOATS and not any(module.has(s) for s in scales)


@dataclass(frozen=True)
class SkipList:
    """Modules a config leaves unquantised, by whole components of their names; "*" is any run of characters.

    So `mlp.gate` covers `layers.1.mlp.gate` but neither `mlp.gate_proj` nor, as plain substrings
    would have it, `layers.1` all of `layers.10`.
    """

    plain: frozenset[str]
    wild: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        return any(run in self.plain for run in runs(name)) or any(fnmatchcase(f".{name}.", w) for w in self.wild)


@lru_cache(maxsize=64)
def skip_list(config: Config, *keys: str) -> SkipList:
    """The modules a config leaves unquantised, whichever of the keys names them."""
    listed = [entry for key in keys for entry in optional(config, key, list, [])]
    names = [checked(entry, " or ".join(keys), str, (), config.source) for entry in listed]
    wild = ("*".join(map(escape, name.split("*"))) for name in names if "*" in name)
    return SkipList(frozenset(name.strip(".") for name in names), tuple(f"*.{entry}.*" for entry in wild))
