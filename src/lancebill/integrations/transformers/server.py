"""transformers' OpenAI-compatible server for one model.

The server, its handlers and its protocol are transformers'. We only replace the model manager by one that always
returns the model that was loaded at startup.
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
        "a dependency of transformers' server is not installed", got=str(error), hint="pip install 'lancebill[serve]'"
    ) from None

try:
    from transformers.cli.serving import systemone  # since 5.2x
except ImportError:
    systemone = None


class OneModel(ModelManager):
    """A model manager with one model that is never unloaded."""

    def __init__(self, name: str, model: Any, processor: Any) -> None:
        super().__init__(device=str(model.device), model_timeout=-1)
        self.force_model = name
        self.model, self.processor = model, processor

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.model, self.processor

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "lancebill"}]


def bind_addresses(host: str, port: int) -> list[socket.socket]:
    """Bind all addresses of `host` before the model is loaded, so that a port in use is reported early.

    The sockets do not listen yet: clients are refused until the server starts.
    """
    bound: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            try:
                bound.append(_bind(socket.socket(family, kind, protocol), address))
            except OSError as error:
                # `localhost` may resolve to an IPv6 address on a machine without IPv6.
                if len(addresses) == 1 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not bound:
            raise OSError("none of its addresses is on this machine")
    except (OSError, UnicodeError) as error:
        for each in bound:
            each.close()
        raise LaunchError(
            "cannot listen on this address", where=f"{host}:{port}", got=error, hint="see --host and --port"
        ) from None
    return bound


def _bind(unbound: socket.socket, address: Any) -> socket.socket:
    try:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if unbound.family == socket.AF_INET6:
            unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        unbound.bind(address)
    except OSError:
        unbound.close()
        raise
    return unbound


def make_server(name: str, model: Any, processor: Any, log_level: str = "warning") -> uvicorn.Server:
    """A server for `run(sockets)`. At SIGINT or SIGTERM it finishes open requests and stops."""
    manager = OneModel(name, model, processor)
    state = GenerationState()
    shared = {"model_manager": manager, "generation_state": state}
    handlers: dict[str, Any] = {
        "chat_handler": chat_completion.ChatCompletionHandler(**shared),
        "completion_handler": completion.CompletionHandler(**shared),
        "response_handler": response.ResponseHandler(**shared),
        "transcription_handler": transcription.TranscriptionHandler(manager, state),
    }
    if "systemone_handler" in inspect.signature(build_server).parameters:
        handlers["systemone_handler"] = systemone.SystemOneHandler(**shared)
    app = build_server(manager, generation_state=state, **handlers)
    return uvicorn.Server(uvicorn.Config(app, log_level=log_level))
