"""What a peer is: another way to compute the same layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from lancebill.bench.workload import Weights
from lancebill.moe.problem import Problem


class Peer(ABC):
    """A layer made from `weights`; called with x [M, H], ids [M, k] and weights [M, k].

    `activations` names what it rounds its inputs to, where that is not the input's own type: it is
    then compared with the reference for such inputs.
    """

    activations: str | None = None

    @abstractmethod
    def __init__(self, problem: Problem, weights: Weights) -> None: ...

    @abstractmethod
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...

    def ready(self, tokens: Sequence[int]) -> None:  # noqa: B027
        """Compile what calls of these sizes will need; nothing, for most."""


Routed = TypeVar("Routed")


class SortingPeer(Peer, Generic[Routed]):
    """One whose routing step can be taken apart from the rest: it is timed with it and without."""

    @abstractmethod
    def sort(self, ids: Tensor) -> Routed:
        """A routing as its products want it."""

    @abstractmethod
    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, routed: Routed) -> Tensor:
        """The rest of the layer."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.compute(x, ids, weights, self.sort(ids))
