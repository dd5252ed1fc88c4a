"""Perplexity of a text, computed over overlapping windows.

Every token but the first is scored once, with at least `window - stride` tokens of context where the text has them.
The loss of each token is kept, so that two models can be compared token by token. Windows of the same length can
run as one batch: the context of a token does not change.
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
    """exp of the mean loss over tokens, with its standard error."""

    losses: Tensor  # [tokens] float64, nats

    @property
    def mean(self) -> float:
        return float(self.losses.mean())

    @property
    def value(self) -> float:
        return math.exp(self.mean)

    @property
    def stderr(self) -> float:
        """To first order: the standard error of the mean loss, times the perplexity."""
        return self.value * float(self.losses.std()) / math.sqrt(self.losses.numel())

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.stderr:.3f}"


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored): the model gets tokens [begin, end); tokens [first scored, end) are scored."""
    if not 0 < stride <= window or window < 2:
        raise SpecError(
            "these windows cannot cover the text", expected="0 < stride <= window", got=f"{stride} and {window}"
        )
    first_scored = 1
    begin = 0
    while first_scored < length:
        end = min(begin + window, length)
        yield begin, end, first_scored
        # end - 1: the first scored token needs at least one token of context.
        first_scored, begin = end, min(begin + stride, end - 1)


def batches(spans: Iterable[tuple[int, int, int]], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Group consecutive windows that have the same length and score the same number of tokens, at most `size` each."""
    group: list[tuple[int, int, int]] = []
    for begin, end, first in spans:
        alike = group and (group[0][1] - group[0][0], group[0][1] - group[0][2]) == (end - begin, end - first)
        if group and (not alike or len(group) == size):
            yield group
            group = []
        group.append((begin, end, first))
    if group:
        yield group


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
        raise SpecError("perplexity needs a text of at least two tokens", got=list(tokens.shape))
    losses = []
    for group in batches(windows(tokens.numel(), window, stride), batch):
        inputs = torch.stack([tokens[begin:end] for begin, end, _ in group]).to(model.device)
        _, end, first = group[0]
        scored = end - first
        # The logits at each position predict the next token. The last position predicts a token beyond the window.
        logits = model(inputs, logits_to_keep=scored + 1).logits[:, -scored - 1 : -1]
        targets = inputs[:, -scored:].flatten()
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none").double().cpu())
        progress(targets.numel())
    return Perplexity(torch.cat(losses))
