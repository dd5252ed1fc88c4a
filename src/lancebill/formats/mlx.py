"""MLX: codes in 32-bit words, with a scale and a bias per group (affine), or as MXFP4, NVFP4 and MXFP8.

The config has no `quant_method`. mlx-lm writes a section `quantization`, often twice. It may map a module's name to
settings for this module, or to false if the module is not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import UnsupportedFormat
from lancebill.formats._floats import to_level
from lancebill.formats.base import (
    BIAS,
    FLOAT_TYPES,
    FLOATS,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    Stored,
    checked,
    dense,
    part,
)
from lancebill.numbers.bit_packing import pack_bits, stream_codes
from lancebill.numbers.dtypes import E2M1, E4M3, DType, uint_type
from lancebill.numbers.spec import MXFP4, MXFP8, QuantSpec, Scale, group
from lancebill.numbers.weight import LogicalWeight

BITS = (2, 3, 4, 5, 6, 8)
AFFINE = "affine"
DEFAULT_GROUP, DEFAULT_BITS = 64, 4
# Modes without a bias. NVFP4 has no scale of the whole tensor here.
FLOAT_MODES = {"mxfp4": MXFP4, "nvfp4": QuantSpec(E2M1, (Scale(E4M3, group(16)),)), "mxfp8": MXFP8}
_SETTINGS = {"group_size", "bits", "mode"}


@dataclass(frozen=True)
class MlxScheme(Scheme):
    """`weight` [n, k^] is a bit stream along K; `scales` and `biases` have one number per group.

    A weight is scale * code + bias, so the bias is the negative minimum of the spec.
    """

    batched = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead = self.lead(stored)
        codes = stream_codes(stored["codes"].reshape(*lead, n, -1), self.spec.dtype.bits, k)
        scale = to_level(stored["scale"], self.spec.scales[0], n, k, lead)
        minimum = tuple(-to_level(stored["minimum"], level, n, k, lead) for level in self.spec.minimum)
        return LogicalWeight(self.spec, codes, (scale,), minimum=minimum)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        words = pack_bits(weight.codes, self.spec.dtype.bits, torch.int32).view(torch.uint32)
        packed = {"codes": words, "scale": weight.scales[0]}
        return {**packed, "minimum": -weight.minimum[0]} if weight.minimum else packed


def affine_scheme(bits: int, size: int, scale: DType, stored: str) -> MlxScheme:
    level = Scale(scale, group(size))
    per_group = f"n k/{size}"
    return MlxScheme(
        QuantSpec(uint_type(bits), (level,), None, (level,)),
        (
            part("codes", ".weight", "U32", "n k^", bits=bits),
            part("scale", ".scales", stored, per_group),
            part("minimum", ".biases", stored, per_group),
            BIAS,
        ),
    )


def float_scheme(spec: QuantSpec) -> MlxScheme:
    scales = part("scale", ".scales", "U8", f"n k/{spec.group}")
    return MlxScheme(spec, (part("codes", ".weight", "U32", "n k^", bits=spec.dtype.bits), scales, BIAS))


class Mlx(Format):
    name = "mlx"
    used = frozenset(_SETTINGS)
    stacked = True
    lists_dense = False

    def matches(self, config: Config) -> bool:
        return config.method == "mlx"

    def scheme(self, config: Config, module: Module) -> Scheme:
        if module.dtype(".weight", default="U32") in FLOATS and not module.has(".scales"):
            return dense(module)
        settings = self._settings(config, module.name)
        mode = checked(settings.get("mode", AFFINE), "mode", str, (AFFINE, *FLOAT_MODES), config.source)
        if mode in FLOAT_MODES:
            return self._float_scheme(FLOAT_MODES[mode], settings, mode, config.source)
        bits = checked(settings.get("bits", DEFAULT_BITS), "bits", int, BITS, config.source)
        size = checked(settings.get("group_size", DEFAULT_GROUP), "group_size", int, (32, 64, 128), config.source)
        stored = module.dtype(".scales", default="BF16")
        stored = stored if stored in FLOATS else "BF16"
        return affine_scheme(bits, size, FLOAT_TYPES[stored], stored)

    def _settings(self, config: Config, name: str) -> Mapping[str, Any]:
        """The module's own settings if the config has any, else those of all modules."""
        own = config.quant.get(name)
        if own is None or own is True:
            return config.quant
        settings: Mapping[str, Any] = checked(own, name, dict, (), config.source)
        unknown = sorted(set(settings) - _SETTINGS)
        if unknown:
            raise UnsupportedFormat(f"unknown keys in '{name}'", where=config.source, got=", ".join(unknown))
        # Recipes such as mixed_2_6 write null for the mode's own group size.
        return {key: value for key, value in settings.items() if value is not None}

    def _float_scheme(self, spec: QuantSpec, settings: Mapping[str, Any], mode: str, source: str) -> MlxScheme:
        for key, legal in (("bits", spec.dtype.bits), ("group_size", spec.group)):
            checked(settings.get(key, legal), f"{key} of {mode}", int, (legal,), source)
        return float_scheme(spec)

    def unknown_keys(self, config: Config) -> list[str]:
        """Keys with a dict or a bool are names of modules."""
        return [key for key in super().unknown_keys(config) if not isinstance(config.quant[key], dict | bool)]

    def examples(self) -> Iterator[Example]:
        for bits in BITS:
            for stored, size in (("BF16", 64), ("F16", 32)) if bits == DEFAULT_BITS else (("BF16", 64),):
                scheme = affine_scheme(bits, size, FLOAT_TYPES[stored], stored)
                affine = {"group_size": size, "bits": bits}
                yield Example(f"{bits}-bit-{stored}", Config(quant=affine, method="mlx"), scheme)
        for mode, spec in FLOAT_MODES.items():
            quant: dict[str, Any] = {"group_size": spec.group, "bits": spec.dtype.bits, "mode": mode}
            yield Example(mode, Config(quant=quant, method="mlx"), float_scheme(spec), bias=mode == "mxfp4")

    def expert_module(self, config: Config, name: str) -> Module:
        return Module(name, {".scales": Stored("BF16", ())})


FORMAT = Mlx()
