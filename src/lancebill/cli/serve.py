"""`lancebill serve`: an OpenAI-compatible server for a model whose experts stay packed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli import models
from lancebill.cli.engines import Engine, EngineOption, chosen_engine
from lancebill.errors import SpecError

STOP_SECONDS = 1.0  # the running step may take this long when the server ends
DEFAULTS = {"backend": "auto", "moves": "off"}  # all other options default to None

KeptTokens = Annotated[
    int | None,
    typer.Option(
        "--kept-tokens", min=0, show_default=False,
        help="Tokens of ended answers kept for prompts that start equally; 8192 by default, 0: none.",
    ),
]  # fmt: skip


def serve(
    context: typer.Context,
    path: models.Model,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name for clients; the default is the folder name.")
    ] = None,
    engine: EngineOption = None,
    revision: ui.Revision = None,
    weights: models.Weights = None,
    rest: models.Rest = None,
    activations: models.Activations = None,
    backend: models.Backend = "auto",
    order: models.Order = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda[:i]; vLLM selects it itself.", show_default=False)
    ] = None,
    gpu_memory: models.GpuMemory = None,
    gpu_experts: models.GpuExperts = None,
    moves: models.Moves = "off",
    cpu_threads: models.CpuThreads = None,
    dtype: models.Dtype = "auto",
    length: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, help="Tokens of prompt and answer.", show_default=False),
    ] = None,
    kept_tokens: KeptTokens = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="The key that clients must send.", show_default=False)
    ] = None,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /health, /metrics, and a chat page.

    Options after PATH that are not listed here are vLLM's own: --tensor-parallel-size, --max-num-seqs ...
    """
    with ui.reported(as_json=False):
        if api_key is not None and not api_key.strip():
            raise SpecError("the key is empty", where="--api-key", hint="without --api-key the server needs none")
        model_name = name or (path.resolve().name if path.exists() else str(path))
        ui.check_path(path, as_json=False)
        chosen, line = chosen_engine(engine, device)
        ui.console(error=True).print(line, soft_wrap=True)
        given = {"backend": backend, "order": order, "gpu_memory": gpu_memory, "gpu_experts": gpu_experts}
        given |= {"moves": moves, "cpu_threads": cpu_threads, "weights": weights, "activations": activations}
        options = {name: value for name, value in given.items() if value is not None and value != DEFAULTS.get(name)}
        if chosen is Engine.vllm:
            for option, value in (("--rest", rest), ("--kept-tokens", kept_tokens)):
                if value is not None:
                    raise SpecError("only the transformers engine takes this", got=option, hint="--engine transformers")
            words = ["--host", host, "--port", str(port), "--dtype", dtype, "--served-model-name", model_name]
            words += [] if length is None else ["--max-model-len", str(length)]
            words += [] if api_key is None else ["--api-key", api_key]
            _serve_with_vllm(path, revision, options, [*words, *context.args])
        elif context.args:
            raise SpecError("no such option", got=context.args[0], hint="--engine vllm passes it to vLLM")
        else:
            options |= {"device": device or "cpu", "dtype": dtype, "weights": models.with_rest(weights, rest)}
            limits = {"context": length, "kept_tokens": kept_tokens}
            _serve_with_transformers(path, revision, host, port, model_name, limits, api_key, options)


def _serve_with_vllm(path: Path, revision: str | None, options: dict[str, Any], words: list[str]) -> None:
    """Become vLLM's server: signals and the exit code are its own."""
    from lancebill.integrations.vllm.server import server_start

    server_start(str(path), options, words)  # raises for wrong options before a model is downloaded
    start = server_start(str(ui.located(path, revision, as_json=False)), options, words)
    os.execve(start.command[0], start.command, start.environment)


def _serve_with_transformers(
    path: Path,
    revision: str | None,
    host: str,
    port: int,
    name: str,
    limits: dict[str, int | None],
    api_key: str | None,
    options: dict[str, Any],
) -> None:
    from lancebill.serving.listen import bind_addresses, serve_until_end

    models.check_options(**options)
    sockets = bind_addresses(host, port)  # before anything slow
    path = ui.located(path, revision, as_json=False)
    model, tokenizer = models.load(path, **options)
    from lancebill.serving.start import start

    out = ui.console(error=True)
    models.announce(path, model, out)
    app, how = start(name, model, tokenizer, **limits, api_key=api_key, small=models.small_steps(model))
    out.print(f"  {how}", soft_wrap=True)
    out.print(f"serving [bold]{escape(name)}[/] on http://{host}:{port}/v1 (Ctrl-C stops)", soft_wrap=True)
    out.print(f"  a chat page is on http://{host}:{port}", soft_wrap=True)
    try:
        serve_until_end(app, sockets)
    finally:
        app.engine.stop(STOP_SECONDS)
