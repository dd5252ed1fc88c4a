"""Look up and multiply, in plain torch: what runs on a CPU where no native kernel was built.

Codes of 4 and 8 bits are looked up a byte at a time (one byte is two fp32 values or one), a few
experts together, and multiplied by their scales; the products are torch's own, in fp32. Nothing is
kept between calls: weights stay packed, and only what a batch activates is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Plan, Reason
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed, combine, group_slots
from lancebill.moe.layout import Layout, MatrixShape, Packed, PlainLayout
from lancebill.moe.problem import BATCH_INVARIANT, Device, Problem
from lancebill.numbers.activations import round_activations
from lancebill.numbers.dtypes import DType
from lancebill.numbers.spec import ALL, DIV, Level, blocks_along

_LAYOUT = PlainLayout()
_AT_ONCE = 1 << 21  # weights expanded together: about what stays in a core's caches
# A rough fp32 rate, what expanding a weight costs in products, and the calls of torch for an expert.
_GFLOPS, _EXPANDING, _EXPERT_US = 50.0, 100, 100.0


class TorchCpu(Backend):
    name = "torch-cpu"

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if device.kind != "cpu":
            yield Reason("device", "runs on CPUs only")
        if problem.order == BATCH_INVARIANT:
            yield Reason("order", "torch chooses its order of sums by the number of rows", "cpu and reference keep it")
        for matrix, shape in problem.matrices.items():
            yield from _check_matrix(matrix, shape)

    def layout(self, problem: Problem) -> Layout:
        return _LAYOUT

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        slots = tokens * problem.top_k
        elements = sum(shape.n * shape.k for shape in problem.matrices.values())
        activated = min(problem.experts, slots)
        estimate = (2 * slots + _EXPANDING * activated) * elements / _GFLOPS / 1e3 + _EXPERT_US * activated
        notes = ("looks up the codes of activated experts, multiplies in fp32",)
        return Plan(problem, tokens, estimate, 4 * _AT_ONCE, notes)

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        problem = plan.problem
        if isinstance(dispatch, Indexed):
            return _run_indexed(problem, x, dispatch, weights, out)
        if isinstance(dispatch, Contiguous):
            edges = dispatch.offsets.tolist()
            _run_groups(problem, x, edges, weights, out)
            return out
        return _run_batched(problem, x, dispatch, weights, out)


def _check_matrix(matrix: str, shape: MatrixShape) -> Iterator[Reason]:
    spec = shape.spec
    if spec.quantized and spec.dtype.bits not in (4, 8):
        yield Reason("bits", f"{matrix}: looks up codes of 4 or 8 bits, not {spec.dtype.bits}")
    if spec.minimum:
        yield Reason("minimum", f"{matrix}: knows no minima")
    if spec.quantized and spec.dtype.bits == 4 and shape.k % 2:
        yield Reason("size", f"{matrix}: rows of {shape.k} end inside a byte")
    for level in spec.levels:
        if level.block[1] != ALL and shape.k % level.block[1]:
            yield Reason("size", f"{matrix}: rows of {shape.k} do not end with a whole block of {level.block[1]}")


def _run_indexed(problem: Problem, x: Tensor, dispatch: Indexed, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
    groups = group_slots(dispatch.ids, problem.experts)
    rows = x[groups.rows(problem.top_k)].float()
    if problem.weight_on_input:
        rows = rows * dispatch.weights.reshape(-1)[groups.slots].unsqueeze(-1)
        dispatch = Indexed(dispatch.ids, torch.ones_like(dispatch.weights))
    results = torch.empty(rows.shape[0], out.shape[1])
    _run_groups(problem, rows, groups.offsets.tolist(), weights, results)
    return combine(results, groups, dispatch, out)


def _run_batched(problem: Problem, x: Tensor, dispatch: Batched, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
    counts = dispatch.counts.tolist()
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    rows = torch.cat([x[expert, :count] for expert, count in enumerate(counts)])
    results = torch.empty(edges[-1], out.shape[-1])
    _run_groups(problem, rows, edges, weights, results)
    for expert, count in enumerate(counts):
        out[expert, :count] = results[edges[expert] : edges[expert + 1]]
    return out


def _run_groups(problem: Problem, rows: Tensor, edges: list[int], weights: Mapping[str, Packed], out: Tensor) -> None:
    """Every expert that has rows: w2 @ act(w13 @ q(x) + b13), h quantised again on the way."""
    active = [e for e in range(problem.experts) if edges[e + 1] > edges[e]]
    if not active:
        return
    projected = torch.empty(rows.shape[0], problem.w13.n)
    _product(problem, "w13", weights, rows, edges, active, projected)
    if problem.w2 is None:
        out.copy_(projected)
        return
    hidden = problem.activation(projected)
    last = out if out.dtype == torch.float32 else torch.empty(out.shape)
    _product(problem, "w2", weights, hidden, edges, active, last)
    if last is not out:
        out.copy_(last)


def _product(
    problem: Problem,
    matrix: str,
    weights: Mapping[str, Packed],
    rows: Tensor,
    edges: list[int],
    active: list[int],
    out: Tensor,
) -> None:
    """rows @ W.T + bias for the rows of each active expert, few experts expanded at a time."""
    shape, packed = problem.matrices[matrix], weights[matrix]
    spec = problem.activations if matrix == "w13" else problem.second_activations
    if not _own(packed):
        rows = round_activations(rows.float(), spec)  # no expert has a say in it: all rows at once
    step = max(1, _AT_ONCE // (shape.n * shape.k))
    for first in range(0, len(active), step):
        some = active[first : first + step]
        expanded = _expand(shape, packed, some)
        counts = {edges[expert + 1] - edges[expert] for expert in some}
        if len(counts) == 1 and not _own(packed):  # one token, or all alike: one product for all
            low, high = edges[some[0]], edges[some[-1] + 1]
            own, into = rows[low:high].view(len(some), -1, shape.k), out[low:high].view(len(some), -1, shape.n)
            torch.bmm(own, expanded.transpose(1, 2), out=into)
            if "bias" in packed:
                into += _of(packed["bias"], some).view(torch.float32).unsqueeze(1)
            continue
        for expert, matrix_of in zip(some, expanded):
            low, high = edges[expert], edges[expert + 1]
            own = _own_inputs(rows[low:high], packed, expert, problem, matrix)
            torch.mm(own, matrix_of.t(), out=out[low:high])
            if "bias" in packed:
                out[low:high] += packed["bias"][expert].view(torch.float32)


def _own(packed: Packed) -> bool:
    """Whether each expert sees the rows in its own way."""
    return any(name in packed for name in ("pre_scale", "input_scale", "perm"))


def _own_inputs(rows: Tensor, packed: Packed, expert: int, problem: Problem, matrix: str) -> Tensor:
    """Rows as this expert sees them, where its own scales or its order of columns matter."""
    if not _own(packed):
        return rows
    rows = rows.float()
    if "pre_scale" in packed:
        rows = rows * packed["pre_scale"][expert].view(torch.float32)
    static = packed["input_scale"][expert].view(torch.float32) if "input_scale" in packed else None
    rows = round_activations(rows, problem.activations if matrix == "w13" else problem.second_activations, static)
    return rows.index_select(1, packed["perm"][expert]) if "perm" in packed else rows


def _expand(shape: MatrixShape, packed: Packed, experts: list[int]) -> Tensor:
    """fp32 [experts, N, K] in the stored order of columns."""
    spec, n, k = shape.spec, shape.n, shape.k
    codes = _of(packed["codes"], experts)
    if not spec.quantized:
        return codes.view(spec.dtype.storage).float()
    values = _look_up(spec.dtype, codes).view(len(experts), n, k)
    if spec.zero is not None:
        stored = _of(packed["zero"], experts)
        zero = (
            stored.float()
            if stored.dtype == torch.uint8
            else spec.zero.dtype.decode(stored.view(spec.zero.dtype.storage))
        )
        _in_place(torch.sub, values, zero, spec.zero)
    factor: Tensor | None = None
    for i, level in enumerate(spec.scales):
        scale = level.dtype.decode(_of(packed[f"scale{i}"], experts).view(level.dtype.storage))
        if factor is None:
            first, factor = level, 1 / scale if level.op == DIV else scale
        elif level.block == (ALL, ALL):
            factor = factor / scale if level.op == DIV else factor * scale
        else:
            _in_place(torch.div if level.op == DIV else torch.mul, values, scale, level)
    if factor is not None:
        _in_place(torch.mul, values, factor, first)
    return values


def _in_place(op: Callable[..., Tensor], values: Tensor, numbers: Tensor, level: Level) -> None:
    """op(value, number of its block) for [E, N, K] values and [E, blocks, blocks] numbers."""
    experts, n, k = values.shape
    rows, columns = level.block
    if rows not in (ALL, 1):
        numbers = numbers.repeat_interleave(rows, dim=1)[:, :n]
    blocks = blocks_along(k, columns)
    view = values.view(experts, n, blocks, k // blocks)
    op(view, numbers.unsqueeze(-1), out=view)


def _of(tensor: Tensor, experts: list[int]) -> Tensor:
    """The rows of some experts; a view where they stand side by side."""
    first, last = experts[0], experts[-1]
    if last - first + 1 == len(experts):
        return tensor[first : last + 1]
    return tensor[torch.tensor(experts)]


def _look_up(dtype: DType, codes: Tensor) -> Tensor:
    """fp32 values of a tensor of bytes, flat."""
    table = _table(dtype)
    return table.index_select(0, codes.reshape(-1).int()).view(torch.float32)


@lru_cache(maxsize=64)
def _table(dtype: DType) -> Tensor:
    """The values of a byte: one of 8 bits, or of its low and its high 4 bits, as one integer."""
    if dtype.bits == 8:
        return dtype.decode(torch.arange(256, dtype=torch.uint8)).view(torch.int32)
    values = dtype.decode(torch.arange(16, dtype=torch.uint8))
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack([low, high], dim=-1).contiguous().view(torch.int64).view(-1)


BACKEND = TorchCpu()
