"""`lancebill serve`: an OpenAI-compatible server for a model whose experts stay packed."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli import models


def serve(
    path: models.Model,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name for clients; the default is the folder name.")
    ] = None,
    weights: models.Weights = None,
    activations: models.Activations = None,
    backend: models.Backend = "auto",
    device: models.Device = "cpu",
    dtype: models.Dtype = "auto",
) -> None:
    """Serve /v1/models, /v1/chat/completions (also streaming) and /health, until interrupted."""
    with ui.reported(as_json=False):
        ui.existing(path, as_json=False)
        from lancebill.integrations.transformers.server import (  # reports missing packages before loading the model
            bind_addresses,
            make_server,
        )

        sockets = bind_addresses(host, port)
        chosen: dict[str, Any] = {"weights": weights, "activations": activations, "backend": backend}
        model, tokenizer = models.load(path, device=device, dtype=dtype, **chosen)
        model_name = name or path.resolve().name
        out = ui.console(error=True)
        models.announce(path, model, out)
        out.print(f"serving [bold]{escape(model_name)}[/] on http://{host}:{port}/v1 (Ctrl-C stops)", soft_wrap=True)
        make_server(model_name, model, tokenizer).run(sockets)
