"""`lancebill verify`: report every problem of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json, Revision, Source
from lancebill.errors import CheckpointProblems, LancebillError, UnsupportedFormat

if TYPE_CHECKING:
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve.manifest import Manifest

SHOWN = 20  # kinds of findings printed without --json


@dataclass
class VerifyReport:
    """Problems fail the check. Warnings are suspicious, and are problems with --strict. Notes never fail."""

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
    values: Annotated[bool, typer.Option("--values", help="Read every tensor and check its values.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as problems.")] = False,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Check headers, names, shapes, dtypes and config; with --values also every stored value."""
    with ui.reported(as_json):
        report = examine(ui.located(path, revision, as_json), values=values, strict=strict)
    if as_json:
        ui.print_json(describe(report))
    else:
        show(report, ui.console())
    raise typer.Exit(ui.FINE if report.ok else ui.PROBLEM)


def examine(path: Path, *, values: bool = False, strict: bool = False) -> VerifyReport:
    """Every problem of a checkpoint; a file that cannot be opened counts as one problem."""
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve import manifest as manifests

    report = VerifyReport(str(path))
    try:
        with Checkpoint.open(path) as checkpoint:
            report.tensors = len(checkpoint.tensors)
            report.problems.extend(checkpoint.problems)
            manifest = manifests.build(checkpoint.config, checkpoint.headers)
            report.layers = len(manifest.layers)
            report.problems.extend(_metadata_problems(checkpoint, manifest))
            report.warnings.extend(_unknown_keys(manifest))
            if values:
                _check_experts(checkpoint, manifest, report)
                _check_others(checkpoint, manifest, report)
    except CheckpointProblems as error:
        report.problems.extend(error.problems)
    except LancebillError as error:
        report.problems.append(error)
    if strict:
        report.problems, report.warnings = [*report.problems, *report.warnings], []
    return report


def describe(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "summary": [
            {"severity": severity, "count": len(kind), "first": kind[0].facts()}
            for severity, found in _by_severity(report)
            for kind in kinds(found)
        ],
        "problems": [error.facts() for error in report.problems],
        "warnings": [error.facts() for error in report.warnings],
        "notes": [error.facts() for error in report.notes],
        "checked": {"layers": report.layers, "tensors": report.tensors, "matrices": report.matrices},
    }


def show(report: VerifyReport, out: Console) -> None:
    colors = {"problem": "red", "warning": "yellow", "note": "cyan"}
    for severity, found in _by_severity(report):
        groups = kinds(found)
        for kind in groups[:SHOWN]:
            ui.print_error(kind[0], out, severity, colors[severity])
            if len(kind) > 1:
                out.print(f"  [dim]and {len(kind) - 1} more like it, the last in {escape(kind[-1].where or '')}[/]")
        if len(groups) > SHOWN:
            out.print(f"... and {len(groups) - SHOWN} other kinds (all of them with --json)")
    checked = f"{report.tensors} tensors, {report.layers} layer{'s' * (report.layers != 1)} of experts"
    checked += f", {report.matrices} matrices decoded" if report.matrices else ""
    verdict = "[bold green]fine[/]" if report.ok else f"[bold red]{_count(report.problems, 'problem')}[/]"
    verdict += f", [bold yellow]{_count(report.warnings, 'warning')}[/]" if report.warnings else ""
    out.print(f"{verdict}: {checked}")


def kinds(errors: Sequence[LancebillError]) -> list[list[LancebillError]]:
    """Errors that differ only in numbers and places, together: one mistake is often made for every expert."""
    groups: dict[tuple[type, str], list[LancebillError]] = {}
    for error in errors:
        groups.setdefault((type(error), PLACE.sub("#", error.what)), []).append(error)
    return list(groups.values())


PLACE = re.compile(r"[\w.]*\d[\w.]*")  # a number, or a tensor's name with numbers in it


def _by_severity(report: VerifyReport) -> Iterator[tuple[str, Sequence[LancebillError]]]:
    yield from (("problem", report.problems), ("warning", report.warnings), ("note", report.notes))


def _count(found: Sequence[LancebillError], word: str) -> str:
    return f"{len(found)} {word}{'s' * (len(found) > 1)}"


def _metadata_problems(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[LancebillError]:
    from lancebill.checkpoint.load.check_values import check_stored_size
    from lancebill.checkpoint.resolve.missing_layers import missing_layers
    from lancebill.checkpoint.resolve.router_check import router_problems
    from lancebill.checkpoint.resolve.unquantized_experts import unquantized_experts

    for one in manifest.mixtures:
        yield from one.problems
    yield from missing_layers(manifest)
    for one in manifest.mixtures:
        yield from unquantized_experts(one)
    yield from router_problems(manifest)
    yield from _activation_problems(manifest)
    for layer in manifest.stored_layers:
        for projection in layer.projections.values():
            error = check_stored_size(checkpoint.read, projection)
            if error is not None:
                yield error


def _activation_problems(manifest: Manifest) -> Iterator[LancebillError]:
    from lancebill.checkpoint.resolve.routing_config import activation_for

    for index in manifest.layers:
        try:
            activation_for(manifest.config.model, manifest.naming.family, index)
        except UnsupportedFormat as error:
            yield error
            return  # the other layers have the same config


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


def _check_experts(checkpoint: Checkpoint, manifest: Manifest, report: VerifyReport) -> None:
    from lancebill.checkpoint.load.check_values import Profile, check_values
    from lancebill.checkpoint.load.compare_experts import compare_inputs, compare_layer
    from lancebill.checkpoint.worker_threads import map_in_order

    projections = [p for layer in manifest.stored_layers for p in layer.projections.values()]
    profiles: dict[str, list[Profile]] = {layer.where: [] for layer in manifest.stored_layers}
    with ui.progress("experts", len(projections)) as advance:
        for projection, findings in map_in_order(partial(check_values, checkpoint.read), projections):
            report.problems.extend(findings.problems)
            report.warnings.extend(findings.warnings)
            report.notes.extend(findings.notes)
            if findings.profile is not None:
                profiles[projection.where_layer].append(findings.profile)
            report.matrices += 1
            advance(1)
    for members in profiles.values():
        report.warnings.extend(compare_layer(checkpoint.read, members))
    report.warnings.extend(compare_inputs(profile for members in profiles.values() for profile in members))


def _check_others(checkpoint: Checkpoint, manifest: Manifest, report: VerifyReport) -> None:
    from lancebill.checkpoint.load.check_other_tensors import check_tensor

    others = [name for name in checkpoint.headers if name not in manifest.expert_tensors]
    with ui.progress("other tensors", len(others)) as advance:
        for name in others:
            error = check_tensor(checkpoint.read, name, checkpoint.headers[name])
            if error is not None:
                report.problems.append(error)
            advance(1)
