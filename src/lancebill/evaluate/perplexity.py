"""Perplexity over a text, by windows that overlap.

Every token but the first is predicted once, with at least `window - stride` tokens before it wherever
the text has so many. What is kept is the loss of each token, so that two models can be compared token
by token. Windows of one length can be computed together: what a token sees stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lancebill.errors import SpecError


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean loss, and the standard error that the mean of these tokens has."""

    losses: Tensor  # [tokens] float64, nats

    @property
    def mean(self) -> float:
        return float(self.losses.mean())

    @property
    def value(self) -> float:
        return math.exp(self.mean)

    @property
    def stderr(self) -> float:
        """To first order: the error of the mean times the value."""
        return self.value * float(self.losses.std()) / math.sqrt(self.losses.numel())

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.stderr:.3f}"


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored): tokens [begin, end) are fed, predictions of [first scored, end) count."""
    if not 0 < stride <= window or window < 2:
        raise SpecError("windows cannot cover the text", expected="0 < stride <= window", got=f"{stride} and {window}")
    scored = 1
    begin = 0
    while scored < length:
        end = min(begin + window, length)
        yield begin, end, scored
        scored, begin = end, min(begin + stride, end - 1)  # the first token scored needs one before it


def batches(found: Iterable[tuple[int, int, int]], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Neighbours that feed and score equally many tokens, at most `size` at a time."""
    held: list[tuple[int, int, int]] = []
    for begin, end, first in found:
        alike = held and (held[0][1] - held[0][0], held[0][1] - held[0][2]) == (end - begin, end - first)
        if held and (not alike or len(held) == size):
            yield held
            held = []
        held.append((begin, end, first))
    if held:
        yield held


@torch.no_grad()
def perplexity(
    model: Any,
    tokens: Tensor,
    *,
    window: int = 1024,
    stride: int = 512,
    batch: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> Perplexity:
    """The loss of every token of `tokens` [T] but the first."""
    if tokens.ndim != 1 or tokens.numel() < 2:
        raise SpecError("perplexity needs a text of two tokens or more", got=list(tokens.shape))
    losses = []
    for together in batches(windows(tokens.numel(), window, stride), batch):
        fed = torch.stack([tokens[begin:end] for begin, end, _ in together]).to(model.device)
        _, end, first = together[0]
        kept = end - first  # logits that predict a scored token; the last one predicts nothing we know
        logits = model(fed, logits_to_keep=kept + 1).logits[:, -kept - 1 : -1]
        wanted = fed[:, -kept:].flatten()
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="none").double().cpu())
        progress(wanted.numel())
    return Perplexity(torch.cat(losses))
