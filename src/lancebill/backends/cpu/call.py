"""A plan, tensors and packed weights as the C structs of one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.backends.call_signature import ID_WORDS, RoutingLayout
from lancebill.backends.cpu.form import CpuForm
from lancebill.backends.cpu.native import Library, abi
from lancebill.backends.cpu.plan import CpuPlan
from lancebill.errors import LaunchError
from lancebill.moe.device import require_on
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.native.address import host_address

FLOAT = {torch.bfloat16: abi.Float.BF16, torch.float16: abi.Float.F16, torch.float32: abi.Float.F32}


@dataclass(frozen=True)
class LayerStructs:
    """The layer's struct and those of its matrices, which it points to. They hold addresses, not tensors."""

    layer: abi.LayerStruct
    matrices: tuple[abi.MatrixStruct, ...]

    @classmethod
    def make(cls, plan: CpuPlan, weights: Mapping[str, Packed]) -> LayerStructs:
        problem = plan.problem
        shapes = zip(problem.matrices.items(), plan.forms)
        matrices = tuple(_matrix(shape, form, weights[name]) for (name, shape), form in shapes)
        layer = abi.LayerStruct(
            problem.experts,
            abi.ActivationKind[problem.activation.name.upper()],
            problem.activation.limit or 0.0,
            problem.activation.alpha,
            problem.activation.beta,
            ctypes.addressof(matrices[0]),
            ctypes.addressof(matrices[1]) if len(matrices) > 1 else None,
        )
        return cls(layer, matrices)


def run(native: Library, plan: CpuPlan, structs: LayerStructs, x: Tensor, dispatch: Dispatch, out: Tensor) -> None:
    """One call of the library. Local variables keep the tensors it reads alive until it returns."""
    source, result, places = _rows(x), _rows(out), None
    work = abi.WorkStruct(
        host_address(source), host_address(result), source.stride(0), result.stride(0), _float(source), _float(result),
        threads=torch.get_num_threads(), level=int(plan.level), tile_rows=0 if plan.tiles else -1,
    )  # fmt: skip
    if isinstance(dispatch, Indexed):
        ids, routed, places = _routed(dispatch)
        work.tokens, work.top_k = ids.shape
        work.ids, work.weights = host_address(ids), host_address(routed)
        work.weight_on_input = plan.problem.weight_on_input
        work = with_layout(work, RoutingLayout.of(ids, routed, 0 if places is None else places.numel()))
        work.expert_map = None if places is None else host_address(places)
    else:
        offsets, rows = _grouped(dispatch, x)
        work.offsets, work.rows = host_address(offsets), None if rows is None else host_address(rows)
    native.run(structs.layer, work, native.scratch_bytes(structs.layer, work))
    if work.out != host_address(out):
        out.copy_(result.view(out.shape))


def _routed(dispatch: Indexed) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, weights and the expert map as the library reads them."""
    ids, weights, places = dispatch.ids, dispatch.weights, dispatch.expert_map
    ids = ids if ids.dtype in ID_WORDS else ids.to(torch.int64)
    weights = weights if weights.dtype in FLOAT else weights.float()
    return ids, weights, None if places is None else _plain(places, torch.int32)


def indexed_work(plan: CpuPlan, tokens: int, dtype: torch.dtype) -> abi.WorkStruct:
    """The struct of an indexed call, without what differs between calls: addresses, layouts, the number of threads."""
    problem, kind = plan.problem, FLOAT[dtype]
    return abi.WorkStruct(
        0, 0, problem.hidden, problem.hidden, kind, kind, tokens, problem.top_k, threads=1,
        weight_on_input=problem.weight_on_input, level=int(plan.level), tile_rows=0 if plan.tiles else -1,
    )  # fmt: skip


def linear_work(plan: CpuPlan, dtype: torch.dtype, offsets: Tensor) -> abi.WorkStruct:
    """The struct of a call with one matrix, without the addresses and the number of threads."""
    problem, kind = plan.problem, FLOAT[dtype]
    work = abi.WorkStruct(
        0, 0, problem.hidden, problem.w13.n, kind, kind, threads=1, level=int(plan.level),
        tile_rows=0 if plan.tiles else -1,
    )  # fmt: skip
    work.offsets = host_address(offsets)
    return work


def with_layout(work: abi.WorkStruct, layout: RoutingLayout) -> abi.WorkStruct:
    """A copy that says how the library reads ids and weights."""
    work = abi.WorkStruct.from_buffer_copy(work)
    work.id_words, work.id_row, work.id_column, work.mapped = layout[:4]
    work.weight_type, work.weight_row, work.weight_column = layout[4:]
    return work


def _matrix(shape: MatrixShape, form: CpuForm, packed: Packed) -> abi.MatrixStruct:
    values = form.values
    matrix = abi.MatrixStruct(
        shape.n, shape.k, form.group, form.factor, values.codes, form.scale, form.zero, values.center, values.mantissa,
        values.step, values.table or (0,) * 16,
    )  # fmt: skip
    matrix.code_bytes = host_address(packed["codes"])
    matrix.scale_bytes, matrix.zero_bytes = _pointer(packed, "scales"), _pointer(packed, "zeros")
    matrix.row_scale, matrix.bias = _pointer(packed, "row_scale"), _pointer(packed, "bias")
    matrix.perm, matrix.pre_scale = _pointer(packed, "perm"), _pointer(packed, "pre_scale")
    matrix.input_scale = _pointer(packed, "input_scale")
    matrix.input, matrix.input_group, matrix.rotation = form.input, form.input_group, shape.spec.rotation
    return matrix


def _pointer(packed: Packed, name: str) -> int | None:
    return host_address(packed[name]) if name in packed else None


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _grouped(dispatch: Contiguous | Batched, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Offsets of each expert's rows, and the row indices where rows are not stored in that order."""
    if isinstance(dispatch, Contiguous):
        return _plain(dispatch.offsets, torch.int64), None
    require_on(x.device, counts=dispatch.counts)
    counts = dispatch.counts.to(torch.int64)
    offsets = counts.new_zeros(counts.numel() + 1)
    torch.cumsum(counts, 0, out=offsets[1:])
    expert = torch.repeat_interleave(counts)
    return offsets, torch.arange(int(offsets[-1]), device=x.device) - offsets[expert] + expert * x.shape[1]


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as rows with unit column stride; copies where it is laid out otherwise."""
    if tensor.dim() == 2 and tensor.stride(1) == 1:
        return tensor
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _float(tensor: Tensor) -> int:
    if tensor.dtype not in FLOAT:
        raise LaunchError("the CPU kernels take floats", expected="bfloat16, float16 or float32", got=tensor.dtype)
    return FLOAT[tensor.dtype]
