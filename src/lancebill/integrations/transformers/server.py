"""transformers' OpenAI-compatible server around one model of ours.

The server, its handlers and its protocol are transformers'; ours is only the manager that always gives
the model that was loaded before the first request.
"""

from __future__ import annotations

import errno
import inspect
import socket
from typing import Any

from lancebill.errors import LaunchError, UnsupportedProblem

try:
    import uvicorn
    from transformers.cli.serving import chat_completion, completion, response, transcription
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState
except ImportError as error:
    raise UnsupportedProblem(
        "what transformers' server needs is not installed", got=str(error), hint="pip install 'lancebill[serve]'"
    ) from None

try:
    from transformers.cli.serving import systemone  # since 5.2x
except ImportError:
    systemone = None  # type: ignore[assignment]


class OneModel(ModelManager):
    """Knows one model, under one name, and never lets it go."""

    def __init__(self, name: str, model: Any, processor: Any) -> None:
        super().__init__(device=str(model.device), model_timeout=-1)
        self.force_model = name
        self.model, self.processor = model, processor

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.model, self.processor

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "lancebill"}]


def reserve(host: str, port: int) -> list[socket.socket]:
    """The addresses of `host`, taken before a model is loaded for them; they refuse clients until it is served."""
    taken: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                taken.append(_bound(socket.socket(family, kind, protocol), address))
            except OSError as error:
                # `localhost` names an IPv6 address also where there is no IPv6.
                if len(found) == 1 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not taken:
            raise OSError("none of its addresses is on this machine")
    except (OSError, UnicodeError) as error:
        for each in taken:
            each.close()
        raise LaunchError(
            "cannot listen there", where=f"{host}:{port}", got=error, hint="see --host and --port"
        ) from None
    return taken


def _bound(made: socket.socket, address: Any) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def server(name: str, model: Any, processor: Any, log_level: str = "warning") -> uvicorn.Server:
    """Ready to `run(sockets)`, which ends gracefully at SIGINT or SIGTERM: open requests are answered first."""
    manager = OneModel(name, model, processor)
    state = GenerationState()
    shared = {"model_manager": manager, "generation_state": state}
    handlers: dict[str, Any] = {
        "chat_handler": chat_completion.ChatCompletionHandler(**shared),  # type: ignore[arg-type]
        "completion_handler": completion.CompletionHandler(**shared),  # type: ignore[arg-type]
        "response_handler": response.ResponseHandler(**shared),  # type: ignore[arg-type]
        "transcription_handler": transcription.TranscriptionHandler(manager, state),
    }
    if "systemone_handler" in inspect.signature(build_server).parameters:
        handlers["systemone_handler"] = systemone.SystemOneHandler(**shared)  # type: ignore[arg-type]
    app = build_server(manager, generation_state=state, **handlers)
    return uvicorn.Server(uvicorn.Config(app, log_level=log_level))
