"""Routing that looks at no logits: drawn by seed, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import SpecError


def _uniform(experts: int, top_k: int) -> Tensor:
    return torch.zeros(experts)


def _zipf(experts: int, top_k: int) -> Tensor:
    """The r-th most popular expert is 1/r as likely as the first."""
    return -torch.arange(1, experts + 1).float().log()


def _normal(experts: int, top_k: int) -> Tensor:
    """A bell over the expert indices, a sixth of them wide."""
    place = torch.arange(experts) - (experts - 1) / 2
    return -0.5 * (place / (experts / 6)).square()


def _one_hot(experts: int, top_k: int) -> Tensor:
    """Every token to the same experts: the worst balance there is."""
    return torch.where(torch.arange(experts) < top_k, 0.0, -torch.inf)


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "normal": _normal,
    "one-hot": _one_hot,
}


@dataclass(frozen=True)
class Simulation:
    """Experts drawn without replacement by a popularity, the same on every device for one seed.

    Which experts are the popular ones depends on the seed too, so that seeds rotate the load.
    """

    kind: str = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"no simulated routing is called '{self.kind}'", expected=f"one of {', '.join(KINDS)}")

    def draw(self, tokens: int, experts: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and equal weights [tokens, top_k]."""
        generator = torch.Generator().manual_seed(self.seed)
        likely = KINDS[self.kind](experts, top_k)[torch.randperm(experts, generator=generator)]
        # The largest of log-likelihoods with Gumbel noise are a draw without replacement.
        noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
        ids = torch.argsort(likely + noise, dim=-1, descending=True, stable=True)[:, :top_k]
        weights = torch.full((tokens, top_k), 1 / top_k)
        return ids.to(device), weights.to(device)
