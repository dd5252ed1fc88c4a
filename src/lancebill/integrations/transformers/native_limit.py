"""Up to how many tokens of one call native steps take less time than the model itself.

Both ways compute packed matrices with the same kernels. The model's own way pays for calling about fifty operators in
each layer, whatever the number of tokens; its products of matrices that are not packed may be faster. So native steps
win by a fixed time and may lose a little with every token. The fixed time is measured on a step of the model that both
ways compute anyway, the other on one of its matrices. What the operators between the matrices cost with every token is
left out; it is to the advantage of native steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lancebill.backends.cpu.decode_program import DecodeProgram, DecodeRows
from lancebill.backends.cpu.native import Library

NO_LIMIT = 1 << 30
_ROWS = 128  # of a timed product: what is paid once for each call counts little
_REPEATS, _SECONDS = 8, 0.1  # large matrices fewer times


def most_tokens(native: Library, layers: nn.ModuleList, dtype: torch.dtype, fixed: float) -> int:
    """The limit, where a small step saves `fixed` seconds. `dtype` is that of the model's hidden states."""
    if fixed <= 0:
        return 0
    dense = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    if not dense:
        return NO_LIMIT
    largest = max(dense, key=lambda module: module.weight.numel())
    own, ours = _product_seconds(native, largest, dtype)
    elements = sum(module.weight.numel() for module in dense) / largest.weight.numel()
    lost = (ours - own) / _ROWS * elements  # with each token
    return NO_LIMIT if lost * NO_LIMIT <= fixed else int(fixed / lost)


@torch.inference_mode()
def _product_seconds(native: Library, linear: nn.Linear, dtype: torch.dtype) -> list[float]:
    """Of `_ROWS` rows with one matrix: the module's own product and the native one."""
    program = DecodeProgram(native, _ROWS)
    x, out = program.buffer("x", linear.in_features), program.buffer("out", linear.out_features)
    program.dense(x, [(linear.weight, linear.bias)], out)
    x.normal_()
    zeros: Sequence[int] = [0] * _ROWS
    rows = DecodeRows(x, x, zeros, zeros, zeros, torch.float32, ())
    inputs = x.to(dtype)
    return _fastest([lambda: linear(inputs), lambda: program.run(rows)])


def _fastest(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """The fastest run of each, in turns: the others had to share the machine."""
    begin, found = time.perf_counter(), [[_seconds(call) for call in calls]]
    while len(found) < 2 or (len(found) <= _REPEATS and time.perf_counter() - begin < _SECONDS):
        found.append([_seconds(call) for call in calls])
    return [min(each) for each in zip(*found)]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
