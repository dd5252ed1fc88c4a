"""How the next token of a sequence is chosen from its logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lancebill.errors import NotFinite

# Temperatures below are greedy: two logits near 10 that differ at all then differ by more than 100 temperatures, so
# that the smaller one is never drawn.
LEAST_TEMPERATURE = 1e-8
FIRST_SORTED = 1024  # most likely tokens, which seldom have less than `top_p`: sorting a vocabulary takes long
BLOCK = 512  # weights

# What chooses a token runs beside the threads of the native library, on one thread. There NumPy takes a third of
# torch's time: its selection, sorting and sums use vector instructions.
Array = npt.NDArray[Any]
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Sampling:
    """The parameters of one answer; temperature 0 takes the most likely token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # the least probability of what may be drawn, as a part of the largest one
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # transformers': logits of tokens of the prompt and the answer are divided by it
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None  # None: no log-probabilities at all

    @property
    def greedy(self) -> bool:
        """Nothing is drawn."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def plain(self) -> bool:
        """Whether plain argmax suffices."""
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias or self.repetition_penalty != 1
        return self.greedy and not changed and self.top_logprobs is None

    def asked(self, prompt: Sequence[int]) -> Tensor | None:
        """The different tokens of a prompt, if they change how tokens are chosen."""
        return torch.tensor(prompt, dtype=torch.int64, device="cpu").unique() if self.repetition_penalty != 1 else None

    def generator(self) -> torch.Generator:
        """Random numbers of this answer alone, whatever runs beside it."""
        source = torch.Generator()
        if self.seed is None:
            source.seed()
        else:
            source.manual_seed(self.seed)
        return source


@dataclass(frozen=True)
class Token:
    """A chosen token; `alternatives` are the most likely ones with their log-probabilities."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


def most_likely(logits: Tensor) -> list[int]:
    """The token of the largest logit in each row, the first one of equals; of a row with NaNs the first NaN.

    On a CPU this is NumPy's: torch's argmax finds the same, but takes several times as long for a vocabulary.
    """
    if logits.device.type != "cpu":
        found: list[int] = logits.argmax(-1).tolist()
        return found
    if logits.dtype in (torch.bfloat16, torch.float16):  # NumPy has no such type, or is slow with it
        logits = logits.float()
    best: list[int] = logits.numpy(force=True).argmax(-1).tolist()
    return best


def checked(best: float) -> None:
    """Raises if this is not a number: the largest logit is NaN if any is."""
    if not math.isfinite(best):
        raise NotFinite("the model's logits are not finite", got=f"{best} as the largest")


def choose(
    logits: Tensor, how: Sampling, earlier: Sequence[int], source: torch.Generator, asked: Tensor | None = None
) -> Token:
    """The next token. `earlier` are the tokens of the answer so far, which the penalties count; `asked` is what
    `Sampling.asked` says of the prompt."""
    logits = logits.float().cpu()
    chosen = _pick(_adjusted(logits, how, earlier, asked), how, source)
    if how.top_logprobs is None:
        return Token(chosen)
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(how.top_logprobs, logprobs.numel()))
    return Token(chosen, float(logprobs[chosen]), tuple(zip(best.indices.tolist(), best.values.tolist())))


def _adjusted(logits: Tensor, how: Sampling, earlier: Sequence[int], asked: Tensor | None) -> Tensor:
    if asked is not None:
        said = torch.cat([asked, torch.tensor(earlier, dtype=torch.int64, device="cpu")])
        scores, penalty = logits[said], how.repetition_penalty
        logits = logits.index_copy(0, said, torch.where(scores < 0, scores * penalty, scores / penalty))
    if (how.presence_penalty or how.frequency_penalty) and earlier:
        seen, counts = torch.tensor(earlier, dtype=torch.int64, device="cpu").unique(return_counts=True)
        logits = logits.index_add(0, seen, -(how.presence_penalty + how.frequency_penalty * counts.float()))
    if how.logit_bias:
        ids, biases = list(how.logit_bias), list(how.logit_bias.values())
        at, added = (
            torch.tensor(ids, dtype=torch.int64, device="cpu"),
            torch.tensor(biases, dtype=torch.float32, device="cpu"),
        )
        logits = logits.index_add(0, at, added)
    return logits


def _pick(logits: Tensor, how: Sampling, source: torch.Generator) -> int:
    values = logits.numpy(force=True)
    best = int(values.argmax())
    checked(float(values[best]))
    if how.greedy:
        return best
    ids = _largest(values, how.top_k) if how.top_k else None
    kept = values if ids is None else values[ids]
    # Of the largest logit nothing is left, so that no temperature lets anything overflow but to -inf.
    with np.errstate(over="ignore"):
        weights = np.exp((kept - values[best]) / np.float32(how.temperature))
    if how.top_p < 1:
        likely = _nucleus(weights, how.top_p)
        weights, ids = weights[likely], likely if ids is None else ids[likely]
    if how.min_p > 0:  # the largest weight is 1
        weights = np.where(weights < how.min_p, 0, weights)
    drawn = _drawn(weights, float(torch.rand((), generator=source, dtype=torch.float64, device="cpu")))
    return drawn if ids is None else int(ids[drawn])


def _largest(values: Array, count: int) -> Ids:
    """Where the `count` largest are, in any order; of equal ones the first."""
    if count >= values.size:
        return np.arange(values.size)
    least = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > least)
    return np.concatenate([above, np.flatnonzero(values == least)[: count - above.size]])


def _nucleus(weights: Array, part: float) -> Ids:
    """Where the fewest largest weights are that have this part of the sum."""
    wanted = part * float(weights.sum(dtype=np.float64))
    among = _largest(weights, FIRST_SORTED)
    while True:
        sums = np.sort(weights[among])[::-1].cumsum(dtype=np.float64)
        if sums[-1] >= wanted or among.size == weights.size:
            return among[_largest(weights[among], int(sums.searchsorted(wanted)) + 1)]
        among = np.arange(weights.size)


def _drawn(weights: Array, random: float) -> int:
    """Which one is drawn, each as often as its weight says; `random` is uniform in [0, 1). A block is drawn first, so
    that the weights of one block only are added one after the other."""
    sums = np.add.reduceat(weights, np.arange(0, weights.size, BLOCK), dtype=np.float64).cumsum()
    random *= float(sums[-1])
    block = _first_above(sums, random)
    inside = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    return block * BLOCK + _first_above(inside, random - (float(sums[block - 1]) if block else 0.0))


def _first_above(sums: Array, value: float) -> int:
    """The first index with a sum above `value`. Rounding may put `value` above all sums; then the last index."""
    return int(sums.searchsorted(min(value, float(np.nextafter(sums[-1], 0))), side="right"))
