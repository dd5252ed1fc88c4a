"""The interface of a peer: another library's implementation of the same layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from lancebill.bench.workload import Weights
from lancebill.moe.problem import Problem


class Peer(ABC):
    """A layer made from `weights`; called with x [M, H], ids [M, k] and weights [M, k].

    `activations` names the type the peer quantises its inputs to, None if it does not. Its results are compared
    with the reference for such inputs.
    """

    activations: str | None = None

    @abstractmethod
    def __init__(self, problem: Problem, weights: Weights) -> None: ...

    @abstractmethod
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...

    def compile(self, tokens: Sequence[int]) -> None:  # noqa: B027
        """Compile the kernels for these batch sizes. Most peers need nothing here."""


Routed = TypeVar("Routed")


class SortingPeer(Peer, Generic[Routed]):
    """A peer whose routing sort is a separate step; it is timed with and without that step."""

    @abstractmethod
    def sort(self, ids: Tensor) -> Routed:
        """Sort the routing into the form that `compute` takes."""

    @abstractmethod
    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, routed: Routed) -> Tensor:
        """The layer without the sort."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.compute(x, ids, weights, self.sort(ids))
