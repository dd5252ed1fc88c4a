"""Puts a server together for a loaded model."""

from __future__ import annotations

from typing import Any

from lancebill.serving.app import App
from lancebill.serving.choose_runner import runner
from lancebill.serving.context import longest_context
from lancebill.serving.engine import BatchEngine, Limits
from lancebill.serving.metrics import Metrics
from lancebill.serving.ragged import RaggedModel, SeparateModel
from lancebill.serving.recommended import not_used, recommended
from lancebill.serving.requests import Served
from lancebill.serving.runners import Runner, SmallSteps

LONGEST_CONTEXT = 32768  # by default: keys and values of longer ones may not fit


def start(
    name: str, model: Any, tokenizer: Any, *, context: int | None = None, kept_tokens: int | None = None,
    api_key: str | None = None, small: SmallSteps | None = None,
) -> tuple[App, str]:  # fmt: skip
    """The application with its engine running, and lines about how it runs. `small` is tried for small steps."""
    text_config = model.config.get_text_config()
    limits = Limits(
        min(context or LONGEST_CONTEXT, longest_context(model.config)),
        kept_tokens=Limits.kept_tokens if kept_tokens is None else kept_tokens,
    )
    metrics, chosen = Metrics(), runner(model, small, limits.context)
    ends = end_tokens(model, tokenizer)
    engine = BatchEngine(chosen, limits, ends, metrics.count_first_token, model.device).start()
    served = Served(name, tokenizer, limits.context, int(text_config.vocab_size), recommended(model))
    about = [f"context {limits.context} tokens; requests run {_how(chosen)}", not_used(model)]
    return App(engine, served, metrics, api_key), "\n  ".join(filter(None, about))


def _how(chosen: Runner) -> str:
    if isinstance(chosen, SeparateModel):
        return f"in turns ({chosen.why})"
    assert isinstance(chosen, RaggedModel)
    return "batched" if chosen.small is None else "batched, natively"


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    listed = model.generation_config.eos_token_id
    ends = set(listed if isinstance(listed, list) else [listed])
    return {token for token in ends | {tokenizer.eos_token_id} if token is not None}
