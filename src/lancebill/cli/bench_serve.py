"""`lancebill bench-serve`: measure a server under load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.checkpoint.read.hub import is_hub_name
from lancebill.cli import console as ui
from lancebill.cli.console import Json
from lancebill.cli.engines import EngineOption, running_server
from lancebill.errors import SpecError


def bench_serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|PATH",
            help="An OpenAI-compatible server: http://host:port/v1; or what to serve: a checkpoint, or a hub model.",
        ),
    ],
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Words per prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Maximum tokens per answer.")] = 64,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Total number of requests.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Concurrent requests.")] = 8,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for an answer.")] = 600,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key that the server asks for.")] = None,
    engine: EngineOption = None,
    revision: ui.Revision = None,
    as_json: Json = False,
) -> None:
    """Throughput, time to first token and inter-token latency of streaming requests.

    With a PATH, `lancebill serve` runs meanwhile: it gets --engine, --api-key, --revision and all options that are not
    listed here.
    """
    with ui.reported(as_json):
        from lancebill.evaluate.load import Load, run_load

        load = Load(input_len, output_len, num_prompts, concurrency)
        given = {"--engine": engine and engine.value, "--revision": revision}
        words = [*(word for name, value in given.items() if value for word in (name, value)), *context.args]
        with _server(target, words, api_key) as url, ui.progress("requests", num_prompts) as advance:
            summary = run_load(url, load, timeout=timeout, api_key=api_key, progress=advance)
    if as_json:
        ui.print_json(summary)
    else:
        _show(summary, ui.console())
    raise typer.Exit(ui.PROBLEM if summary["failed"] else ui.FINE)


def _server(target: str, words: Sequence[str], api_key: str | None) -> AbstractContextManager[str]:
    """The address of a server: the given one, or that of a server for the given checkpoint, with these options."""
    if Path(target).exists() or is_hub_name(target):
        return running_server([target, *([] if api_key is None else ["--api-key", api_key]), *words])
    if "://" not in target:
        raise SpecError("no such checkpoint, and not the URL of a server", expected="http://host:port/v1", got=target)
    if words:
        what = "no such option, or one for a checkpoint: a server that runs already has its own"
        raise SpecError(what, where=target, got=words[0])
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
