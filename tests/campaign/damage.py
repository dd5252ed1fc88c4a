"""Damage: every tensor of every format and family is left out, doubled, cut, given another shape or another dtype.

    python tests/campaign/damage.py --record

Every format is combined with every naming form of every family it is used with. Each damage must be reported by an
error that names the tensor. Headers are damaged in memory for all combinations; on disk, files of every example of
every format are damaged and read by `verify`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally, memory_folder
from covering import families_and_forms
from safetensors.torch import load_file, save_file

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import NameForm, Naming, find_family, parse_name
from lancebill.cli.verify import examine
from lancebill.errors import DuplicateTensor, LancebillError, MissingTensor, WrongDtype, WrongShape
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Geometry, generate, save
from lancebill.testing.conformance import DEFAULT_FAMILY

Headers = dict[str, Stored]
NO_FORMAT_USES = "F64"
ANY_LENGTH = "?"  # in the axes of a part


@dataclass(frozen=True)
class Damage:
    """A change to the headers of one tensor, and the errors of which one must name it."""

    name: str
    apply: Callable[[Mapping[str, Stored], str], Headers]
    errors: tuple[type[LancebillError], ...]


def _without(headers: Mapping[str, Stored], name: str) -> Headers:
    return {other: stored for other, stored in headers.items() if other != name}


def _doubled(form: NameForm, headers: Mapping[str, Stored], name: str) -> Headers:
    """The same part also under the name that LoRA exports use."""
    parsed = parse_name(form, name)
    assert parsed is not None
    return {**headers, f"{name.removesuffix(parsed.suffix)}.base_layer{parsed.suffix}": headers[name]}


def _other_dtype(headers: Mapping[str, Stored], name: str) -> Headers:
    return {**headers, name: replace(headers[name], dtype=NO_FORMAT_USES)}


def _longer(headers: Mapping[str, Stored], name: str) -> Headers:
    shape = headers[name].shape
    return {**headers, name: replace(headers[name], shape=(*shape[:-1], shape[-1] + 1, 3) if shape else (3,))}


def _shorter(headers: Mapping[str, Stored], name: str) -> Headers:
    shape = headers[name].shape or (2,)
    return {**headers, name: replace(headers[name], shape=(shape[0] - 1 if shape[0] > 2 else 7, *shape[1:]))}


DAMAGES = (
    Damage("left out", _without, (MissingTensor,)),
    Damage("of a longer shape", _longer, (WrongShape, MissingTensor)),
    Damage("of a shorter shape", _shorter, (WrongShape, MissingTensor)),
    Damage("of another dtype", _other_dtype, (WrongDtype, MissingTensor)),
)


def damage_headers(example: Example, row: Naming, form: NameForm, tally: Tally) -> None:
    """Every damage of every tensor of the first of two layers, with two experts."""
    size = Geometry(experts=2, hidden=example.k, intermediate=example.k, layers=2)
    made = generate(example, row, form, size)
    label = f"{example.name} as {row.family} {row.forms.index(form)}"
    whole = manifests.build(made.config, made.headers, row)
    if whole.problems:
        tally.add(f"{label}: an undamaged checkpoint has problems: {whole.problems[0]}")
        return
    optional = _optional_suffixes(example, row)
    damages = (*DAMAGES, Damage("stored twice", partial(_doubled, form), (DuplicateTensor,)))
    free = tuple(suffix for part in example.scheme.parts if ANY_LENGTH in part.axes for suffix in part.suffix)
    for name in [name for name in made.headers if (parsed := parse_name(form, name)) and parsed.layer == 0]:
        for damage in damages:
            if damage.apply is _shorter and name.endswith(free):
                continue  # a JSON text of any length: what is in it is checked on disk
            if damage.name == "left out" and form.stacked and name.endswith(optional):
                continue  # leaving out an optional tensor of a whole layer is legal
            damaged = damage.apply(made.headers, name)
            problems = manifests.build(made.config, damaged, row).problems
            either = (name, *(set(damaged) - set(made.headers)))  # the copy, where it is stored twice
            named = any(isinstance(p, damage.errors) and any(n in p.render() for n in either) for p in problems)
            found = "; ".join(p.render() for p in problems[:2]) or "nothing"
            tally.add(None if named else f"{label}: {name} {damage.name}: found {found}")


def _optional_suffixes(example: Example, row: Naming) -> tuple[str, ...]:
    parts = [part for part in example.scheme.parts if part.optional and not (row.biased and part.role == "bias")]
    return tuple(suffix for part in parts for suffix in part.suffix)


def damage_files(example: Example, row: Naming, folder: Path, tally: Tally) -> None:
    """The same on disk, read by `verify`: also files cut anywhere, and a tensor stored in two shards."""
    form = row.forms[0]
    made = generate(example, row, form, Geometry(experts=2, hidden=example.k, intermediate=example.k))
    path = save(made, folder / "whole")
    known = [problem.render() for problem in examine(path).problems]
    if any(name in text for name in made.headers for text in known):
        tally.add(f"{example.name}: an undamaged folder has problems: {known[0]}")
        return
    shard = next(path.glob("*.safetensors"))
    tensors, sound = load_file(shard), shard.read_bytes()
    optional = _optional_suffixes(example, row)
    for name in tensors:
        for what, damaged in _damaged_tensors(tensors, name):
            if what == "left out" and form.stacked and name.endswith(optional):
                continue
            save_file(damaged, shard)
            _expect_named(path, name, f"{example.name}: {name} {what} on disk", tally)
        shard.write_bytes(sound)
        save_file({name: tensors[name]}, path / "second.safetensors")
        _expect_named(path, name, f"{example.name}: {name} in two files", tally)
        (path / "second.safetensors").unlink()
    for cut in sorted({len(sound) * i // 16 for i in range(16)} | {len(sound) - 1, 7, 8, 9}):
        shard.write_bytes(sound[:cut])
        _expect_named(path, shard.name, f"{example.name}: cut to {cut} of {len(sound)} bytes", tally)


def _damaged_tensors(tensors: dict[str, torch.Tensor], name: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    tensor = tensors[name]
    yield "left out", {other: t for other, t in tensors.items() if other != name}
    longer = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, 3) if tensor.ndim else torch.zeros(3)
    yield "of another shape", {**tensors, name: longer.to(tensor.dtype)}
    yield "of another dtype", {**tensors, name: torch.zeros(tensor.shape, dtype=torch.float64)}


def _expect_named(path: Path, name: str, label: str, tally: Tally) -> None:
    report = examine(path)
    texts = [problem.render() for problem in report.problems]
    tally.add(None if any(name in text for text in texts) else f"{label}: found {'; '.join(texts[:2]) or 'nothing'}")


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    headers, files, combinations = tallies["headers"], tallies["files"], tallies["combinations"].cases
    total = Tally.total((headers, files))
    reached = (
        f"{headers.cases:,} damaged headers ({combinations} formats x naming forms) and {files.cases:,} damaged files:"
        f" {total.cases - total.failures:,} named exactly"
    )
    return {"R3": total.figure(reached)}


def main() -> None:
    part = Part("damage", __doc__, figures, seed=0, shards=1)
    formats = sorted(registry().values(), key=lambda fmt: fmt.name)
    tallies = {"headers": Tally(), "files": Tally(), "combinations": Tally()}
    for fmt in formats[part.arguments.seed :: part.arguments.shards]:
        examples = list(fmt.examples())
        for row, forms in families_and_forms(fmt):
            for number, form in enumerate(forms):
                damage_headers(examples[number % len(examples)], row, form, tallies["headers"])
                tallies["combinations"].add()
        for example in examples:
            row = find_family({"model_type": example.config.model.get("model_type", DEFAULT_FAMILY)})
            with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
                damage_files(example, row, Path(folder), tallies["files"])
        part.report(tallies, {"last format": fmt.name})
    part.finish(tallies)


if __name__ == "__main__":
    main()
