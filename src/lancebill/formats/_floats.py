"""The storage scheme of mini-floats, shared by several formats.

FP8, gpt-oss, DeepSeek-V4, ModelOpt and the float formats of compressed-tensors differ in tensor
names, dtypes and shapes, which a `Part` describes; the packing is the same. The integer formats use
`to_level` and `from_level` too.
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
from lancebill.formats._patterns import component_runs
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
from lancebill.numbers.bit_packing import pack_bits, stream_codes
from lancebill.numbers.dtypes import E4M3, E8M0, F32, UE5M3, DType
from lancebill.numbers.spec import CHANNEL, MXFP4, TENSOR, Block, Level
from lancebill.numbers.weight import LogicalWeight

PACKED_FP4 = ("U8", "I8")  # stored dtypes of two fp4 codes per byte
EXPONENTS = ("F8_E8M0", "U8")  # stored dtypes of power-of-two scales
WEIGHT = (".weight", "")
LEVEL_ROLES = ("scale", "scale_2")  # the roles of a spec's levels, innermost first
_LEVEL_DTYPES: dict[DType, str | tuple[str, ...]] = {
    **FLOAT_NAMES,
    E4M3: "F8_E4M3",
    E8M0: ("U8", "F8_E8M0"),
    UE5M3: "U8",
}


@dataclass(frozen=True)
class FloatScheme(Scheme):
    """One byte per code, or a bit stream along K (fp4: even columns in the low nibble), and one tensor per
    level of scales."""

    batched = True

    @property
    def views_codes(self) -> bool:
        return self.spec.dtype.bits == 4

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead = self.lead(stored)
        codes = stream_codes(stored["codes"].reshape(*lead, n, -1), self.spec.dtype.bits, k)
        scales = (to_level(stored[role], level, n, k, lead) for level, role in zip(self.spec.scales, LEVEL_ROLES))
        return LogicalWeight(self.spec, codes, tuple(scales))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        codes = pack_bits(weight.codes, self.spec.dtype.bits, torch.uint8)
        tensors = {"codes": codes, **dict(zip(LEVEL_ROLES, weight.scales))}
        return {role: from_level(tensor, self.part(role), weight.n, weight.k) for role, tensor in tensors.items()}


def to_level(tensor: Tensor, level: Level, n: int, k: int, lead: tuple[int, ...] = ()) -> Tensor:
    """A stored tensor as canonical codes in the level's shape; axes of size 1 may be absent or extra.

    Where the spec fixes fp32, as for NVFP4's outer scale, a narrower float is widened, which changes no value.
    """
    shape = (*lead, *level.shape(n, k))
    if tensor.numel() != math.prod(shape):
        raise WrongShape("wrong number of scales for the matrix", expected=list(shape), got=list(tensor.shape))
    tensor = tensor.float() if level.dtype == F32 else tensor
    return (codes_of(tensor) if level.dtype.bits <= 8 else tensor).reshape(shape)


def from_level(tensor: Tensor, stored: Part | None, n: int, k: int) -> Tensor:
    """The inverse of `to_level`: the part's first shape, with the bytes viewed as its first dtype."""
    assert stored is not None
    name = stored.dtypes[0]
    shape = stored.shapes(n, k, name)[0]
    if tensor.numel() != math.prod(shape):
        raise CannotEncode("K must be a multiple of the block", where=stored.role, expected=list(shape), got=f"K = {k}")
    return tensor.reshape(shape).view(TORCH_DTYPES[name])


def scale_part(
    role: str, suffix: tuple[str, ...], level: Level, axes: tuple[str, ...] = (), *, stored: str = ""
) -> Part:
    """The part of a level: in the dtype found in a file (`stored`), or else in the level's dtype."""
    return part(role, suffix, stored or _LEVEL_DTYPES[level.dtype], axes or scale_axes(level.block))


def scale_axes(block: Block) -> tuple[str, ...]:
    """The accepted shapes of one number per block; the first one is written."""
    if block == TENSOR:
        return SCALAR
    if block == CHANNEL:
        return ("n 1", "n")
    rows = "n" if block[0] == 1 else f"n/{block[0]}"
    return (f"{rows} k/{block[1]}",)


def mxfp4_scheme(weight: tuple[str, ...], scale: tuple[str, ...], stored: tuple[str, str]) -> FloatScheme:
    """MXFP4 as two matrices, codes [n, k/2] and exponents [n, k/32], of the `stored` dtypes."""
    codes = part("codes", weight, stored[0], "n k^", bits=4)
    return FloatScheme(MXFP4, (codes, scale_part("scale", scale, MXFP4.scales[0], stored=stored[1]), BIAS))


def stored_as(module: Module, suffix: tuple[str, ...], legal: Sequence[str]) -> str:
    """The stored dtype of a tensor if it is legal, else the first legal one, which the loader then reports."""
    stored = module.dtype(*suffix, default=legal[0])
    return stored if stored in legal else legal[0]


def is_unquantized(config: Config, module: Module, scales: tuple[str, ...]) -> bool:
    """Whether the module is in the skip list, or stored as 16- or 32-bit floats without a scale."""
    listed_keys = ("ignored_layers", "modules_to_not_convert")
    return stores_plain_floats(module, scales) or module.name in skip_list(config, *listed_keys)


def stores_plain_floats(module: Module, scales: tuple[str, ...]) -> bool:
    """Whether the file stores 16- or 32-bit floats without scales for this module, which overrides the config."""
    return module.dtype(*WEIGHT, default="") in FLOATS and not any(module.has(s) for s in scales)


@dataclass(frozen=True)
class SkipList:
    """Modules that a config leaves unquantised, matched by whole components of their names.

    `mlp.gate` matches `layers.1.mlp.gate` but not `mlp.gate_proj`; `layers.1` does not match
    `layers.10`. "*" matches any characters.
    """

    plain: frozenset[str]
    wild: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        listed = bool(self.plain) and any(run in self.plain for run in component_runs(name))
        return listed or any(fnmatchcase(f".{name}.", w) for w in self.wild)


@lru_cache(maxsize=64)
def skip_list(config: Config, *keys: str) -> SkipList:
    """The modules that a config leaves unquantised, listed under any of `keys`."""
    listed = [entry for key in keys for entry in optional(config, key, list, [])]
    names = [checked(entry, " or ".join(keys), str, (), config.source) for entry in listed]
    wild = ("*".join(map(escape, name.split("*"))) for name in names if "*" in name)
    return SkipList(frozenset(name.strip(".") for name in names), tuple(f"*.{entry}.*" for entry in wild))
