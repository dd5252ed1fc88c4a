"""Streams generated text and records the time of every token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
from torch import Tensor
from transformers import TextStreamer

from lancebill.errors import SpecError


@dataclass(frozen=True)
class GeneratedText:
    """Generated text and its speed. The time of the first token includes processing the prompt."""

    text: str
    tokens: int
    first_seconds: float
    tokens_per_second: float  # after the first token; 0 if there was only one

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, first after {self.first_seconds:.2f} s, then {self.tokens_per_second:.1f} tokens/s"
        )


class TimedStreamer(TextStreamer):
    """Calls `write` with each piece of generated text, and records when each token arrives."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []
        self.started = time.perf_counter()
        self.pieces: list[str] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.write(text)

    def result(self) -> GeneratedText:
        times = self.times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        first_seconds = times[0] - self.started if times else 0.0
        return GeneratedText("".join(self.pieces), len(times), first_seconds, rate)


def chat_prompt(tokenizer: Any, messages: str | list[dict[str, str]]) -> dict[str, Tensor]:
    """The tokens of a question or a conversation in the model's chat template; of the bare text if it has none."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if tokenizer.chat_template is None:
        return dict(tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt"))
    wanted = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    try:
        tokens = tokenizer.apply_chat_template(messages, **wanted)
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # for example of a system message
        raise SpecError("the model's chat template refuses this", got=str(error)) from None
    return dict(tokens)


def generate_streamed(
    model: Any,
    tokenizer: Any,
    prompt: dict[str, Tensor],
    *,
    write: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> GeneratedText:
    """Generate a continuation of `prompt`; `options` are passed to transformers' `generate`."""
    streamer = TimedStreamer(tokenizer, write)
    model.generate(**{name: t.to(model.device) for name, t in prompt.items()}, streamer=streamer, **options)
    return streamer.result()
