"""Checks on the tensors of a call: inputs are dense, and elements of outputs do not overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.errors import LaunchError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
IDS = (torch.int32, torch.int64)


def check_dense(**given: object) -> None:
    """Raise unless every value is a dense tensor."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise LaunchError(f"{name} is not a tensor", expected="a torch.Tensor", got=type(value).__name__)
        if value.layout != torch.strided:
            raise LaunchError(f"{name} is not dense", expected=torch.strided, got=value.layout)


def check_stored(name: str, value: object) -> None:
    """Raise unless this is a tensor that a checkpoint may hold: dense, with values."""
    check_dense(**{name: value})
    if isinstance(value, Tensor) and value.is_meta:
        raise LaunchError(f"{name} has no values", expected="a tensor in memory", got="one on the meta device")


def check_output(out: Tensor, x: Tensor) -> None:
    """Raise unless `out` can hold the result for `x`."""
    check_dense(out=out)
    apart = all(stride > 0 for size, stride in zip(out.shape, out.stride()) if size > 1)
    if out.shape != x.shape or out.device != x.device or out.dtype not in FLOATS or not apart:
        raise LaunchError(
            "out does not fit",
            expected=f"{list(x.shape)} in {' or '.join(map(str, FLOATS))} on {x.device}, no strides of 0",
            got=f"{list(out.shape)} in {out.dtype} on {out.device}, strides {list(out.stride())}",
        )


def check_routing(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, top_k: int) -> None:
    """Raise unless ids and weights have one row for each row of `x`."""
    shape, device = (x.shape[0], top_k), x.device
    for name, tensor, dtypes in (("topk_ids", topk_ids, IDS), ("topk_weights", topk_weights, FLOATS)):
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != device:
            raise LaunchError(
                f"{name} does not fit",
                expected=f"{list(shape)} in {' or '.join(map(str, dtypes))} on {device}",
                got=f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}",
            )


def check_logits(logits: Tensor, most: int, *, fewer: bool, bias: Tensor | None) -> None:
    """Raise unless a router's logits have `most` columns, or `fewer`: more would select experts that do not exist."""
    got = logits.shape[-1] if logits.dim() else 0
    if got > most or (got < most and not fewer):
        expected = f"[tokens, {most}]"
        raise LaunchError("the router's logits do not fit the layer", expected=expected, got=list(logits.shape))
    if bias is not None and bias.shape != (got,):
        raise LaunchError("the router's bias does not fit its logits", expected=[got], got=list(bias.shape))
