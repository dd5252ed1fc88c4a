"""The `lancebill` program: registers the commands, each defined in its own module."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lancebill.cli.bench import bench
from lancebill.cli.bench_serve import bench_serve
from lancebill.cli.chat import chat
from lancebill.cli.convert import convert
from lancebill.cli.engines import PASS_THROUGH
from lancebill.cli.env import env, version_of
from lancebill.cli.eval import evaluate
from lancebill.cli.explain import explain
from lancebill.cli.flags import Command, Group
from lancebill.cli.generate import generate
from lancebill.cli.inspect import inspect
from lancebill.cli.kernels import app as kernels
from lancebill.cli.serve import serve
from lancebill.cli.tune import tune
from lancebill.cli.verify import verify

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Quantised Mixture-of-Experts models: inspect, verify, convert, explain, benchmark and run them.",
)


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lancebill {version_of('lancebill') or '(not installed: running from source)'}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


for command in (inspect, verify, convert, explain, bench, env):
    app.command(cls=Command)(command)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command, context_settings=PASS_THROUGH)(serve)
app.command("bench-serve", cls=Command, context_settings=PASS_THROUGH)(bench_serve)
app.command(cls=Command)(tune)
app.add_typer(kernels, name="kernels")


def main() -> None:
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # None: closed by the caller
    try:
        app()
    except OSError as error:  # commands report their own: this is the output, on a disk that is full for example
        sys.exit(f"error: cannot write the output: {error.strerror or error}")


if __name__ == "__main__":
    main()
