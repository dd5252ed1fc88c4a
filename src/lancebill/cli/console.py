"""Shared by all commands: text and JSON output, progress bars, errors and exit codes.

Exit codes: 0 success, 1 a problem was found, 2 wrong usage. With `--json`, stdout gets exactly one JSON object,
errors included; progress and messages go to stderr.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lancebill.errors import CheckpointError, CheckpointProblems, LancebillError, SpecError

if TYPE_CHECKING:
    from rich.progress import Progress

FINE, PROBLEM, USAGE = 0, 1, 2
PLAIN_WIDTH = 120  # columns, when the output is not a terminal

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Source = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A checkpoint folder, a .safetensors or .gguf file, or a model on the hub."),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", help="Branch, tag or commit of a model on the hub.", show_default=False),
]


def console(*, error: bool = False) -> Console:
    """A console on the current stdout or stderr. A pipe gets `PLAIN_WIDTH` columns, so that tables are not cut."""
    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def print_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def existing(path: Path, as_json: bool, hint: str | None = None) -> Path:
    """`path`, if it exists; a missing path is a usage error."""
    if not path.exists():
        fail(CheckpointError("no such file or folder", where=str(path), hint=hint), as_json, USAGE)
    return path


def check_path(path: Path, as_json: bool) -> None:
    """A path that is missing and cannot be the name of a model on the hub is a usage error."""
    from lancebill.checkpoint.read.hub import is_hub_name

    if not is_hub_name(path):
        existing(path, as_json, hint="a model on the hub is written owner/name")


def located(path: Path, revision: str | None, as_json: bool) -> Path:
    """The local path of a checkpoint; a model on the hub is downloaded if it is not in the hub's cache."""
    from lancebill.checkpoint.read.hub import local_path

    check_path(path, as_json)
    return local_path(path, revision)


@contextmanager
def reported(as_json: bool, code: int = PROBLEM) -> Iterator[None]:
    """Turn lancebill's errors, I/O errors, lack of memory and Ctrl-C into a message and an exit code."""
    try:
        yield
    except SpecError as error:
        fail(error, as_json, USAGE)
    except LancebillError as error:
        fail(error, as_json, code)
    except OSError as error:
        fail(CheckpointError(error.strerror or str(error), where=error.filename), as_json, PROBLEM)
    except MemoryError:
        fail(CheckpointError("out of memory"), as_json, PROBLEM)
    except KeyboardInterrupt:
        console(error=True).print("stopped")
        raise typer.Exit(130) from None


@contextmanager
def cleans_up_when_stopped() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception does, so that what it wrote so far is removed."""

    def stop(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = (number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN)
    before = {number: signal.signal(number, stop) for number in numbers}  # `nohup` ignores SIGHUP
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(error: LancebillError, as_json: bool, code: int) -> NoReturn:
    """Print an error with all its fields and exit."""
    if as_json:
        print_json({"error": facts(error)})
    else:
        print_error(error, console(error=True))
    raise typer.Exit(code)


def facts(error: LancebillError) -> dict[str, Any]:
    """An error as JSON; `CheckpointProblems` lists the errors it holds."""
    if isinstance(error, CheckpointProblems):
        return {**error.facts(), "problems": [problem.facts() for problem in error.problems]}
    return dict(error.facts())


def print_error(error: LancebillError, out: Console, title: str = "error", color: str = "red") -> None:
    problems = error.problems if isinstance(error, CheckpointProblems) else ()
    what = error.what.splitlines()[0] if problems else error.what
    out.print(f"[bold {color}]{title}:[/] {escape(what)}", soft_wrap=True)
    for name in ("where", "expected", "got", "hint"):
        value = error.facts()[name]
        if value is not None:
            out.print(f"  [dim]{name:<9}[/]{escape(value)}", soft_wrap=True)
    for problem in problems[: CheckpointProblems.SHOWN]:
        print_error(problem, out, "problem", color)
    if len(problems) > CheckpointProblems.SHOWN:
        out.print(f"... and {len(problems) - CheckpointProblems.SHOWN} more (all of them with --json)")


@contextmanager
def progress(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal; yields the function that advances it."""
    out = console(error=True)
    if not out.is_terminal:
        yield lambda _: None
        return
    with _bar(out, in_bytes) as bar:
        task = bar.add_task(what, total=total)
        yield lambda step: bar.advance(task, step)


@contextmanager
def bytes_loaded(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with bytes per second on stderr if that is a terminal; yields `update(bytes so far, in all)`."""
    out = console(error=True)
    if not out.is_terminal:
        yield lambda done, total: None
        return
    with _bar(out, in_bytes=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(out: Console, in_bytes: bool) -> Progress:
    from rich import progress as rich  # slow to import: --help and errors do without it

    counts = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if in_bytes else (rich.MofNCompleteColumn(),)
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), *counts, rich.TimeRemainingColumn()
    return rich.Progress(*columns, console=out, transient=True)


def table(*columns: str) -> Table:
    """A table without borders; columns whose title starts with '>' are aligned right."""
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        grid.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return grid


def size(count: int) -> str:
    """A number of bytes with its unit: 1.50 kB."""
    if count < 1000:
        return f"{count:.0f} B"
    power = next((power for power in (1, 2, 3) if count < 1000 ** (power + 1)), 4)
    return f"{count / 1000**power:.2f} {'kMGT'[power - 1]}B"
