"""Text out of a model as it comes, with the time of every token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import TextStreamer


@dataclass(frozen=True)
class Said:
    """What a model said and how fast: the first token pays for the prompt, the rest for themselves."""

    text: str
    tokens: int
    first_seconds: float
    tokens_per_second: float  # from the first token on; 0 where there was only one

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, first after {self.first_seconds:.2f} s, then {self.tokens_per_second:.1f} tokens/s"
        )


class Timed(TextStreamer):
    """Calls `write` with each piece of text; the prompt is not repeated."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []
        self.started = time.perf_counter()
        self.pieces: list[str] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.write(text)

    def said(self) -> Said:
        times = self.times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        first = times[0] - self.started if times else 0.0
        return Said("".join(self.pieces), len(times), first, rate)


def chat_prompt(tokenizer: Any, question: str) -> dict[str, Tensor]:
    """A question as the model's chat template has it; as it is where there is no template."""
    if tokenizer.chat_template is None:
        return dict(tokenizer(question, return_tensors="pt"))
    messages = [{"role": "user", "content": question}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return dict(found)


def speak(
    model: Any,
    tokenizer: Any,
    prompt: dict[str, Tensor],
    *,
    write: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Said:
    """Generate after `prompt`; options go to transformers' `generate`."""
    streamer = Timed(tokenizer, write)
    model.generate(**{name: t.to(model.device) for name, t in prompt.items()}, streamer=streamer, **options)
    return streamer.said()
