"""Evaluates variants of one model on a text and on questions, and compares each with the first variant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import SpecError
from lancebill.evaluate.paired import bootstrap, mcnemar
from lancebill.evaluate.perplexity import Perplexity, perplexity, windows
from lancebill.evaluate.questions import Question, Score, prompt, score

AS_STORED = "stored"
NEXT = "Question:"  # starts every question of a prompt; a model that writes it has finished its answer
LAST = 12  # an upper bound on the number of tokens of NEXT in any tokenizer
EVERY = 8  # generated tokens between two checks for NEXT: decoding a batch's text takes longer than a generation step
PARTS = ("weights", "activations", "backend", "rest")


@dataclass(frozen=True)
class Variant:
    """Written `mxfp4/int8/torch-cpu/int8`; omitted parts keep their defaults. `rest`: weights of other modules."""

    weights: str | None = None
    activations: str | None = None
    backend: str = "auto"
    rest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        words = text.split("/")
        if len(words) > len(PARTS) or not words[0]:
            raise SpecError(f"cannot read the variant '{text}'", expected="weights[/activations[/backend[/rest]]]")
        weights, inputs, backend, rest = [*words, "", "", ""][: len(PARTS)]
        return cls(None if weights == AS_STORED else weights, inputs or None, backend or "auto", rest or None)

    def __str__(self) -> str:
        rest = [] if self.rest is None else [self.rest]
        return "/".join([self.weights or AS_STORED, self.activations or "16 bit", self.backend, *rest])


@dataclass
class EvalResult:
    """The measurements of one variant."""

    variant: Variant
    perplexity: Perplexity | None = None
    scores: dict[str, Score] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # without loading

    def describe(self, first: EvalResult) -> dict[str, Any]:
        """The measurements, with the p-value of the difference from `first`."""
        facts: dict[str, Any] = {"variant": str(self.variant), **self.how, "seconds": round(self.seconds, 2)}
        if self.perplexity is not None:
            facts["perplexity"] = {"value": self.perplexity.value, "stderr": self.perplexity.stderr}
            if self is not first and first.perplexity is not None:
                pair = bootstrap(first.perplexity.losses, self.perplexity.losses)
                facts["perplexity"] |= {"difference_nats": pair.mean, "difference_stderr": pair.stderr, "p": pair.p}
        for name, result in self.scores.items():
            facts[name] = {"value": result.value, "stderr": result.stderr, "questions": result.right.numel()}
            if self is not first:
                facts[name]["p"] = mcnemar(first.scores[name].right, result.right)
        return facts


def answers(model: Any, tokenizer: Any, texts: Sequence[str], tokens: int) -> list[str]:
    """Greedy answers to a batch of prompts, each cut where the model starts to write the next question."""
    single = len(texts) == 1  # no padding then: some tokenizers have no padding token
    inputs = tokenizer(
        list(texts), return_tensors="pt", **({} if single else {"padding": True, "padding_side": "left"})
    )
    inputs = inputs.to(model.device)
    start = inputs["input_ids"].shape[1]

    def starts_next_question(ids: Tensor, scores: object, **_: object) -> Tensor:
        if (ids.shape[1] - start) % EVERY:
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        ends = tokenizer.batch_decode(ids[:, max(start, ids.shape[1] - EVERY - LAST) :].tolist())
        return torch.tensor([NEXT in end for end in ends], dtype=torch.bool, device=ids.device)

    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, stopping_criteria=[starts_next_question])
    return [text.split(NEXT)[0] for text in tokenizer.batch_decode(out[:, start:].tolist(), skip_special_tokens=True)]


def evaluate(
    load: Callable[[Variant], tuple[Any, Any]],
    variants: Sequence[Variant],
    *,
    text: str | None = None,
    questions: Sequence[Question] = (),
    examples: Sequence[Question] = (),
    window: int = 1024,
    stride: int = 512,
    max_text_tokens: int | None = None,
    answer_tokens: int = 256,
    batch: int = 1,
    progress: Callable[[int], None] = lambda _: None,
    on_answer: Callable[[Variant, Question, str], None] = lambda *_: None,
) -> list[EvalResult]:
    """One result for each variant, in their order; `on_answer` is called with every answer."""
    results: list[EvalResult] = []
    next(windows(window, window, stride))  # raises for an invalid window or stride before a model is loaded
    for variant in variants:
        model, tokenizer = load(variant)
        result, start = EvalResult(variant), time.perf_counter()
        if text is not None:
            ids = tokenizer(text, return_tensors="pt").input_ids[0][:max_text_tokens]
            result.perplexity = perplexity(model, ids, window=window, stride=stride, batch=batch, progress=progress)
        if questions:
            texts = []
            prompts = [prompt(question, examples) for question in questions]
            for first in range(0, len(prompts), batch):
                texts += answers(model, tokenizer, prompts[first : first + batch], answer_tokens)
                for question, answer in zip(questions[first:], texts[first:]):
                    on_answer(variant, question, answer)
                progress(len(texts) - first)
            result.scores = score(texts, questions)
        result.seconds = time.perf_counter() - start
        results.append(result)
    return results
