"""Attention of single new tokens to a cache of fixed memory: which kernels, and how they are launched.

Meant to be called while a CUDA graph is captured, so a call may take the host some time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.backends.gpu.target import compile_target
from lancebill.backends.gpu.tiles import power_of_two
from lancebill.jit.address import address_on
from lancebill.jit.compile import KernelSource
from lancebill.jit.driver import capability, in_context
from lancebill.jit.load import prepare_launch

KERNELS = "lancebill.backends.gpu.kernels.attend"
Given = Mapping[str, Tensor | int | float]
_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DIMENSIONS = (64, 128, 256)
_BLOCK = 64  # columns that a program reads at once
_LEAST_COLUMNS, _MOST_PIECES = 128, 64
_LEAST_GROUP, _MOST_GROUP = 16, 64  # queries of a matrix instruction; more would not fit in registers


@dataclass(frozen=True)
class Heads:
    """The heads of an attention with rotary positions in halves, and norms over each head or none."""

    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    scaling: float
    eps: float | None = None  # of the norms; None: there are none

    @property
    def supported(self) -> bool:
        grouped = self.queries % self.keys == 0 and self.queries // self.keys <= _MOST_GROUP
        return grouped and self.dim in _DIMENSIONS and self.dtype in _ELEMENTS

    def rotate_source(self) -> KernelSource:
        constants = {"D": self.dim, "NORMED": self.eps is not None}
        values = "q k v q_weight k_weight cos sin position* rotated keys values q_heads. k_heads. angle_stride. "
        return _source("rotate_and_store", values + "batch_stride. eps: CAPACITY.", self.dtype, constants, 1)

    def part_source(self) -> KernelSource:
        group = max(_LEAST_GROUP, power_of_two(self.queries // self.keys))
        constants = {"D": self.dim, "GROUP": group, "BLOCK": _BLOCK}
        values = "q keys values mask? position* sums^ stats^ q_heads. k_heads. batch_stride. mask_stride. columns. "
        return _source("attend_part", values + "scale: CAPACITY.", self.dtype, constants, 4)

    def whole_source(self, pieces: int) -> KernelSource:
        constants = {"D": self.dim, "PIECES": power_of_two(pieces)}
        return _source("attend_whole", "sums^ stats^ out pieces.", self.dtype, constants, 4)

    def sources(self, span: int) -> tuple[KernelSource, ...]:
        """All kernels of a step that sees so many columns."""
        return self.rotate_source(), self.part_source(), self.whole_source(pieces_of(span))


def pieces_of(span: int) -> int:
    """How many programs share the columns of a head of keys."""
    return max(1, min(_MOST_PIECES, span // _LEAST_COLUMNS))


def rotate_and_store(
    heads: Heads, rows: tuple[Tensor, Tensor, Tensor], norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor], position: Tensor, cache: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Rotated queries `[batch, heads, dim]`; keys and values are stored at the position. `rows` are q, k and v."""
    q, k, v = (row.contiguous() for row in rows)
    cos, sin = (angle.contiguous() for angle in angles)
    batch, rotated = q.shape[0], q.new_empty(q.shape[0], heads.queries, heads.dim)
    weights = (q, q) if norms is None else norms
    values: Given = {
        "q": q, "k": k, "v": v, "q_weight": weights[0], "k_weight": weights[1], "cos": cos, "sin": sin,
        "position": position, "rotated": rotated, "keys": cache[0], "values": cache[1], **_sizes(heads, cache[0]),
        "angle_stride": heads.dim if cos.shape[0] > 1 else 0, "eps": heads.eps or 0.0,
    }  # fmt: skip
    _launch(heads.rotate_source(), values, (batch, heads.queries + 2 * heads.keys))
    return rotated


def attend(heads: Heads, rotated: Tensor, cache: tuple[Tensor, Tensor], mask: Tensor, position: Tensor) -> Tensor:
    """`[batch, heads, dim]`, for a mask `[batch, 1, 1, span]` of bools."""
    batch, span = rotated.shape[0], mask.shape[-1]
    mask = mask.expand(batch, 1, 1, span)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    pieces = pieces_of(span)
    shape = batch, heads.queries, pieces
    sums = rotated.new_empty(*shape, heads.dim, dtype=torch.float32)
    stats, out = rotated.new_empty(*shape, 2, dtype=torch.float32), torch.empty_like(rotated)
    values: Given = {
        "q": rotated, "keys": cache[0], "values": cache[1], "mask": mask.view(torch.uint8), "position": position,
        "sums": sums, "stats": stats, **_sizes(heads, cache[0]), "mask_stride": mask.stride(0),
        "columns": -(-span // pieces), "scale": heads.scaling,
    }  # fmt: skip
    _launch(heads.part_source(), values, (batch * heads.keys, pieces))
    values = {"sums": sums, "stats": stats, "out": out, "pieces": pieces}
    _launch(heads.whole_source(pieces), values, (batch * heads.queries, 1))
    return out


def _sizes(heads: Heads, keys: Tensor) -> dict[str, int]:
    return {
        "q_heads": heads.queries, "k_heads": heads.keys, "batch_stride": keys.stride(0), "CAPACITY": keys.shape[2],
    }  # fmt: skip


_ALIGNED = {"q", "k", "v", "rotated", "keys", "values", "sums", "out", "batch_stride"}
_SUFFIXES = {".": "i32", ":": "fp32", "*": "*i64", "^": "*fp32", "?": "*u8"}


def _source(
    kernel: str, arguments: str, dtype: torch.dtype, constants: Mapping[str, object], warps: int
) -> KernelSource:
    """Arguments by name, with a suffix for their type; pointers to elements of the model have none."""
    typed = tuple(
        (name.rstrip("".join(_SUFFIXES)), _SUFFIXES.get(name[-1], f"*{_ELEMENTS[dtype]}")) for name in arguments.split()
    )
    aligned = tuple(name for name, _ in typed if name in _ALIGNED)
    return KernelSource(KERNELS, kernel, typed, tuple(constants.items()), aligned, (("num_warps", warps),))


def _launch(source: KernelSource, given: Given, grid: tuple[int, int]) -> None:
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    device = next(iter(tensors.values())).device
    addresses = {name: address_on(tensor, device, name) for name, tensor in tensors.items()}
    values = {name: addresses[name] if isinstance(value, Tensor) else value for name, value in given.items()}
    index = device.index or 0
    stream = torch._C._cuda_getCurrentRawStream(index)
    source = replace(source, arch=compile_target(capability(index)))
    with in_context(index):
        launch = prepare_launch(source, index, stream, values, dependent=False)
        launch.grid(*grid)
        launch(stream)
