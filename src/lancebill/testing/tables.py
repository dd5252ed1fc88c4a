"""The page of formats and families, written by the registry itself: `python -m lancebill.testing.tables`.

A test compares docs/formats.md with what this gives, so that the page cannot fall behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import getdoc, getmodule

from lancebill.checkpoint.resolve.naming import TABLE, NameForm, Naming
from lancebill.errors import CannotEncode
from lancebill.formats import registry
from lancebill.formats.base import Format, Module
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.numbers.spec import QuantSpec
from lancebill.testing.weights import random_example

PAGE = "docs/formats.md"
MODULE = "model.layers.0.mlp.experts.0.gate_proj"
INTRODUCTION = """# Formats and families

Written by `python -m lancebill.testing.tables` from the registry of formats and the naming table; a test keeps it up to
date. Specs have the names of `numbers/spec_names.py`: `int4-g64:fp16-zp` is 4-bit integers with an fp16 scale and an
integer zero point for each 64 columns. Group sizes are those of the examples the tests run on; other sizes work
alike. Axes are explained in `formats/axes.py`: `k^` are packed codes, `k/32` one entry for each 32 columns, an empty
one is a scalar.
"""


def page() -> str:
    """The whole page."""
    formats = list(registry().values())
    specs = {e.scheme.spec for f in formats for e in f.examples()}
    sections = [_format(f, sorted(specs, key=str)) for f in formats]
    return "\n".join([INTRODUCTION, *sections, "## Families\n", _families(), ""])


def _format(fmt: Format, specs: Iterable[QuantSpec]) -> str:
    examples = list(fmt.examples())
    read = dict.fromkeys(sorted(str(e.scheme.spec) for e in examples))
    written = [str(spec) for spec in specs if _writes(fmt, spec)]
    lines = [f"## {fmt.name}\n", f"{_first_line(fmt)}\n", f"* Reads {_listed(read)}."]
    lines.append(f"* Written by `convert` for {_listed(written)}." if written else "* Read only.")
    declared = dict.fromkeys(sorted(_activations(fmt)))
    if declared:
        lines.append(f"* May ask for inputs as {_listed(declared)}.")
    if fmt.stacked:
        lines.append("* All experts of a layer in one tensor.")
    return "\n".join([*lines, "", _parts(fmt), ""])


def _first_line(fmt: Format) -> str:
    module = getmodule(type(fmt))
    text = (getdoc(module) or "").splitlines()
    return text[0] if text else fmt.name


def _writes(fmt: Format, spec: QuantSpec) -> bool:
    try:
        fmt.export(spec, ())
    except CannotEncode:
        return False
    return True


def _activations(fmt: Format) -> Iterator[str]:
    """How the examples, as they would be stored, want inputs to be represented."""
    for example in fmt.examples():
        stored = example.scheme.encode(random_example(example, example.n, example.k, seed=0))
        parts = {part.role: part for part in example.scheme.parts}
        headers = {parts[r].suffix[0]: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for r, t in stored.items()}
        spec = fmt.activations(example.config, Module(MODULE, headers))
        if spec is not None:
            yield str(spec)


def _parts(fmt: Format) -> str:
    """Every stored tensor of any example: one row for a role under one name."""
    rows: dict[tuple[str, tuple[str, ...]], tuple[dict[str, None], dict[str, None], bool]] = {}
    for example in fmt.examples():
        for part in example.scheme.parts:
            dtypes, axes, optional = rows.get((part.role, part.suffix), ({}, {}, True))
            dtypes |= dict.fromkeys(part.dtypes)
            axes |= dict.fromkeys(part.axes)
            rows[part.role, part.suffix] = dtypes, axes, optional and part.optional
    table = ["| role | name ends in | dtypes | axes |", "|---|---|---|---|"]
    for (role, suffix), (dtypes, axes, optional) in rows.items():
        names = ", ".join(f"`{s}`" if s else "(nothing)" for s in suffix)
        shapes = ", ".join(f"`{a}`" if a else "(scalar)" for a in axes)
        table.append(f"| {role}{' (optional)' if optional else ''} | {names} | {', '.join(dtypes)} | {shapes} |")
    return "\n".join(table)


def _families() -> str:
    table = ["| family | `model_type` | experts are spelled |", "|---|---|---|"]
    for row in TABLE:
        table.append(f"| {row.family} | {_listed(row.model_types)} | {_forms(row)} |")
    return "\n".join(table)


def _forms(row: Naming) -> str:
    return "; ".join(f"`{form.home}{next(iter(form.names.values()))}` ({_traits(form)})" for form in row.forms)


def _traits(form: NameForm) -> str:
    halves = "gate and up fused" if form.fused else "gate and up apart" if form.gated else "no gate"
    traits = ["stacked" if form.stacked else "each expert its own", halves]
    traits += ["rows interleaved"] if form.interleaved else []
    traits += [f"{' and '.join(form.transposed)} transposed"] if form.transposed else []
    return ", ".join(traits)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(page())
