"""How `generate` and `chat` answer: with native decode steps where the model has them, else with transformers."""

from __future__ import annotations

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from lancebill.cli import models
from lancebill.errors import SpecError

log = logging.getLogger("lancebill")

Temperature = Annotated[float, typer.Option("--temperature", min=0, max=2, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=1e-6, max=1, help="Probability mass to sample from.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Most likely tokens to sample from; 0 is all.")]


def accept_any_bytes() -> None:
    """Read undecodable bytes of stdin as surrogates; `check_text` reports them."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def typed_lines() -> Iterator[str]:
    """The lines of stdin that are not empty."""
    accept_any_bytes()
    yield from filter(None, map(str.strip, sys.stdin))


def check_text(text: str) -> None:
    """Raise for bytes that are no text in the encoding of the terminal: no tokenizer takes them."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        what = "the prompt has bytes that are not text in this encoding"
        raise SpecError(what, expected=sys.getfilesystemencoding(), got=text)


@dataclass(frozen=True)
class AnswerOptions:
    """Sampling options of a command; temperature 0 is greedy."""

    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all

    def __post_init__(self) -> None:
        for option, value in (("--temperature", self.temperature), ("--top-p", self.top_p)):
            if math.isnan(value):  # is in no range, and not outside of one either
                raise SpecError("not a number", where=option, got=value)

    def for_transformers(self) -> dict[str, Any]:
        from lancebill.serving.sampling import Sampling

        drawn = not Sampling(self.temperature).greedy
        chosen: dict[str, Any] = {"do_sample": drawn, "max_new_tokens": self.tokens}
        if drawn:
            chosen["temperature"] = self.temperature
        if drawn and (self.top_p < 1 or self.top_k):
            chosen |= {"top_p": self.top_p, "top_k": self.top_k}
        return chosen


class Answering:
    """Answers prompts of one model, one after the other."""

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.seed = seed % 2**63  # every integer is a seed; torch takes 64 bits
        self.own_attention = model.config._attn_implementation
        self.runner = _native_runner(model)
        if self.runner is not None:
            _say_what_is_not_used(model)

    @property
    def how(self) -> str:
        """How the last answer was decoded."""
        return str(self.model.lancebill_decoding) if self.runner is None else "native steps"

    def answer(self, prompt: dict[str, Any], wanted: AnswerOptions, write: Callable[[str], None]) -> Any:
        """The whole answer and its speed, a `GeneratedText`; its text is written as it comes."""
        import torch

        from lancebill.integrations.transformers.streaming import GeneratedText, generate_streamed
        from lancebill.serving.choose_runner import LONG, own_attention
        from lancebill.serving.text import TextStream

        wanted = _fitting(wanted, self.model.config, prompt["input_ids"].shape[1])
        self.seed += 1  # answers of one conversation do not repeat each other's random numbers
        if self.runner is None or prompt["input_ids"].shape[1] + wanted.tokens > LONG:
            torch.manual_seed(self.seed - 1)
            with nullcontext() if self.runner is None else own_attention(self.model, self.own_attention):
                return generate_streamed(self.model, self.tokenizer, prompt, write=write, **wanted.for_transformers())
        stream, pieces, times, start = TextStream(self.tokenizer), list[str](), list[float](), time.perf_counter()
        for token in self._tokens(prompt["input_ids"][0].tolist(), wanted):
            times.append(time.perf_counter())
            if token is not None:
                pieces.append(stream.add(token))
                write(pieces[-1])
        pieces.append(stream.finish())
        write(pieces[-1])
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        return GeneratedText("".join(pieces), len(times), times[0] - start, rate)

    def _tokens(self, prompt: list[int], wanted: AnswerOptions) -> Iterator[int | None]:
        """Generated tokens; the last is None if the model ended its answer."""
        from lancebill.serving.recommended import min_p, repetition_penalty
        from lancebill.serving.sampling import Sampling, choose
        from lancebill.serving.start import end_tokens

        drawn = Sampling(wanted.temperature, wanted.top_p, wanted.top_k, seed=self.seed - 1)
        how = replace(drawn, min_p=min_p(self.model), repetition_penalty=repetition_penalty(self.model))
        source, asked, ends = how.generator(), how.asked(prompt), end_tokens(self.model, self.tokenizer)
        sequence, new, earlier = self.runner.new_sequence(), prompt, list[int]()
        while len(earlier) < wanted.tokens:
            token = choose(self.runner.step([sequence], [new])[0], how, earlier, source, asked).id
            if token in ends:
                yield None
                return
            earlier.append(token)
            new = [token]
            yield token


def _say_what_is_not_used(model: Any) -> None:
    """Of the checkpoint's recommendations, which transformers' own `generate` would follow."""
    from lancebill.serving.recommended import not_used

    if line := not_used(model):
        log.warning("%s", line)


def _fitting(wanted: AnswerOptions, config: Any, prompt: int) -> AnswerOptions:
    """An answer that ends where the model's positions end."""
    from lancebill.serving.context import longest_context

    context = longest_context(config)
    if prompt >= context:
        what = "the prompt is longer than the model's context"
        raise SpecError(what, expected=f"at most {context - 1:,} tokens", got=f"{prompt:,}")
    return replace(wanted, tokens=min(wanted.tokens, context - prompt))


def _native_runner(model: Any) -> Any:
    """None where native steps do not give what the model does."""
    from lancebill.serving.choose_runner import runner
    from lancebill.serving.ragged import RaggedModel

    small = models.small_steps(model)
    if small is None:
        return None
    before = model.config._attn_implementation
    found = runner(model, small)
    if isinstance(found, RaggedModel) and found.small is not None:
        return found
    model.set_attn_implementation(before)
    return None
