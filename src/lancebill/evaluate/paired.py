"""Paired significance tests: both variants were measured on the same questions or tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import SpecError

SAMPLES = 2000


@dataclass(frozen=True)
class Difference:
    """The mean of b - a, its standard error, and the p-value of a difference of this size."""

    mean: float
    stderr: float
    p: float


def mcnemar(a: Tensor, b: Tensor) -> float:
    """The exact two-sided p-value of McNemar's test on the questions that only one of the two got right."""
    _check_pairs(a, b)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    total, fewer = only_a + only_b, min(only_a, only_b)
    if total == 0:
        return 1.0
    tail = math.fsum(math.exp(_log_choose(total, i) - total * math.log(2)) for i in range(fewer + 1))
    return min(1.0, 2 * tail)


def bootstrap(a: Tensor, b: Tensor, *, seed: int = 0) -> Difference:
    """Paired bootstrap of the mean difference: pairs are resampled with replacement."""
    _check_pairs(a, b)
    differences = b.double() - a.double()
    count = differences.numel()
    generator = torch.Generator().manual_seed(seed)
    means = torch.empty(SAMPLES, dtype=torch.float64, device="cpu")
    for i in range(SAMPLES):
        means[i] = differences[torch.randint(count, (count,), generator=generator, device="cpu")].mean()
    mean = float(differences.mean())
    centred = (means - mean).abs()
    extreme = int((centred >= abs(mean)).sum()) if mean else SAMPLES
    return Difference(mean, float(means.std()), (extreme + 1) / (SAMPLES + 1))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _check_pairs(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.ndim != 1 or not a.numel():
        raise SpecError("paired tests need the same questions", expected=list(a.shape), got=list(b.shape))
