"""BitNet: four ternary digits per byte, one from each quarter of the rows.

The lowest two bits of a byte belong to the first quarter of the rows, the next two to the second, and
so on. A cut along N would split every byte, so the tensor is read whole. The two layer classes store
the same tensors, but one multiplies by the scale and the other divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats._floats import skip_list
from lancebill.formats.base import (
    BIAS,
    FLOAT_NAMES,
    FLOAT_TYPES,
    FLOATS,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    dense,
    optional,
    part,
    scalar,
)
from lancebill.numbers.dtypes import BF16, F32, TERNARY
from lancebill.numbers.spec import DIV, MUL, TENSOR, ActivationSpec, QuantSpec, Scale
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.numbers.weight import LogicalWeight

PER_BYTE = 4
OPS = {"bitlinear": DIV, "autobitlinear": MUL}


@dataclass(frozen=True)
class BitNetScheme(Scheme):
    """`weight` [N/4, K]: code = digit + 1; row r in byte row r % (N/4), bits 2 * (r // (N/4))."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        packed = stored["codes"]
        codes = torch.cat([(packed >> (2 * quarter)) & 3 for quarter in range(PER_BYTE)])[:n].contiguous()
        if bool((codes == 3).any()):
            raise BadValue(
                "code 3 is not a ternary digit", expected="0, 1 or 2", got=f"{int((codes == 3).sum())} codes of 3"
            )
        return LogicalWeight(self.spec, codes, (scalar(stored["scale"]),))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        if bool((weight.codes > 2).any()):
            raise CannotEncode("a code is not a ternary digit", expected="0, 1 or 2", got=int(weight.codes.max()))
        missing = -weight.n % PER_BYTE
        quarters = torch.nn.functional.pad(weight.codes, (0, 0, 0, missing)).chunk(PER_BYTE)
        packed = quarters[0].clone()
        for position, rows in enumerate(quarters[1:], start=1):
            packed |= rows << (2 * position)
        return {"codes": packed, "scale": weight.scales[0].reshape(1)}


def bitnet_scheme(spec: QuantSpec) -> BitNetScheme:
    parts = (
        part("codes", ".weight", "U8", f"n/{PER_BYTE} k", whole=True),
        part("scale", ".weight_scale", FLOAT_NAMES[spec.scales[0].dtype], ("1", "")),
        BIAS,
    )
    return BitNetScheme(spec, parts)


class BitNet(Format):
    name = "bitnet"
    used = frozenset({"linear_class", "quantization_mode", "modules_to_not_convert", "use_rms_norm"})
    ignored = frozenset({"rms_norm_eps"})

    def matches(self, config: Config) -> bool:
        return config.method == "bitnet"

    def scheme(self, config: Config, module: Module) -> Scheme:
        op = OPS[optional(config, "linear_class", str, "bitlinear", tuple(OPS))]
        if optional(config, "quantization_mode", str, "offline", ("offline", "online")) == "online":
            raise UnsupportedFormat(
                "online BitNet stores unquantised weights and quantises them at run time",
                where=config.source,
                expected="quantization_mode offline",
                got="online",
                hint="load it as an unquantised checkpoint and quantise to ternary-tensor",
            )
        if optional(config, "use_rms_norm", bool, False):
            raise UnsupportedFormat(
                "layers that normalise their input are not supported",
                where=config.source,
                expected="use_rms_norm false",
                got=True,
            )
        if self._is_unquantized(config, module):
            return dense(module)
        scale = FLOAT_TYPES.get(module.dtype(".weight_scale"), BF16)
        return bitnet_scheme(QuantSpec(TERNARY, (Scale(scale, TENSOR, op),)))

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        """Both layer classes quantise their input to int8 per row."""
        return ACTIVATIONS["int8"] if self.scheme(config, module).spec.quantized else None

    def _is_unquantized(self, config: Config, module: Module) -> bool:
        """By the stored tensors; without any, by the config's list of names."""
        if module.stored:
            return module.dtype(".weight", default="U8") in FLOATS and not module.has(".weight_scale")
        return module.name in skip_list(config, "modules_to_not_convert")

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        scale = spec.scales[0] if spec.scales else None
        if scale is None or spec != QuantSpec(TERNARY, (Scale(scale.dtype, TENSOR, scale.op),)):
            raise CannotEncode("BitNet stores ternary digits with one scale per matrix", got=spec)
        if scale.dtype not in FLOAT_NAMES:
            raise CannotEncode("BitNet stores its scale as bf16, fp16 or fp32", got=spec)
        return _config(spec, list(dense_modules)), bitnet_scheme(spec)

    def examples(self) -> Iterator[Example]:
        for scale in (Scale(BF16, TENSOR, DIV), Scale(F32, TENSOR, MUL)):
            spec = QuantSpec(TERNARY, (scale,))
            yield Example(str(spec), Config(quant=_config(spec, []), method="bitnet"), bitnet_scheme(spec))


def _config(spec: QuantSpec, dense_modules: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "bitnet",
        "linear_class": next(name for name, op in OPS.items() if op == spec.scales[0].op),
        "quantization_mode": "offline",
        "modules_to_not_convert": dense_modules or None,
    }


FORMAT = BitNet()
