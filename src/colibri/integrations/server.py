"""transformers' OpenAI-compatible server around one model of ours.

The server, its handlers and its protocol are transformers'; ours is only the manager that always gives
the model that was loaded before the first request.
"""

from __future__ import annotations

import inspect
from typing import Any

from colibri.errors import UnsupportedProblem

try:
    import uvicorn
    from transformers.cli.serving import chat_completion, completion, response, transcription
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState
except ImportError as error:
    raise UnsupportedProblem(
        "what transformers' server needs is not installed", got=str(error), hint="pip install 'transformers[serving]'"
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
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "colibri"}]


def server(
    name: str, model: Any, processor: Any, *, host: str, port: int, log_level: str = "warning"
) -> uvicorn.Server:
    """Ready to `run()`, which ends gracefully at SIGINT or SIGTERM: open requests are answered first."""
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
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level=log_level))
