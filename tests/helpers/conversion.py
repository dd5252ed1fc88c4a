"""Helpers of the conversion tests: source checkpoints, and the matrices of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.write.convert import ConvertOptions, Report, convert, plan_conversion
from lancebill.checkpoint.write.target import choose_target
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import same_bits
from lancebill.testing.checkpoints import Geometry, generate, save

SIZE = Geometry(experts=2, hidden=256, intermediate=128, layers=1)


def find_row(family: str) -> names.Naming:
    return next(row for row in names.TABLE if row.family == family)


def find_example(fmt: str, name: str) -> Example:
    return next(e for e in registry()[fmt].examples() if e.name == name)


def dense_source(folder: Path, family: str = "qwen3_moe", form: int = 0, size: Geometry = SIZE) -> Path:
    row = find_row(family)
    return save(generate(find_example("dense", "bf16"), row, row.forms[form], size), folder / f"{family}-{form}")


def run_conversion(source: Path, destination: Path, to: str, fmt: str | None = None, **options: Any) -> Report:
    chosen = ConvertOptions(**options)
    with Checkpoint.open(source) as checkpoint:
        return convert(
            checkpoint, destination, plan_conversion(checkpoint, choose_target(parse_spec(to), fmt), chosen), chosen
        )


def matrices(path: Path) -> dict[tuple[int, int, str], Tensor]:
    """All experts' matrices, dequantised and multiplied by their pre-quantisation scale."""
    with Checkpoint.open(path) as checkpoint:
        manifest = manifests.build(checkpoint.config, {n: i.stored for n, i in checkpoint.tensors.items()})
        manifest.check(str(path))
        out = {}
        for layer in manifest.layers.values():
            for (expert, name), projection in layer.projections.items():
                weight = load_projection(checkpoint.read, projection)
                values = dequantize(weight)
                if "pre_quant_scale" in weight.inputs:
                    values = values * weight.inputs["pre_quant_scale"].float()
                out[layer.index, expert, name] = values
        return out


def biases(path: Path) -> dict[tuple[int, int, str], Tensor | None]:
    with Checkpoint.open(path) as checkpoint:
        manifest = manifests.build(checkpoint.config, {n: i.stored for n, i in checkpoint.tensors.items()})
        return {
            (layer.index, expert, name): load_projection(checkpoint.read, projection).bias
            for layer in manifest.layers.values()
            for (expert, name), projection in layer.projections.items()
        }


def same_matrices(a: dict[tuple[int, int, str], Tensor], b: dict[tuple[int, int, str], Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)


def read_config(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


def file_contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
