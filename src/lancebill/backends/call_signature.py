"""Whether kernels can read the tensors of a call as they are, and how.

`torch._C._dynamo.guards` is private: where a torch lacks it, every call is compared in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards
except ImportError:  # pragma: no cover - a torch without dynamo
    guards = None  # type: ignore[assignment]

ID_WORDS = {torch.int32: 1, torch.int64: 2}
WEIGHT_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as in lancebill.h and kernels/slots.py
_MOST_OFFSET = 2**31 - 2  # kernels compute offsets in 32 bits


class RoutingLayout(NamedTuple):
    """How kernels read ids, weights and the expert map. Their arguments have the same names."""

    id_words: int  # 32-bit words per id
    id_row: int  # strides of ids, in words
    id_column: int
    mapped: int  # length of the expert map; 0: none, ids are local
    weight_kind: int  # see WEIGHT_KINDS
    weight_row: int  # strides of weights, in elements
    weight_column: int

    @classmethod
    def of(cls, ids: Tensor, weights: Tensor, mapped: int) -> RoutingLayout:
        words = ID_WORDS[ids.dtype]
        row, column = ids.stride()
        return cls(words, words * row, words * column, mapped, WEIGHT_KINDS[weights.dtype], *weights.stride())


class Match(NamedTuple):
    """How to read the tensors of a call, and a check whether other tensors have the same metadata.

    One value, so that a thread never uses the layout of another thread's call.
    """

    same: Callable[..., bool]
    layout: RoutingLayout
    weight_bytes: int  # of one routing weight


class CallSignature:
    """Contiguous rows of this shape and dtype; ids and weights of this shape and any strides; all on one device.

    Ids are int32 or int64, weights fp32, bf16 or fp16. A layer of an expert-parallel rank gives its expert map as
    a fifth tensor: contiguous, int32. A signature is used for calls with a map or for calls without, not for both.

    Used by every forward; gives None instead of raising. Callers try `last.same` first: tensors with the dtype, device,
    shape and strides of the last ones that matched are recognised by torch's own guards, in a third of the time.
    """

    def __init__(self, rows: tuple[int, int], slots: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.slots, self.dtype, self.device = rows, slots, dtype, device
        self.last = Match(_never, RoutingLayout(1, slots[1], 1, 0, WEIGHT_KINDS[torch.float32], slots[1], 1), 4)

    def match(self, *given: Tensor) -> Match | None:
        """For x, ids, weights, out and, if there is one, the expert map. None: kernels cannot read them as they are."""
        x, ids, weights, out, *expert_map = given
        if any(tensor.device != self.device for tensor in given):
            return None
        if any(t.shape != self.rows or t.dtype != self.dtype or not t.is_contiguous() for t in (x, out)):
            return None
        if any(t.dtype != torch.int32 or t.dim() != 1 or not t.is_contiguous() for t in expert_map):
            return None
        if ids.shape != self.slots or weights.shape != self.slots:
            return None
        if ids.dtype not in ID_WORDS or weights.dtype not in WEIGHT_KINDS:
            return None
        layout = RoutingLayout.of(ids, weights, expert_map[0].numel() if expert_map else 0)
        tokens, top_k = self.slots
        for row, column in (layout[1:3], layout[5:7]):
            if (tokens - 1) * row + (top_k - 1) * column > _MOST_OFFSET:
                return None
        # Guards also compare which arguments are the same object.
        self.last = Match(_never if out is x else same_metadata(*given), layout, weights.dtype.itemsize)
        return self.last


def same_metadata(*tensors: Tensor) -> Callable[..., bool]:
    """A check whether other tensors have the same metadata as these."""
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None:
        return _never
    check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def is_plain(x: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether x is contiguous, has this shape and dtype, is there, and asks for no gradient."""
    return x.shape == shape and x.dtype == dtype and x.device == device and x.is_contiguous() and not x.requires_grad


def _never(*tensors: Tensor) -> bool:
    return False
