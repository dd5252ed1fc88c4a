"""What all commands share: output for people or as JSON, progress, errors and exit codes.

Exit codes: 0 fine, 1 a problem was found, 2 the command was not used right. With `--json` exactly one
JSON object goes to stdout, errors included; progress and messages for people go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.table import Table

from lancebill.errors import CheckpointError, CheckpointProblems, LancebillError, SpecError

FINE, PROBLEM, USAGE = 0, 1, 2
PLAIN_WIDTH = 120  # of output that is not a terminal's

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Source = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint folder, a .safetensors or a .gguf file.")]


def console(*, error: bool = False) -> Console:
    """A console on stdout or stderr as they are now, wide enough for tables where no one looks."""
    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def print_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def existing(path: Path, as_json: bool) -> Path:
    """`path` if it is there: a path that is not is a mistake in the command."""
    if not path.exists():
        fail(CheckpointError("no such file or folder", where=str(path)), as_json, USAGE)
    return path


@contextmanager
def reported(as_json: bool, code: int = PROBLEM) -> Iterator[None]:
    """Errors of ours, of the disk and of the user's patience end the command without a traceback."""
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


def fail(error: LancebillError, as_json: bool, code: int) -> NoReturn:
    """Print an error with the facts it carries and leave."""
    if as_json:
        print_json({"error": facts(error)})
    else:
        print_error(error, console(error=True))
    raise typer.Exit(code)


def facts(error: LancebillError) -> dict[str, Any]:
    """An error for `--json`; one that holds several lists them."""
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
    """A bar on stderr if that is a terminal; the value is called with every step done."""
    out = console(error=True)
    if not out.is_terminal:
        yield lambda _: None
        return
    count: ProgressColumn = DownloadColumn() if in_bytes else MofNCompleteColumn()
    with Progress(TextColumn("{task.description}"), BarColumn(), count, TimeLeft(), console=out, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda step: bar.advance(task, step)


def table(*columns: str) -> Table:
    """A light table; columns that start with '>' are numbers and align right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return made


def size(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def ranges(numbers: list[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
