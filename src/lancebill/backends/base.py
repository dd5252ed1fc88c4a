"""What a backend is: checks that give reasons, a layout, a plan, and a run.

Backends see finished work: local experts, sorted or indexed rows, packed weights. They never learn
which checkpoint the weights came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._dynamo import guards

from lancebill.moe.dispatch import Dispatch
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Device, Problem


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot: a code for programs, a sentence for people, the nearest thing that works."""

    code: str
    text: str
    hint: str | None = None

    def __str__(self) -> str:
        return self.text if self.hint is None else f"{self.text} ({self.hint})"


class NoForm(Exception):
    """Why a matrix has no form that a backend's kernels read: raised deep inside, caught by its `check`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


# x [M, H], ids and weights [M, k], out [M, H]: whether it computed.
Shortcut = Callable[[Tensor, Tensor, Tensor, Tensor], bool]


@dataclass(frozen=True)
class Plan:
    """How a problem is computed for up to `tokens` tokens."""

    problem: Problem
    tokens: int
    estimate_us: float
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __deepcopy__(self, memo: object) -> Plan:
        """A value: a copied layer computes by the same one."""
        return self


class Fitting:
    """Whether a call by ids comes just as kernels take it: rows of this shape and type, 32-bit ids and weights for the
    slots, all dense and on one device.

    This is the way of every layer's every call, so it says nothing of what is wrong. Tensors like the last that
    fitted (their type, device, shape and strides) are recognised by torch's own guards, in a third of the time.
    """

    def __init__(self, rows: tuple[int, int], slots: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.asked = (rows, dtype, device), (slots, torch.int32, device), (slots, torch.float32, device)
        self.alike: Callable[..., bool] = _unlike

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        if self.alike(x, ids, weights, out):
            return True
        rows, first, second = self.asked
        for tensor, wanted in ((x, rows), (ids, first), (weights, second), (out, rows)):
            if (tensor.shape, tensor.dtype, tensor.device) != wanted or not tensor.is_contiguous():
                return False
        if out is not x:  # they tell tensors apart
            self.alike = _like(x, ids, weights, out)
        return True


def _like(*tensors: Tensor) -> Callable[..., bool]:
    """Whether others are just like these."""
    made: Any = vars(guards).get("TensorGuards")  # private: without them every call is looked at in full
    if made is None:
        return _unlike
    check: Callable[..., bool] = made(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _unlike(*tensors: Tensor) -> bool:
    return False


class Backend(ABC):
    """One way to compute. A module of this folder ends in `BACKEND = ...`; nothing else is edited."""

    name: ClassVar[str]
    on_request: ClassVar[bool] = False  # never chosen automatically
    drops_wild_ids: ClassVar[bool] = False  # takes any 32-bit ids: those that are no expert's contribute nothing

    def __deepcopy__(self, memo: object) -> Backend:
        """There is one of each, however often a model that uses it is copied: what it keeps is not the model's."""
        return self

    @abstractmethod
    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        """Every reason why not; none = supported."""

    @abstractmethod
    def layout(self, problem: Problem) -> Layout:
        """How this backend wants the weights."""

    @abstractmethod
    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        """Pure: the same arguments give the same plan on any machine. `tokens`: all rows x has room for."""

    @abstractmethod
    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        """Compute into `out`.

        Indexed: x [M, H] to out [M, H], weighted and summed over slots. Contiguous: rows to rows.
        Batched: [E, T, H] to [E, T, H], rows past the counts untouched. Weighting is then the
        caller's.
        """

    def shortcut(self, plan: Plan, x: Tensor, weights: Mapping[str, Packed]) -> Shortcut | None:
        """After a `run` by ids: a way to make further calls like it that asks less of the host; None: there is none.

        It looks at all that it is given. Where anything is not as the kernels take it or as it was (a dtype, a
        shape, the stream, the weights' memory), it returns False and has done nothing: the caller goes the long way.
        """
        return None
