"""Variants of one model on one text and one set of questions, compared in pairs with the first."""

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
NEXT = "Question:"  # how every question of a prompt begins
LAST = 12  # tokens among which it shows, however they are cut
EVERY = 8  # tokens between two looks for it: reading all of a batch's texts takes longer than a step
PARTS = ("weights", "activations", "backend")


@dataclass(frozen=True)
class Variant:
    """Weights, activations and backend, written `mxfp4/int8/torch-cpu`; what is left out stays as it is."""

    weights: str | None = None
    activations: str | None = None
    backend: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Variant:
        words = text.split("/")
        if len(words) > len(PARTS) or not words[0]:
            raise SpecError(f"cannot read the variant '{text}'", expected="weights[/activations[/backend]]")
        padded = [*words, "", ""][: len(PARTS)]
        return cls(None if padded[0] == AS_STORED else padded[0], padded[1] or None, padded[2] or "auto")

    def __str__(self) -> str:
        return "/".join([self.weights or AS_STORED, self.activations or "16 bit", self.backend])


@dataclass
class EvalResult:
    """What one variant did."""

    variant: Variant
    perplexity: Perplexity | None = None
    scores: dict[str, Score] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # without loading

    def describe(self, first: EvalResult) -> dict[str, Any]:
        """Figures, and against `first` the probability that chance alone made them differ."""
        found: dict[str, Any] = {"variant": str(self.variant), **self.how, "seconds": round(self.seconds, 2)}
        if self.perplexity is not None:
            found["perplexity"] = {"value": self.perplexity.value, "stderr": self.perplexity.stderr}
            if self is not first and first.perplexity is not None:
                pair = bootstrap(first.perplexity.losses, self.perplexity.losses)
                found["perplexity"] |= {"difference_nats": pair.mean, "difference_stderr": pair.stderr, "p": pair.p}
        for name, held in self.scores.items():
            found[name] = {"value": held.value, "stderr": held.stderr, "questions": held.right.numel()}
            if self is not first:
                found[name]["p"] = mcnemar(first.scores[name].right, held.right)
        return found


def answers(model: Any, tokenizer: Any, texts: Sequence[str], tokens: int) -> list[str]:
    """Greedy answers to prompts taken together, each up to where the model starts a question of its own."""
    alone = len(texts) == 1  # a tokenizer that cannot pad still answers one by one
    fed = tokenizer(list(texts), return_tensors="pt", **({} if alone else {"padding": True, "padding_side": "left"}))
    fed = fed.to(model.device)
    start = fed["input_ids"].shape[1]

    def asks(ids: Tensor, scores: object, **_: object) -> Tensor:
        if (ids.shape[1] - start) % EVERY:
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        ends = tokenizer.batch_decode(ids[:, max(start, ids.shape[1] - EVERY - LAST) :].tolist())
        return torch.tensor([NEXT in end for end in ends], device=ids.device)

    with torch.no_grad():
        out = model.generate(**fed, max_new_tokens=tokens, do_sample=False, stopping_criteria=[asks])
    return [said.split(NEXT)[0] for said in tokenizer.batch_decode(out[:, start:].tolist(), skip_special_tokens=True)]


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
    heard: Callable[[Variant, Question, str], None] = lambda *_: None,
) -> list[EvalResult]:
    """One result for each variant, in their order; `heard` is told every answer when it is given."""
    results: list[EvalResult] = []
    next(windows(window, window, stride))  # refused, if it is to be, before a model is loaded
    for variant in variants:
        model, tokenizer = load(variant)
        result, start = EvalResult(variant), time.perf_counter()
        if text is not None:
            ids = tokenizer(text, return_tensors="pt").input_ids[0][:max_text_tokens]
            result.perplexity = perplexity(model, ids, window=window, stride=stride, batch=batch, progress=progress)
        if questions:
            said = []
            prompts = [prompt(question, examples) for question in questions]
            for first in range(0, len(prompts), batch):
                said += answers(model, tokenizer, prompts[first : first + batch], answer_tokens)
                for question, answer in zip(questions[first:], said[first:]):
                    heard(variant, question, answer)
                progress(len(said) - first)
            result.scores = score(said, questions)
        result.seconds = time.perf_counter() - start
        results.append(result)
    return results
