"""`lancebill bench-serve`: measure a server under load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json
from lancebill.cli.engines import Engine, EngineOption, running_server
from lancebill.errors import SpecError


def bench_serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|PATH", help="An OpenAI-compatible server: http://host:port/v1, or a checkpoint to serve."
        ),
    ],
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Words per prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Maximum tokens per answer.")] = 64,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Total number of requests.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Concurrent requests.")] = 8,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for an answer.")] = 600,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key that the server asks for.")] = None,
    engine: EngineOption = None,
    as_json: Json = False,
) -> None:
    """Throughput, time to first token and inter-token latency of streaming requests.

    With a PATH, `lancebill serve` runs meanwhile: it gets --engine, --api-key and all options that are not listed here.
    """
    with ui.reported(as_json):
        from lancebill.evaluate.load import Load, run_load

        load = Load(input_len, output_len, num_prompts, concurrency)
        with _server(target, engine, api_key, context.args) as url, ui.progress("requests", num_prompts) as advance:
            summary = run_load(url, load, timeout=timeout, api_key=api_key, progress=advance)
    if as_json:
        ui.print_json(summary)
    else:
        _show(summary, ui.console())
    raise typer.Exit(ui.PROBLEM if summary["failed"] else ui.FINE)


def _server(
    target: str, engine: Engine | None, api_key: str | None, words: Sequence[str]
) -> AbstractContextManager[str]:
    """The address of a server: the given one, or that of a server for the given checkpoint."""
    if Path(target).exists():
        options = [] if engine is None else ["--engine", engine.value]
        options += [] if api_key is None else ["--api-key", api_key]
        return running_server([target, *options, *words])
    if words or engine is not None:
        wrong = words[0] if words else "--engine"
        raise SpecError("this option is for a checkpoint, and no such path exists", where=target, got=wrong)
    if "://" not in target:
        raise SpecError("no such checkpoint, and not the URL of a server", expected="http://host:port/v1", got=target)
    return nullcontext(target)


def _show(summary: dict[str, Any], out: Console) -> None:
    out.print(
        f"[bold]{escape(summary['model'])}[/]: {summary['requests']} requests in {summary['seconds']:.1f} s, "
        f"{summary['requests_per_second']:.2f} requests/s, [bold]{summary['tokens_per_second']:.1f} tokens/s[/]",
        soft_wrap=True,
    )
    table = ui.table("milliseconds", ">mean", ">p50", ">p90", ">p99")
    for title in ("time_to_first_token_ms", "inter_token_latency_ms"):
        values = summary[title]
        if values:
            cells = [f"{values[name]:.1f}" for name in ("mean", "p50", "p90", "p99")]
            table.add_row(title.removesuffix("_ms").replace("_", " "), *cells)
    out.print(table)
    if summary["failed"]:
        out.print(f"[bold red]{summary['failed']} failed:[/] {escape('; '.join(summary['errors']))}", soft_wrap=True)
