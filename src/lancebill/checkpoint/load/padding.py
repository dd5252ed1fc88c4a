"""Padding of a matrix with zeros, for shards of uneven size. Takes one matrix or those of several experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lancebill.errors import ShardError
from lancebill.numbers.spec import ALL, QuantSpec
from lancebill.numbers.weight import FACTORS, LogicalWeight


def pad(weight: LogicalWeight, n: int, k: int) -> LogicalWeight:
    """Pad with zeros to [n, k]. Padding blocks get scale 1, or 0 where no code is zero (IQ4).

    Without a zero code, padding columns inside a block are not zero. Their inputs are: they come from padding rows.
    Columns of act-ordered matrices are never cut, so they are never padded.
    """
    if (weight.n, weight.k) == (n, k):
        return weight
    spec = weight.spec
    for axis, (old, new) in enumerate(((weight.n, n), (weight.k, k))):
        inside = any(level.block[axis] == ALL or old % level.block[axis] for level in spec.minimum)
        if old != new and inside:
            raise ShardError(f"{spec} cannot be padded inside a block", expected="whole blocks", got=old)

    def grow(tensor: Tensor, shape: tuple[int, int], fill: Tensor) -> Tensor:
        out = fill.expand(*weight.lead, *shape).clone()
        out[..., : tensor.shape[-2], : tensor.shape[-1]] = tensor
        return out

    one, nothing = torch.tensor([[1.0], [0.0]], dtype=torch.float32, device=weight.device)
    blank = one if _has_zero(spec) else nothing
    if blank is nothing and (any(s.block[0] != 1 for s in spec.scales) or not _can_be_zero(spec)):
        raise ShardError(f"{spec} cannot be padded", expected="a code or a scale of each row that is zero")
    zero = weight.zero
    if spec.zero is not None and zero is not None:
        zero = grow(zero, spec.zero.shape(n, k), nothing.to(zero.dtype))
    codes = _zero_codes(weight, zero, n, k)
    codes[..., : weight.n, : weight.k] = weight.codes
    zero_minimum = [s.dtype.encode(nothing) for s in spec.minimum]
    return replace(
        weight,
        stored=codes,
        scales=tuple(grow(t, s.shape(n, k), s.dtype.encode(blank)) for s, t in zip(spec.scales, weight.scales)),
        zero=zero,
        minimum=tuple(grow(t, s.shape(n, k), z) for s, t, z in zip(spec.minimum, weight.minimum, zero_minimum)),
        bias=None if weight.bias is None else torch.nn.functional.pad(weight.bias, (0, n - weight.n)),
        inputs={role: _pad_input(role, t, k - weight.k) for role, t in weight.inputs.items()},
    )


def _has_zero(spec: QuantSpec) -> bool:
    return spec.zero is not None or not spec.dtype.table or 0.0 in spec.dtype.table


def _can_be_zero(spec: QuantSpec) -> bool:
    """Whether a level of scales can be zero: e8m0 cannot."""
    return any(s.dtype.wide is not None or 0.0 in s.dtype.table for s in spec.scales)


def _zero_codes(weight: LogicalWeight, zero: Tensor | None, n: int, k: int) -> Tensor:
    """[n, k] codes that decode to 0: the zero points, since padding may share a block with real weights."""
    spec, device = weight.spec, weight.device
    if spec.zero is None or zero is None:
        return spec.dtype.encode(torch.zeros(1, dtype=torch.float32, device=device)).expand(*weight.lead, n, k).clone()
    rows, columns = (
        torch.zeros(size, dtype=torch.int64, device=device)
        if side == ALL
        else torch.arange(size, device=device) // side
        for size, side in zip((n, k), spec.zero.block)
    )
    codes = spec.zero.dtype.decode(zero)[..., rows, :][..., columns]
    valid = codes.round().clamp(0, spec.dtype.max)
    below = slice(weight.n, None)  # padding columns are multiplied by zero inputs
    if not torch.equal(codes[..., below, :], valid[..., below, :]):
        raise ShardError("padding needs a zero point that is a valid code", expected=f"0 to {spec.dtype.max:g}")
    return valid.to(spec.dtype.storage)


def _pad_input(role: str, tensor: Tensor, columns: int) -> Tensor:
    """Only the pre-scale has an entry per column; padding columns get 1."""
    return torch.nn.functional.pad(tensor, (0, columns), value=1.0) if role == FACTORS else tensor
