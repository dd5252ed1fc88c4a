"""Random routing from a seed, independent of the logits, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import SpecError


def _uniform(tokens: int, experts: int, top_k: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.float32, device="cpu")


def _zipf(tokens: int, experts: int, top_k: int) -> Tensor:
    """The r-th most popular expert is 1/r as likely as the first."""
    return -torch.arange(1, experts + 1, dtype=torch.float32, device="cpu").log()


def _normal(tokens: int, experts: int, top_k: int) -> Tensor:
    """A normal distribution over the expert indices, with a standard deviation of a sixth of them."""
    distance = torch.arange(experts, dtype=torch.float32, device="cpu") - (experts - 1) / 2
    return -0.5 * (distance / (experts / 6)).square()


def _first(count: int, experts: int) -> Tensor:
    """Only so many experts are ever selected."""
    likelihood = torch.zeros(experts, dtype=torch.float32, device="cpu")
    likelihood[count:] = -torch.inf
    return likelihood


def _one_hot(tokens: int, experts: int, top_k: int) -> Tensor:
    """Every token goes to the same experts: the worst possible balance."""
    return _first(top_k, experts)


def _eight_busy(tokens: int, experts: int, top_k: int) -> Tensor:
    """Eight experts share all tokens."""
    return _first(max(8, top_k), experts)


def _half_empty(tokens: int, experts: int, top_k: int) -> Tensor:
    """Half of the experts share all tokens."""
    return _first(max(experts // 2, top_k), experts)


def _half_to_one(tokens: int, experts: int, top_k: int) -> Tensor:
    """Every second token goes to one expert; all other choices are uniform."""
    likelihood = torch.zeros(tokens, experts, dtype=torch.float32, device="cpu")
    likelihood[::2, 0] = torch.inf
    return likelihood


# Logarithms of how likely each expert is: [experts], or [tokens, experts].
KINDS: dict[str, Callable[[int, int, int], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "normal": _normal,
    "one-hot": _one_hot,
    "eight-busy": _eight_busy,
    "half-empty": _half_empty,
    "half-to-one": _half_to_one,
}


@dataclass(frozen=True)
class Simulation:
    """Experts drawn without replacement from a popularity distribution, the same on every device for one seed.

    The seed also chooses which experts are popular.
    """

    kind: str = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"unknown simulated routing '{self.kind}'", expected=f"one of {', '.join(KINDS)}")

    def draw(self, tokens: int, experts: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and equal weights [tokens, top_k]."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(experts, generator=generator, device="cpu")
        log_likelihood = KINDS[self.kind](tokens, experts, top_k)[..., order]
        # Gumbel trick: the k largest log-likelihoods plus Gumbel noise are a draw without replacement.
        noise = -torch.empty(tokens, experts, dtype=torch.float32, device="cpu").exponential_(generator=generator).log()
        ids = torch.topk(log_likelihood + noise, top_k).indices
        weights = torch.full((tokens, top_k), 1 / top_k, dtype=torch.float32, device="cpu")
        return ids.to(device), weights.to(device)
