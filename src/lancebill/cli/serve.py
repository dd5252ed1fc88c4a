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


def serve(
    context: typer.Context,
    path: models.Model,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name for clients; the default is the folder name.")
    ] = None,
    engine: EngineOption = None,
    weights: models.Weights = None,
    activations: models.Activations = None,
    backend: models.Backend = "auto",
    order: models.Order = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda[:i]; vLLM selects it itself.", show_default=False)
    ] = None,
    dtype: models.Dtype = "auto",
) -> None:
    """Serve /v1/models, /v1/chat/completions (also streaming) and /health, until interrupted.

    Options after PATH that are not listed here are vLLM's own: --api-key, --max-model-len, --tensor-parallel-size ...
    """
    with ui.reported(as_json=False):
        ui.existing(path, as_json=False)
        chosen, line = chosen_engine(engine, device)
        ui.console(error=True).print(line, soft_wrap=True)
        options: dict[str, Any] = {"weights": weights, "activations": activations, "backend": backend}
        options |= {} if order is None else {"order": order}
        model_name = name or path.resolve().name
        if chosen is Engine.vllm:
            words = ["--host", host, "--port", str(port), "--dtype", dtype, "--served-model-name", model_name]
            _serve_with_vllm(path, options, [*words, *context.args])
        elif context.args:
            raise SpecError("no such option", got=context.args[0], hint="--engine vllm passes it to vLLM")
        else:
            _serve_with_transformers(path, host, port, model_name, device=device or "cpu", dtype=dtype, **options)


def _serve_with_vllm(path: Path, options: dict[str, Any], words: list[str]) -> None:
    """Become vLLM's server: signals and the exit code are its own."""
    from lancebill.integrations.vllm.server import server_command

    command = server_command(str(path), {"mode": "require", **options}, words)
    os.execv(command[0], command)


def _serve_with_transformers(path: Path, host: str, port: int, name: str, **options: Any) -> None:
    from lancebill.integrations.transformers.server import (  # reports missing packages before loading the model
        bind_addresses,
        make_server,
    )

    sockets = bind_addresses(host, port)
    model, tokenizer = models.load(path, **options)
    out = ui.console(error=True)
    models.announce(path, model, out)
    out.print(f"serving [bold]{escape(name)}[/] on http://{host}:{port}/v1 (Ctrl-C stops)", soft_wrap=True)
    make_server(name, model, tokenizer).run(sockets)
