"""A backend in plain torch, for CPUs without native kernels.

Decodes codes of 4 and 8 bits with one lookup per byte (two fp32 values or one), for a few experts at a time,
applies the scales, and multiplies with torch in fp32. Keeps nothing between calls: weights stay packed, and only the
activated experts are dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Plan, Reason, Speed
from lancebill.backends.plain_rows import expert_inputs, run_indexed
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Contiguous, Dispatch, Indexed
from lancebill.moe.layout import W2, W13, Layout, MatrixShape, Packed, PlainLayout
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.numbers.dtypes import DType
from lancebill.numbers.spec import ALL, DIV, Level, blocks_along

_LAYOUT = PlainLayout()
_AT_ONCE = 1 << 21  # weights dequantised at once: about what fits a core's caches
# For time estimates: a rough fp32 rate, FLOPs to dequantise a weight, and overhead of torch calls per expert.
_GFLOPS, _DEQUANTISE_FLOPS, _EXPERT_US = 50.0, 100, 100.0


class TorchCpu(Backend):
    name = "torch-cpu"
    rotates = True
    speed = Speed.TORCH

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if device.kind != "cpu":
            yield Reason("device", "runs on CPUs only")
        if problem.order == BATCH_INVARIANT:
            yield Reason(
                "order", "torch sums in an order that depends on the number of rows", "cpu and reference do not"
            )
        for matrix, shape in problem.matrices.items():
            yield from _check_matrix(matrix, shape)

    def layout(self, problem: Problem) -> Layout:
        return _LAYOUT

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        slots = tokens * problem.top_k
        elements = sum(shape.n * shape.k for shape in problem.matrices.values())
        activated = min(problem.experts, slots)
        estimate = (2 * slots + _DEQUANTISE_FLOPS * activated) * elements / _GFLOPS / 1e3 + _EXPERT_US * activated
        notes = ("dequantises the activated experts by table lookup, multiplies in fp32",)
        return Plan(problem, tokens, estimate, 4 * _AT_ONCE, notes)

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        run_groups = partial(_run_groups, plan.problem, weights)
        if isinstance(dispatch, Indexed):
            return run_indexed(plan.problem, x, dispatch, out, run_groups)
        if isinstance(dispatch, Contiguous):
            run_groups(x, dispatch.offsets.tolist(), out)
            return out
        counts = dispatch.counts.tolist()
        edges = [0, *accumulate(counts)]
        rows = torch.cat([x[expert, :count] for expert, count in enumerate(counts)])
        results = torch.empty(edges[-1], out.shape[-1], dtype=torch.float32, device="cpu")
        run_groups(rows, edges, results)
        for expert, count in enumerate(counts):
            out[expert, :count] = results[edges[expert] : edges[expert + 1]]
        return out


def _check_matrix(matrix: str, shape: MatrixShape) -> Iterator[Reason]:
    spec = shape.spec
    if spec.quantized and spec.dtype.bits not in (4, 8):
        yield Reason("bits", f"{matrix}: supports codes of 4 or 8 bits, not {spec.dtype.bits}")
    if spec.minimum:
        yield Reason("minimum", f"{matrix}: does not support minima")
    if spec.quantized and spec.dtype.bits == 4 and shape.k % 2:
        yield Reason("size", f"{matrix}: an odd row length ({shape.k}) splits a byte")
    for level in spec.levels:
        if level.block[1] != ALL and shape.k % level.block[1]:
            yield Reason("size", f"{matrix}: the row length {shape.k} is not a multiple of the block {level.block[1]}")


def _run_groups(problem: Problem, weights: Mapping[str, Packed], rows: Tensor, edges: list[int], out: Tensor) -> None:
    """w2 @ q(act(w13 @ q(x) + b13)) for every expert that has rows."""
    if edges[-1] == edges[0]:
        return
    projected = torch.empty(rows.shape[0], problem.w13.n, dtype=torch.float32, device="cpu")
    _gemm(problem, W13, weights[W13], rows, edges, projected)
    if problem.w2 is None:
        out.copy_(projected)
        return
    last = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device="cpu")
    _gemm(problem, W2, weights[W2], problem.activation(projected), edges, last)
    if last is not out:
        out.copy_(last)


def _gemm(problem: Problem, matrix: str, packed: Packed, rows: Tensor, edges: list[int], out: Tensor) -> None:
    """rows @ W.T + bias for the rows of each expert. Dequantises a few experts at a time."""
    shape, inputs = problem.matrices[matrix], problem.inputs_of(matrix)
    differ = any(name in packed for name in ("pre_scale", "input_scale", "perm"))  # the inputs of different experts
    if not differ:
        rows = expert_inputs(rows, shape, inputs, packed, 0)
    active = [expert for expert in range(problem.experts) if edges[expert + 1] > edges[expert]]
    step = max(1, _AT_ONCE // (shape.n * shape.k))
    for experts in (active[first : first + step] for first in range(0, len(active), step)):
        matrices = _dequantise(shape, packed, experts)
        bias = _select_experts(packed["bias"], experts).view(torch.float32) if "bias" in packed else None
        spans = [slice(edges[expert], edges[expert + 1]) for expert in experts]
        if not differ and len({span.stop - span.start for span in spans}) == 1:  # of the same size: one batched GEMM
            span = slice(spans[0].start, spans[-1].stop)
            results = out[span].view(len(experts), -1, shape.n)
            torch.bmm(rows[span].view(len(experts), -1, shape.k), matrices.transpose(1, 2), out=results)
            if bias is not None:
                results += bias.unsqueeze(1)
            continue
        for i, (expert, span) in enumerate(zip(experts, spans)):
            own = rows[span]
            if differ:
                own = expert_inputs(own, shape, inputs, packed, expert)
                own = own.index_select(1, packed["perm"][expert]) if "perm" in packed else own
            torch.mm(own, matrices[i].t(), out=out[span])
            if bias is not None:
                out[span] += bias[i]


def _dequantise(shape: MatrixShape, packed: Packed, experts: list[int]) -> Tensor:
    """Dequantises to fp32 [experts, N, K], with columns in stored order."""
    spec, n, k = shape.spec, shape.n, shape.k
    codes = _select_experts(packed["codes"], experts)
    if not spec.quantized:
        return codes.view(spec.dtype.storage).float()
    values = _decode_bytes(spec.dtype, codes).view(len(experts), n, k)
    if spec.zero is not None:
        stored = _select_experts(packed["zero"], experts)
        plain = stored.dtype == torch.uint8
        zero = stored.float() if plain else spec.zero.dtype.decode(stored.view(spec.zero.dtype.storage))
        _apply_level(torch.sub, values, zero, spec.zero)
    factor: Tensor | None = None
    for i, level in enumerate(spec.scales):
        scale = level.dtype.decode(_select_experts(packed[f"scale{i}"], experts).view(level.dtype.storage))
        if factor is None:
            first, factor = level, 1 / scale if level.op == DIV else scale
        elif level.block == (ALL, ALL):
            factor = factor / scale if level.op == DIV else factor * scale
        else:
            _apply_level(torch.div if level.op == DIV else torch.mul, values, scale, level)
    if factor is not None:
        _apply_level(torch.mul, values, factor, first)
    return values


def _apply_level(op: Callable[..., Tensor], values: Tensor, numbers: Tensor, level: Level) -> None:
    """op(values, number of the block), in place, for values [E, N, K] and numbers [E, row blocks, column blocks]."""
    experts, n, k = values.shape
    rows, columns = level.block
    if rows not in (ALL, 1):
        numbers = numbers.repeat_interleave(rows, dim=1)[:, :n]
    blocks = blocks_along(k, columns)
    view = values.view(experts, n, blocks, k // blocks)
    op(view, numbers.unsqueeze(-1), out=view)


def _select_experts(tensor: Tensor, experts: list[int]) -> Tensor:
    """The slices of some experts; a view if the experts are consecutive."""
    first, last = experts[0], experts[-1]
    if last - first + 1 == len(experts):
        return tensor[first : last + 1]
    return tensor[torch.tensor(experts, dtype=torch.int64, device="cpu")]


def _decode_bytes(dtype: DType, codes: Tensor) -> Tensor:
    """The fp32 values of a tensor of bytes, flat."""
    table = _byte_table(dtype)
    return table.index_select(0, codes.reshape(-1).int()).view(torch.float32)


@lru_cache(maxsize=64)
def _byte_table(dtype: DType) -> Tensor:
    """The values of each byte as one integer: the value of an 8-bit code, or of its low and high 4-bit codes."""
    if dtype.bits == 8:
        return dtype.decode(torch.arange(256, dtype=torch.uint8, device="cpu")).view(torch.int32)
    values = dtype.decode(torch.arange(16, dtype=torch.uint8, device="cpu"))
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack([low, high], dim=-1).contiguous().view(torch.int64).view(-1)


BACKEND = TorchCpu()
