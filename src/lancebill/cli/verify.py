"""`lancebill verify`: report every problem of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    from lancebill.checkpoint.resolve.manifest import Manifest, Projection

SHOWN = 50  # problems printed without --json


@dataclass
class VerifyReport:
    """Problems fail the check. Unknown config keys are warnings, or problems with --strict. Notes never fail."""

    path: str
    problems: list[LancebillError] = field(default_factory=list)
    warnings: list[LancebillError] = field(default_factory=list)
    notes: list[LancebillError] = field(default_factory=list)
    layers: int = 0
    tensors: int = 0
    matrices: int = 0  # decoded, with --values

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: Source,
    values: Annotated[bool, typer.Option("--values", help="Decode every expert and check its values.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat unknown config keys as problems.")] = False,
    as_json: Json = False,
) -> None:
    """Check headers, names, shapes, dtypes and config; with --values also every stored value."""
    with ui.reported(as_json):
        report = examine(ui.existing(path, as_json), values=values, strict=strict)
    if as_json:
        ui.print_json(describe(report))
    else:
        show(report, ui.console())
    raise typer.Exit(ui.FINE if report.ok else ui.PROBLEM)


def examine(path: Path, *, values: bool = False, strict: bool = False) -> VerifyReport:
    """Every problem of a checkpoint; a file that cannot be opened counts as one problem."""
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve import manifest as manifests
    from lancebill.checkpoint.resolve.missing_layers import missing_layers
    from lancebill.checkpoint.resolve.router_check import router_problems

    report = VerifyReport(str(path))
    try:
        with Checkpoint.open(path) as checkpoint:
            report.tensors = len(checkpoint.tensors)
            report.problems.extend(checkpoint.problems)
            manifest = manifests.build(checkpoint.config, checkpoint.headers)
            report.layers = len(manifest.layers)
            report.problems.extend((*manifest.problems, *missing_layers(manifest), *router_problems(manifest)))
            (report.problems if strict else report.warnings).extend(_unknown_keys(manifest))
            projections = [p for layer in manifest.layers.values() for p in layer.projections.values()]
            report.problems.extend(_wrong_sizes(checkpoint, projections))
            if values:
                _check_values(checkpoint, projections, report)
    except CheckpointProblems as error:
        report.problems.extend(error.problems)
    except LancebillError as error:
        report.problems.append(error)
    return report


def describe(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "problems": [error.facts() for error in report.problems],
        "warnings": [error.facts() for error in report.warnings],
        "notes": [error.facts() for error in report.notes],
        "checked": {"layers": report.layers, "tensors": report.tensors, "matrices": report.matrices},
    }


def show(report: VerifyReport, out: Console) -> None:
    for errors, title, color in (
        (report.problems, "problem", "red"),
        (report.warnings, "warning", "yellow"),
        (report.notes, "note", "cyan"),
    ):
        for error in errors[:SHOWN]:
            ui.print_error(error, out, title, color)
        if len(errors) > SHOWN:
            out.print(f"... and {len(errors) - SHOWN} more (all of them with --json)")
    checked = f"{report.tensors} tensors, {report.layers} layers of experts"
    checked += f", {report.matrices} matrices decoded" if report.matrices else ""
    count = len(report.problems)
    word = "[bold green]fine[/]" if report.ok else f"[bold red]{count} problem{'s' * (count > 1)}[/]"
    out.print(f"{word}: {checked}")


def _unknown_keys(manifest: Manifest) -> list[LancebillError]:
    config = manifest.config
    return [
        UnsupportedFormat(
            f"unknown config key {key!r} for {manifest.format.name}",
            where=config.source,
            hint="if this key changes how tensors are decoded, they are decoded wrongly",
        )
        for key in manifest.format.unknown_keys(config)
    ]


def _wrong_sizes(checkpoint: Checkpoint, projections: Iterable[Projection]) -> Iterator[LancebillError]:
    from lancebill.checkpoint.load.check_values import check_stored_size

    for projection in projections:
        error = check_stored_size(checkpoint.read, projection)
        if error is not None:
            yield error


def _check_values(checkpoint: Checkpoint, projections: Sequence[Projection], report: VerifyReport) -> None:
    from lancebill.checkpoint.load.check_values import check_values
    from lancebill.checkpoint.worker_threads import map_in_order

    check = partial(check_values, checkpoint.read)
    with ui.progress("values", len(projections)) as advance:
        for _, findings in map_in_order(check, projections):
            report.problems.extend(findings.problems)
            report.notes.extend(findings.notes)
            report.matrices += 1
            advance(1)
