"""Quanto (optimum-quanto): int8 and fp8 by rows, 2- and 4-bit integers by groups.

The file quanto_qmap.json lists the quantised modules; the stored tensors say how. The matrix of 2- and 4-bit codes is
reshaped to one row per group and packed along these rows, so that it cannot be sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from lancebill.errors import BadValue
from lancebill.formats._floats import FloatScheme, scale_part, stored_as, stores_plain_floats
from lancebill.formats._group_rows import pack_groups, unpack_groups
from lancebill.formats._integers import PlainInts
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
)
from lancebill.numbers.dtypes import F32, DType, uint_type
from lancebill.numbers.spec import CHANNEL, QuantSpec, Scale, fp8_spec, group, int_spec
from lancebill.numbers.weight import LogicalWeight

METHOD = "quanto"
BITS, GROUP = (4, 2), 128
BY_ROW = {"int8": "I8", "float8": "F8_E4M3"}
BYTES, PACKED, SCALE, SHIFT = ".weight._data", ".weight._data._data", ".weight._scale", ".weight._shift"
# Scales of activations, stored for every module; 1 where activations are not quantised.
UNUSED = tuple(
    part(f"unused_{name}", f".{name}", FLOATS, SCALAR, optional=True) for name in ("input_scale", "output_scale")
)


@dataclass(frozen=True)
class QuantoGroups(Scheme):
    """`_data` [groups / codes per byte, group size]; a weight is code * scale - shift."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        size, bits = self.spec.group, self.spec.dtype.bits
        if k % size:
            raise BadValue("groups span rows", expected=f"rows of a multiple of {size} columns", got=k)
        codes = unpack_groups(stored["codes"], bits, range(0, 8, bits))[: n * k // size].reshape(n, k)
        scale, shift = (stored[role].reshape(n, k // size) for role in ("scale", "minimum"))
        return LogicalWeight(self.spec, codes, (scale,), minimum=(shift,))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        words = pack_groups(weight, self.spec.group, range(0, 8, self.spec.dtype.bits))
        levels = {"scale": weight.scales[0], "minimum": weight.minimum[0]}
        return {"codes": words, **{role: level.reshape(-1, 1) for role, level in levels.items()}}


def grouped_scheme(bits: int, size: int, scale: str) -> QuantoGroups:
    level, axes = Scale(FLOAT_TYPES[scale], group(size)), f"n*k/{size} 1"
    return QuantoGroups(
        QuantSpec(uint_type(bits), (level,), None, (level,)),
        (
            part("codes", PACKED, "U8", f"n*k/{size}^ {size}", bits=bits, whole=True),
            part("scale", SCALE, scale, axes),
            part("minimum", SHIFT, scale, axes),
            *UNUSED,
            BIAS,
        ),
    )


def row_scheme(stored: str, scale: DType) -> Scheme:
    """int8 or fp8 with one scale per row."""
    codes = part("codes", BYTES, stored, "n k")
    if stored == "I8":
        spec = int_spec(8, CHANNEL, scale=scale)
        return PlainInts(spec, (codes, scale_part("scale", (SCALE,), spec.scales[0]), *UNUSED, BIAS))
    spec = fp8_spec(CHANNEL, scale=scale)
    return FloatScheme(spec, (codes, scale_part("scale", (SCALE,), spec.scales[0]), *UNUSED, BIAS))


class Quanto(Format):
    name = METHOD
    used = frozenset({"weights"})
    ignored = frozenset({"activations", "modules_to_not_convert"})

    def matches(self, config: Config) -> bool:
        return config.method == METHOD

    def scheme(self, config: Config, module: Module) -> Scheme:
        if not module.stored:
            return _listed(config, module)
        if stores_plain_floats(module, (BYTES, PACKED, SCALE)):
            return dense(module)
        scale = stored_as(module, (SCALE,), FLOATS)
        if not (module.has(PACKED) or module.has(SHIFT)):
            return row_scheme(stored_as(module, (BYTES,), ("I8", "F8_E4M3")), FLOAT_TYPES[scale])
        codes, levels = module.stored.get(PACKED), module.stored.get(SCALE) or module.stored.get(SHIFT)
        if codes is None or levels is None or min(len(codes.shape), len(levels.shape)) < 2 or 0 in codes.shape:
            return grouped_scheme(BITS[0], GROUP, scale)  # the loader reports what is missing
        bits = 4 if 2 * codes.shape[-2] >= levels.shape[-2] else 2
        size = codes.shape[-1]
        if size % 8:
            return grouped_scheme(bits, GROUP, scale)
        return grouped_scheme(bits, size, scale)

    def unknown_keys(self, config: Config) -> list[str]:
        """Keys with an object are names of modules."""
        return [key for key in super().unknown_keys(config) if not isinstance(config.quant[key], Mapping)]

    def examples(self) -> Iterator[Example]:
        for bits in BITS:
            yield Example(f"int{bits}", _config(f"int{bits}"), grouped_scheme(bits, 64, "BF16"), bias=bits == 4)
        for name, stored in BY_ROW.items():
            yield Example(name, _config(name), row_scheme(stored, F32))


def _listed(config: Config, module: Module) -> Scheme:
    """Without stored tensors, the map of modules decides, or the config of transformers: `qint4` or `int4`."""
    own = config.quant.get(module.name, config.quant)
    named = own.get("weights") if isinstance(own, Mapping) else None
    if named in (None, "none"):
        return dense(module)
    legal = (*BY_ROW, *(f"int{bits}" for bits in BITS))
    name = str(named).removeprefix("q").removesuffix("_e4m3fn")
    checked(name, f"weights of {module.name}", str, legal, config.source)
    return row_scheme(BY_ROW[name], F32) if name in BY_ROW else grouped_scheme(int(name[3:]), GROUP, "BF16")


def _config(weights: str) -> Config:
    return Config(quant={"quant_method": METHOD, "weights": weights}, method=METHOD)


FORMAT = Quanto()
