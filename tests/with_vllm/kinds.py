"""Copies of a model with its experts in every format: what `lancebill convert` writes, and what only other tools write.

The latter are written with the schemes of the formats' own examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import Naming
from lancebill.checkpoint.write.convert import ConvertOptions, convert, plan_conversion
from lancebill.checkpoint.write.plan_output import plan_output
from lancebill.checkpoint.write.target import Target, choose_target
from lancebill.formats import registry
from lancebill.formats.base import Example, Format, Loading, Scheme
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import parse_spec

# (spec, format) of `lancebill convert`.
CONVERTED: dict[str, tuple[str, str]] = {
    "ct-int4": ("int4-g32", "compressed-tensors"),
    "ct-int4-zero-points": ("int4-g32-zp", "compressed-tensors"),
    "ct-int8": ("int8", "compressed-tensors"),
    "ct-fp8-channel": ("fp8-channel", "compressed-tensors"),
    "ct-fp8-block": ("fp8-block", "compressed-tensors"),
    "ct-mxfp4": ("mxfp4", "compressed-tensors"),
    "ct-nvfp4": ("nvfp4", "compressed-tensors"),
    "ct-mxfp8": ("mxfp8", "compressed-tensors"),
    "gptq": ("int4-g32:fp16", "gptq"),
    "awq": ("int4-g32-zp", "awq"),
    "fp8": ("fp8-block", "fp8"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "modelopt": ("nvfp4", "modelopt"),
    "bitsandbytes": ("nf4", "bitsandbytes"),
    "bitnet": ("ternary-tensor:fp32", "bitnet"),
    "bf16": ("bf16", "dense"),
}
# (format, name of an example) of formats that lancebill reads and does not write.
BY_EXAMPLE: dict[str, tuple[str, str]] = {
    "auto-round": ("auto-round", "auto_round:gptqmodel-int4-g64:fp16-zp"),
    "hqq": ("hqq", "4-bit"),
    "humming": ("humming", "int4-g32-zp:bf16"),
    "int8": ("int8", "rows-F32"),
    "mlx": ("mlx", "4-bit-BF16"),
    "quanto": ("quanto", "int4"),
    "quark": ("quark", "int4-group-zp"),
    "torchao": ("torchao", "int4"),
    "w4afp8": ("w4afp8", "experts-F32"),
}
KINDS = (*CONVERTED, *BY_EXAMPLE)
MLX = "mlx"


@dataclass(frozen=True)
class WrittenByExample:
    """Stands for a format in a conversion: it stores what one of the format's examples stores."""

    format: Format
    example: Example

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def stacked(self) -> bool:
        return self.format.stacked

    def config_for(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        """The example's config. Dense modules have no scales, which tells all these formats that they are dense."""
        return {"quant_method": self.example.config.method, **self.example.config.quant}, self.example.scheme

    def leave_rest(self, config: Mapping[str, Any], experts: str, dense: Sequence[str]) -> dict[str, Any]:
        return dict(config)

    def in_transformers(self, spec: QuantSpec) -> Loading:
        return self.format.in_transformers(spec)


def target_of(kind: str) -> Target:
    if kind in CONVERTED:
        spec, name = CONVERTED[kind]
        return choose_target(parse_spec(spec), name)
    name, wanted = BY_EXAMPLE[kind]
    format = registry()[name]
    example = next(each for each in format.examples() if each.name == wanted)
    return Target(WrittenByExample(format, example), example.scheme.spec)  # type: ignore[arg-type]


def write_copy(source: Path, destination: Path, kind: str) -> None:
    """A copy of the model with its experts in a format."""
    with Checkpoint.open(source) as checkpoint:
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
        if kind == MLX:
            manifest = replace(manifest, naming=named_as_by_mlx(manifest.naming))
        output = plan_output(manifest, target_of(kind), checkpoint.headers)
        if kind == MLX:
            state_as_mlx(output.config)
        convert(checkpoint, destination, output, ConvertOptions())


def named_as_by_mlx(naming: Naming) -> Naming:
    """mlx-lm stacks gate and up apart."""
    forms = sorted(naming.forms, key=lambda form: form.fused or not form.stacked)
    return replace(naming, forms=tuple(forms))


def state_as_mlx(config: dict[str, Any]) -> None:
    """mlx-lm names no method, and writes its section twice."""
    del config["quantization_config"]["quant_method"]
    config["quantization"] = config["quantization_config"]


def write_dequantised(source: Path, destination: Path) -> None:
    """A copy of the model with the same numbers, not quantised."""
    with Checkpoint.open(source) as checkpoint:
        output = plan_conversion(checkpoint, choose_target(parse_spec("fp32")), ConvertOptions())
        convert(checkpoint, destination, output, ConvertOptions())
