"""`lancebill verify`: everything that is wrong with a checkpoint, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lancebill.cli import console as ui
from lancebill.cli.console import Json, Source
from lancebill.errors import CheckpointProblems, LancebillError, UnsupportedFormat

if TYPE_CHECKING:
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve.manifest import Manifest, StoredLayer

SHOWN = 50  # problems printed for people


@dataclass
class VerifyReport:
    """Problems fail the check, warnings do so with --strict, notes never."""

    path: str
    problems: list[LancebillError] = field(default_factory=list)
    warnings: list[LancebillError] = field(default_factory=list)
    notes: list[LancebillError] = field(default_factory=list)
    layers: int = 0
    tensors: int = 0
    matrices: int = 0  # decoded

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: Source,
    values: Annotated[bool, typer.Option("--values", help="Decode every expert and check its numbers.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Unknown config keys are problems too.")] = False,
    as_json: Json = False,
) -> None:
    """Check headers, names, shapes, dtypes and config; with --values every stored number."""
    with ui.reported(as_json):
        verdict = examine(ui.existing(path, as_json), values=values, strict=strict)
    if as_json:
        ui.print_json(report(verdict))
    else:
        show(verdict, ui.console())
    raise typer.Exit(ui.FINE if verdict.ok else ui.PROBLEM)


def examine(path: Path, *, values: bool = False, strict: bool = False) -> VerifyReport:
    """Everything that is wrong; a file that cannot be opened at all is one problem."""
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve import manifest as manifests

    verdict = VerifyReport(str(path))
    try:
        with Checkpoint.open(path) as checkpoint:
            verdict.tensors = len(checkpoint.tensors)
            verdict.problems.extend(checkpoint.problems)
            manifest = manifests.build(checkpoint.config, checkpoint.headers)
            verdict.layers = len(manifest.layers)
            verdict.problems.extend(manifest.problems)
            (verdict.problems if strict else verdict.warnings).extend(_unknown_keys(manifest))
            if values:
                _check_values(checkpoint, manifest.layers.values(), verdict)
    except CheckpointProblems as error:
        verdict.problems.extend(error.problems)
    except LancebillError as error:
        verdict.problems.append(error)
    return verdict


def report(verdict: VerifyReport) -> dict[str, Any]:
    return {
        "path": verdict.path,
        "ok": verdict.ok,
        "problems": [error.facts() for error in verdict.problems],
        "warnings": [error.facts() for error in verdict.warnings],
        "notes": [error.facts() for error in verdict.notes],
        "checked": {"layers": verdict.layers, "tensors": verdict.tensors, "matrices": verdict.matrices},
    }


def show(verdict: VerifyReport, out: Console) -> None:
    for errors, title, color in (
        (verdict.problems, "problem", "red"),
        (verdict.warnings, "warning", "yellow"),
        (verdict.notes, "note", "cyan"),
    ):
        for error in errors[:SHOWN]:
            ui.print_error(error, out, title, color)
        if len(errors) > SHOWN:
            out.print(f"... and {len(errors) - SHOWN} more (all of them with --json)")
    checked = f"{verdict.tensors} tensors, {verdict.layers} layers of experts"
    checked += f", {verdict.matrices} matrices decoded" if verdict.matrices else ""
    count = len(verdict.problems)
    word = "[bold green]fine[/]" if verdict.ok else f"[bold red]{count} problem{'s' * (count > 1)}[/]"
    out.print(f"{word}: {checked}")


def _unknown_keys(manifest: Manifest) -> list[LancebillError]:
    config = manifest.config
    return [
        UnsupportedFormat(
            f"the key '{key}' is not known to {manifest.format.name}",
            where=config.source,
            hint="if it changes what the numbers mean, they are read wrongly",
        )
        for key in manifest.format.unknown_keys(config)
    ]


def _check_values(checkpoint: Checkpoint, layers: Iterable[StoredLayer], verdict: VerifyReport) -> None:
    from lancebill.checkpoint.load.check_values import check_values
    from lancebill.checkpoint.load.worker_threads import ordered

    projections = [p for layer in layers for p in layer.projections.values()]
    check = partial(check_values, checkpoint.read)
    with ui.progress("values", len(projections)) as advance:
        for _, findings in ordered(check, projections):
            verdict.problems.extend(findings.problems)
            verdict.notes.extend(findings.notes)
            verdict.matrices += 1
            advance(1)
