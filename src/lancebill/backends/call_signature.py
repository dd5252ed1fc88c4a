"""Whether the tensors of a call are exactly what a kernel reads.

`torch._C._dynamo.guards` is private: where a torch lacks it, every call is compared in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards
except ImportError:  # pragma: no cover - a torch without dynamo
    guards = None  # type: ignore[assignment]


class CallSignature:
    """Rows of this shape and dtype, int32 ids and fp32 weights per slot, all contiguous and on one device.

    Runs on every forward; returns a bool instead of raising. Tensors with the dtype, device, shape and strides of the
    last ones that matched are recognised by torch's own guards, in a third of the time.
    """

    def __init__(self, rows: tuple[int, int], slots: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.expected = (rows, dtype, device), (slots, torch.int32, device), (slots, torch.float32, device)
        self.same_as_last: Callable[..., bool] = _never

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        if self.same_as_last(x, ids, weights, out):
            return True
        rows, id_slots, weight_slots = self.expected
        for tensor, expected in ((x, rows), (ids, id_slots), (weights, weight_slots), (out, rows)):
            if (tensor.shape, tensor.dtype, tensor.device) != expected or not tensor.is_contiguous():
                return False
        if out is not x:  # guards also compare which arguments are the same object
            self.same_as_last = _guard(x, ids, weights, out)
        return True


def _guard(*tensors: Tensor) -> Callable[..., bool]:
    """A check whether other tensors have the same metadata as these."""
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None:
        return _never
    check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _never(*tensors: Tensor) -> bool:
    return False


same_metadata = _guard
