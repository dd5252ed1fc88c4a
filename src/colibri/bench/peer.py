"""What a peer is: another way to compute the same layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from colibri.bench.workload import Weights
from colibri.problem import Problem


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
