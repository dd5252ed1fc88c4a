"""`colibri`: look at quantised MoE checkpoints, check them, convert them."""

from __future__ import annotations

import typer

from colibri.cli.bench import bench
from colibri.cli.bench_serve import bench_serve
from colibri.cli.convert import convert
from colibri.cli.env import env
from colibri.cli.eval import evaluate
from colibri.cli.explain import explain
from colibri.cli.generate import generate
from colibri.cli.inspect import inspect
from colibri.cli.serve import serve
from colibri.cli.verify import verify

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Quantised Mixture-of-Experts checkpoints: look at them, check them, convert them.",
)
for command in (inspect, verify, convert, explain, bench, env):
    app.command()(command)
app.command()(generate)
app.command("eval")(evaluate)
app.command()(serve)
app.command("bench-serve")(bench_serve)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
