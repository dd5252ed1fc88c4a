"""`lancebill bench-serve`: how a server does under load."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json


def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of an OpenAI-compatible server: http://host:port/v1.")],
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Words of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="At most so many tokens of an answer.")] = 64,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests at the same time.")] = 8,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds without an answer that are too many.")
    ] = 600,
    as_json: Json = False,
) -> None:
    """Throughput, time to first token and inter-token latency of streaming requests."""
    with ui.reported(as_json):
        from lancebill.evaluate.load import Load, run

        load = Load(input_len, output_len, num_prompts, concurrency)
        with ui.progress("requests", num_prompts) as advance:
            found = run(url, load, timeout=timeout, progress=advance)
    if as_json:
        ui.print_json(found)
    else:
        _show(found, ui.console())
    raise typer.Exit(ui.PROBLEM if found["failed"] else ui.FINE)


def _show(found: dict[str, Any], out: Console) -> None:
    out.print(
        f"[bold]{escape(found['model'])}[/]: {found['requests']} requests in {found['seconds']:.1f} s, "
        f"{found['requests_per_second']:.2f} requests/s, [bold]{found['tokens_per_second']:.1f} tokens/s[/]",
        soft_wrap=True,
    )
    table = ui.table("milliseconds", ">mean", ">p50", ">p90", ">p99")
    for title in ("time_to_first_token_ms", "inter_token_latency_ms"):
        values = found[title]
        if values:
            cells = [f"{values[name]:.1f}" for name in ("mean", "p50", "p90", "p99")]
            table.add_row(title.removesuffix("_ms").replace("_", " "), *cells)
    out.print(table)
    if found["failed"]:
        out.print(f"[bold red]{found['failed']} failed:[/] {escape('; '.join(found['errors']))}", soft_wrap=True)
