"""The fast call of one matrix: what calls like an earlier one have in common is prepared once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lancebill.backends.base import LinearCall, TensorTable
from lancebill.backends.call_signature import is_plain, same_metadata
from lancebill.backends.gpu.program import ALIGNMENT, Program
from lancebill.backends.gpu.workspace import Workspace, Workspaces

try:
    from torch._C._dynamo.guards import _empty_strided_cuda as fast_empty  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover - it is private, and a torch may lack it
    fast_empty = None


def linear_call(
    program: Program, tensors: TensorTable, x: Tensor, workspace: Workspace, workspaces: Workspaces
) -> LinearCall:
    """Further calls with an x like this one. A function and not an object with `__call__`, which takes the host longer
    to call."""
    shape, dtype, on, like = x.shape, x.dtype, x.device, same_metadata(x)
    result, tokens = (*shape[:-1], program.bindings.plan.problem.w13.n), shape[:-1].numel()
    make = _maker(result, dtype, on)
    run, device, stream, addresses = program.run, program.bindings.index, program.bindings.stream, tensors.addresses()
    now, current, key = torch._C, workspaces.eager, (device, stream)

    def linear_call(x: Tensor) -> Tensor | None:
        # In full where the guards give up: another kind of tensor, or other strides of sides of 1.
        if not like(x) and not is_plain(x, shape, dtype, on):
            return None
        at = x.data_ptr()
        if at % ALIGNMENT or tensors.addresses() != addresses or current.get(key) is not workspace:
            return None
        if now._cuda_getDevice() != device or now._cuda_getCurrentRawStream(device) != stream:
            return None
        if now._cuda_isCurrentStreamCapturing():
            return None
        out = make()
        run(tokens, (at, out.data_ptr(), 0))
        return out

    return linear_call


def _maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes results on the current device. Compiled code allocates with a function that takes half of `torch.empty`'s
    time."""
    if fast_empty is None or device.type != "cuda":
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(fast_empty, shape, torch.empty(shape, dtype=dtype, device="meta").stride(), dtype)
