"""Memory layouts of weights for kernels: a bijection with the canonical form, expert dimension first.

`pack` and `unpack` take one expert's matrix, or those of several experts at once, on the device that holds them.

Storage is always integer, so that `module.to(bfloat16)` cannot round a scale. Each expert's row is
self-contained, so that load balancing moves an expert with one row copy per tensor. `PlainLayout` is
the simplest: codes as dense bit streams along K, levels unchanged.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.numbers.bit_packing import Nibbles, pack_bits, stream_codes
from lancebill.numbers.dtypes import ZERO16
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight

Packed = dict[str, Tensor]
W13, W2 = "w13", "w2"

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class MatrixShape:
    """One of an expert's matrices: its name, size and spec, and whether it has a bias and an act-order."""

    name: str  # W13 (gate over up, or the only matrix of a linear) or W2 (down)
    n: int
    k: int
    spec: QuantSpec
    bias: bool = False
    act_order: bool = False


class Layout(ABC):
    """How one matrix of all local experts is stored for a kernel."""

    @abstractmethod
    def storage(self, shape: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Per expert: the shape and dtype of each tensor."""

    def pack(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        """Write one expert's matrix into its rows; with a leading expert dimension, several experts' into theirs.

        The weight may be on any device: packing reads addresses, so first it is moved to where it goes.
        """
        self._write(shape, weight.to(next(iter(out.values())).device), out)

    @abstractmethod
    def _write(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        """`pack` of a weight whose tensors are on the device of `out`."""

    @abstractmethod
    def unpack(self, shape: MatrixShape, packed: Mapping[str, Tensor]) -> LogicalWeight:
        """The inverse of `pack`, for the rows of one expert or of several."""

    def notes(self) -> tuple[str, ...]:
        """Messages for the user about changes that packing made to the numbers so far; usually none."""
        return ()

    def allocate(self, shape: MatrixShape, experts: int, device: torch.device | str = "cpu") -> Packed:
        """Uninitialised buffers for all local experts."""
        with torch.inference_mode(False):  # a refit may write to them outside of it
            return {
                name: torch.empty((experts, *size), dtype=dtype, device=device)
                for name, (size, dtype) in self.storage(shape).items()
            }

    def bytes(self, shape: MatrixShape) -> int:
        """Bytes of one expert's matrix."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.storage(shape).values())


@dataclass(frozen=True)
class PlainLayout(Layout):
    """Codes packed densely along K in bytes; scales, zero points and minima bit for bit."""

    def storage(self, shape: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        spec, n, k = shape.spec, shape.n, shape.k
        held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if spec.quantized:
            held["codes"] = (n, -(-k * spec.dtype.bits // 8)), torch.uint8
        else:
            held["codes"] = (n, k), _INTEGER[spec.dtype.storage.itemsize]
        for i, level in enumerate(spec.scales):
            held[f"scale{i}"] = (level.shape(n, k), _INTEGER[level.dtype.storage.itemsize])
        if spec.zero is not None:
            held["zero"] = (spec.zero.shape(n, k), _zero_storage(spec))
        for i, level in enumerate(spec.minimum):
            held[f"minimum{i}"] = (level.shape(n, k), _INTEGER[level.dtype.storage.itemsize])
        if shape.bias:
            held["bias"] = ((n,), torch.int32)
        if shape.act_order:
            held["perm"] = ((k,), torch.int32)
        return held

    def _write(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        spec = shape.spec
        out["codes"].copy_(as_integer(_stream(weight) if spec.quantized else weight.codes))
        for i, scale in enumerate(weight.scales):
            out[f"scale{i}"].copy_(as_integer(scale))
        if weight.zero is not None:
            out["zero"].copy_(as_integer(weight.zero) if out["zero"].dtype != torch.uint8 else weight.zero)
        for i, level in enumerate(weight.minimum):
            out[f"minimum{i}"].copy_(as_integer(level))
        if shape.bias:
            out["bias"].copy_(as_integer(bias_of(shape, weight)).squeeze(-1))
        if shape.act_order:
            out["perm"].copy_(order_of(shape, weight))

    def unpack(self, shape: MatrixShape, packed: Mapping[str, Tensor]) -> LogicalWeight:
        spec, k = shape.spec, shape.k
        codes = stream_codes(packed["codes"], spec.dtype.bits, k) if spec.quantized else packed["codes"]
        zero = None
        if spec.zero is not None:
            stored = packed["zero"]
            zero = stored.to(torch.int16) if stored.dtype == torch.uint8 else stored.view(spec.zero.dtype.storage)
        return LogicalWeight(
            spec,
            codes if spec.quantized else packed["codes"].view(spec.dtype.storage),
            tuple(packed[f"scale{i}"].view(s.dtype.storage) for i, s in enumerate(spec.scales)),
            zero,
            tuple(packed[f"minimum{i}"].view(s.dtype.storage) for i, s in enumerate(spec.minimum)),
            bias=packed["bias"].view(torch.float32) if shape.bias else None,
            perm=packed["perm"] if shape.act_order else None,
        )


def bias_of(shape: MatrixShape, weight: LogicalWeight) -> Tensor:
    """fp32 [..., n, 1]; zeros where a matrix of the layer has none."""
    if weight.bias is None:
        return torch.zeros(*weight.lead, shape.n, 1, dtype=torch.float32, device=weight.device)
    return weight.bias.float().unsqueeze(-1)


def as_column(stored: Tensor) -> Tensor:
    """One fp32 number per row, stored as integers [..., n], as a matrix of one column."""
    return stored.view(torch.float32).unsqueeze(-1)


def order_of(shape: MatrixShape, weight: LogicalWeight) -> Tensor:
    """The act-order; the natural one where a matrix of the layer has none."""
    return torch.arange(shape.k, dtype=torch.int32, device=weight.device) if weight.perm is None else weight.perm


def _stream(weight: LogicalWeight) -> Tensor:
    """Codes as a dense bit stream along K, in bytes."""
    if isinstance(weight.stored, Nibbles):
        return weight.stored.data
    return pack_bits(weight.stored, weight.spec.dtype.bits, torch.uint8)


def as_integer(tensor: Tensor) -> Tensor:
    """The same bits under an integer dtype."""
    return tensor.view(_INTEGER[tensor.dtype.itemsize])


def _zero_storage(spec: QuantSpec) -> torch.dtype:
    """Integer zero points can be 2**bits: one byte is enough up to 7-bit codes, 8-bit codes need two."""
    assert spec.zero is not None
    if spec.zero.dtype == ZERO16:
        return torch.uint8 if spec.dtype.bits < 8 else torch.int16
    return _INTEGER[spec.zero.dtype.storage.itemsize]
