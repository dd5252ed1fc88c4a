"""`colibri`: look at quantised MoE checkpoints, check them, convert them."""

from __future__ import annotations

import typer

from colibri.cli.bench import bench
from colibri.cli.convert import convert
from colibri.cli.env import env
from colibri.cli.explain import explain
from colibri.cli.inspect import inspect
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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
