"""A plan, tensors and packed weights as the structs of one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from colibri.backends.cpu.form import Form
from colibri.backends.cpu.plan import CpuPlan
from colibri.dispatch import Batched, Contiguous, Dispatch, Indexed
from colibri.errors import LaunchError
from colibri.layout import MatrixShape, Packed
from colibri.native import Library, abi

_FLOAT = {torch.bfloat16: abi.Float.BF16, torch.float16: abi.Float.F16, torch.float32: abi.Float.F32}


def run(
    native: Library, plan: CpuPlan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor
) -> None:
    """One call of the library; tensors it reads are held here until it returns."""
    problem = plan.problem
    held: list[Tensor | None] = []
    matrices = [
        _matrix(shape, form, weights[name]) for (name, shape), form in zip(problem.matrices.items(), plan.forms)
    ]
    layer = abi.Layer(
        problem.experts,
        abi.Activation[problem.activation.name.upper()],
        problem.activation.limit or 0.0,
        problem.activation.alpha,
        problem.activation.beta,
        ctypes.addressof(matrices[0]),
        ctypes.addressof(matrices[1]) if len(matrices) > 1 else None,
    )
    work = abi.Work(threads=torch.get_num_threads(), level=plan.level, tile_rows=0 if plan.tiles else -1)
    if isinstance(dispatch, Indexed):
        ids, routed = dispatch.ids.to(torch.int32).contiguous(), dispatch.weights.float().contiguous()
        work.tokens, work.top_k = ids.shape
        work.ids, work.weights, work.weight_on_input = ids.data_ptr(), routed.data_ptr(), problem.weight_on_input
        held += [ids, routed]
    else:
        offsets, rows = _grouped(dispatch, x)
        work.offsets = offsets.data_ptr()
        work.rows = None if rows is None else rows.data_ptr()
        held += [offsets, rows]
    x, result = _rows(x), _rows(out)
    work.x, work.x_stride, work.x_type = x.data_ptr(), x.stride(0), _float(x)
    work.out, work.out_stride, work.out_type = result.data_ptr(), result.stride(0), _float(result)
    native.run(layer, work)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))


def _matrix(shape: MatrixShape, form: Form, packed: Packed) -> abi.Matrix:
    values = form.values
    matrix = abi.Matrix(
        shape.n, shape.k, form.group, values.codes, form.scale, form.zero, values.center, values.mantissa, values.step,
        values.table or (0,) * 16,
    )  # fmt: skip
    matrix.code_bytes = packed["codes"].data_ptr()
    matrix.scale_bytes, matrix.zero_bytes = _pointer(packed, "scales"), _pointer(packed, "zeros")
    matrix.row_scale, matrix.bias = _pointer(packed, "row_scale"), _pointer(packed, "bias")
    matrix.perm, matrix.pre_scale = _pointer(packed, "perm"), _pointer(packed, "pre_scale")
    matrix.input_scale = _pointer(packed, "input_scale")
    matrix.input, matrix.input_group = form.input, form.input_group
    return matrix


def _pointer(packed: Packed, name: str) -> int | None:
    return packed[name].data_ptr() if name in packed else None


def _grouped(dispatch: Contiguous | Batched, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Offsets of each expert's rows, and where the rows are if they do not stand in that order."""
    if isinstance(dispatch, Contiguous):
        return dispatch.offsets.to(torch.int64).contiguous(), None
    counts = dispatch.counts.to(torch.int64)
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    expert = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    return offsets, torch.arange(int(offsets[-1])) - offsets[expert] + expert * x.shape[1]


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, as rows one after another."""
    if tensor.dim() == 2 and tensor.stride(1) == 1:
        return tensor
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _float(tensor: Tensor) -> abi.Float:
    if tensor.dtype not in _FLOAT:
        raise LaunchError("the CPU kernels take floats", expected="bfloat16, float16 or float32", got=tensor.dtype)
    return _FLOAT[tensor.dtype]
