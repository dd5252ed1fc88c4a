"""What the formats that store mini-floats as they are have in common: FP8, gpt-oss, DeepSeek-V4."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colibri.errors import BadValue, CannotEncode
from colibri.formats.base import BIAS, FLOATS, SCALAR, Config, Module, Part, Scheme, checked, codes_of, optional, part
from colibri.packing import pack_bits, unpack_bits
from colibri.quant import CHANNEL, MXFP4, TENSOR, Block, Scale
from colibri.stored import TORCH_DTYPES
from colibri.weight import LogicalWeight

PACKED_FP4 = ("U8", "I8")  # what two fp4 codes in a byte are stored as
EXPONENTS = ("F8_E8M0", "U8")  # what power-of-two scales are stored as
WEIGHT = (".weight", "")
_LEVELS = ("scale", "scale_2")  # the roles of a spec's levels, innermost first


@dataclass(frozen=True)
class FloatScheme(Scheme):
    """Mini-floats and their scales as they lie: a byte a code, or two codes with the even column in
    the low nibble, and one tensor for each level of scales."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        codes = unpack_bits(stored["codes"].reshape(n, -1), self.spec.dtype.bits, k)
        scales = []
        for level, role in zip(self.spec.scales, _LEVELS):
            tensor = stored[role] if level.dtype.wide else codes_of(stored[role])
            if _has_nan(level, tensor):
                raise BadValue("a scale that is NaN", where=role, expected=f"{level.dtype} numbers")
            scales.append(tensor.reshape(level.shape(n, k)))
        return LogicalWeight(self.spec, codes, tuple(scales))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        for level, tensor in zip(self.spec.scales, weight.scales):
            if _has_nan(level, tensor):
                raise CannotEncode("a scale that is NaN", expected=f"{level.dtype} numbers")
        codes = pack_bits(weight.codes, self.spec.dtype.bits, torch.uint8)
        tensors = {"codes": codes, **dict(zip(_LEVELS, weight.scales))}
        return {role: self._lay(role, tensor, weight.n, weight.k) for role, tensor in tensors.items()}

    def _lay(self, role: str, tensor: Tensor, n: int, k: int) -> Tensor:
        """Numbers in the dtype and shape their part is stored in."""
        declared = self.part(role)
        assert declared is not None
        dtype = declared.dtypes[0]
        shape = declared.shapes(n, k, dtype)[0]
        if tensor.numel() != math.prod(shape):
            raise CannotEncode("rows must end with a whole block", where=role, expected=list(shape), got=f"K = {k}")
        return tensor.view(TORCH_DTYPES[dtype]).reshape(shape)


def _has_nan(level: Scale, codes: Tensor) -> bool:
    """Whether a mini-float scale is NaN; wide floats are left to `colibri verify --values`."""
    return not level.dtype.wide and bool(level.dtype.decode(codes).isnan().any())


def scale_part(suffix: tuple[str, ...], stored: str, block: Block) -> Part:
    axes: dict[Block, tuple[str, ...]] = {TENSOR: SCALAR, CHANNEL: ("n 1", "n")}
    return part("scale", suffix, stored, axes.get(block, (f"n/{block[0]} k/{block[1]}",)))


def mxfp4_scheme(weight: tuple[str, ...], scale: tuple[str, ...], stored: tuple[str, str]) -> FloatScheme:
    """MXFP4 in plain matrices, codes [n, k/2] and exponents [n, k/32], of the `stored` dtypes."""
    codes = part("codes", weight, stored[0], "n k^", bits=4)
    return FloatScheme(MXFP4, (codes, scale_part(scale, stored[1], MXFP4.scales[0].block), BIAS))


def stored_as(module: Module, suffix: tuple[str, ...], legal: Sequence[str]) -> str:
    """The dtype a tensor is stored in; where that is not legal, the one to ask for."""
    stored = module.dtype(*suffix, default=legal[0])
    return stored if stored in legal else legal[0]


def left_alone(config: Config, module: Module, scales: tuple[str, ...]) -> bool:
    """In the skip list, or plainly unquantised: a wide weight with no scale beside it."""
    plain = module.dtype(*WEIGHT, default="") in FLOATS and not any(module.has(s) for s in scales)
    return plain or listed(module.name, skip_list(config, "ignored_layers", "modules_to_not_convert"))


def skip_list(config: Config, *keys: str) -> list[str]:
    """The modules a config leaves unquantised, whichever of the keys names them."""
    entries = [entry for key in keys for entry in optional(config, key, list, [])]
    return [checked(entry, " or ".join(keys), str, (), config.source) for entry in entries]


def listed(name: str, entries: Sequence[str]) -> bool:
    """Whether a skip list names `name` or part of its path, by whole components ("*" = any run).

    So `mlp.gate` covers `layers.1.mlp.gate` but neither `mlp.gate_proj` nor, as plain substrings
    would have it, `layers.1` all of `layers.10`.
    """
    path = f".{name}."
    for entry in entries:
        if "*" not in entry:
            if f".{entry.strip('.')}." in path:
                return True
        elif re.search(rf"\.{re.escape(entry).replace(re.escape('*'), '.*')}\.", path):
            return True
    return False
