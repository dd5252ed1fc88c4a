"""A plan, tensors and packed weights as the structs of one call.

A decode step takes less than a millisecond, so what does not change between calls is made once: the structs
of a layer are kept with its plan, under the addresses of all the tensors they point to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from lancebill.backends.base import Fitting
from lancebill.backends.cpu.form import CpuForm
from lancebill.backends.cpu.native import Library, abi
from lancebill.backends.cpu.plan import CpuPlan
from lancebill.errors import LaunchError
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.moe.problem import Problem

FLOAT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # abi.Float
_MOST_KEPT = 64  # layers of one plan: more means that tensors keep moving


def run(
    native: Library, plan: CpuPlan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor
) -> None:
    """One call of the library; tensors it reads are held here until it returns."""
    layer, _ = _structs(plan, weights)
    source, result = _rows(x), _rows(out)
    pointers: tuple[int | None, ...]
    if isinstance(dispatch, Indexed):
        ids, routed = _plain(dispatch.ids, torch.int32), _plain(dispatch.weights, torch.float32)
        tokens, top_k = ids.shape
        pointers = (ids.data_ptr(), routed.data_ptr(), plan.problem.weight_on_input, None, None)
    else:
        offsets, rows = _grouped(dispatch, x)
        tokens, top_k = 0, 0
        pointers = (None, None, False, offsets.data_ptr(), None if rows is None else rows.data_ptr())
    work = abi.WorkStruct(
        source.data_ptr(), result.data_ptr(), source.stride(0), result.stride(0), _float(source), _float(result),
        tokens, top_k, *pointers, torch.get_num_threads(), int(plan.level), 0 if plan.tiles else -1,
    )  # fmt: skip
    native.run(layer, work, native.scratch_bytes(layer, work))
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))


class Again:
    """Further calls by ids like one before: as many rows of the same type, the weights where they were.

    Between two layers of a model everything else has left the caches, the interpreter's own data too: what a call
    looks at is what it waits for. So this looks at little, and each call has a copy of the struct of the first.
    """

    def __init__(self, native: Library, plan: CpuPlan, x: Tensor, weights: Mapping[str, Packed]) -> None:
        problem = plan.problem
        self.native, (self.layer, self.matrices) = native, _structs(plan, weights)
        tokens = x.numel() // problem.hidden
        rows, slots = (tokens, problem.hidden), (tokens, problem.top_k)
        self.fitting = Fitting(rows, slots, x.dtype, torch.device("cpu"))
        codes = [packed["codes"] for packed in weights.values()]
        self.first, self.last = codes[0], codes[-1]
        self.at = self.first.data_ptr(), self.last.data_ptr()
        self.work = abi.WorkStruct(
            0, 0, problem.hidden, problem.hidden, _float(x), _float(x), tokens, problem.top_k, 0, 0,
            problem.weight_on_input, None, None, 1, int(plan.level), 0 if plan.tiles else -1,
        )  # fmt: skip
        self.needs: dict[int, int] = {}  # scratch memory by number of threads

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        if not (self.fitting(x, ids, weights, out) and (self.first.data_ptr(), self.last.data_ptr()) == self.at):
            return False
        work, threads = abi.WorkStruct.from_buffer_copy(self.work), torch.get_num_threads()
        work.x, work.out, work.threads = x.data_ptr(), out.data_ptr(), threads
        work.ids, work.weights = ids.data_ptr(), weights.data_ptr()
        need = self.needs.get(threads)
        if need is None:
            need = self.needs[threads] = self.native.scratch_bytes(self.layer, work)
        self.native.run(self.layer, work, need)
        return True


def _structs(plan: CpuPlan, weights: Mapping[str, Packed]) -> tuple[abi.LayerStruct, list[abi.MatrixStruct]]:
    """The layer's struct, and those of its matrices, which it points to."""
    key = tuple(tensor.data_ptr() for packed in weights.values() for tensor in packed.values())
    known = plan.layers.get(key)
    if known is None:
        if len(plan.layers) >= _MOST_KEPT:
            plan.layers.clear()
        known = plan.layers[key] = _make_layer(plan.problem, plan.forms, weights)
    return known


def _make_layer(
    problem: Problem, forms: tuple[CpuForm, ...], weights: Mapping[str, Packed]
) -> tuple[abi.LayerStruct, list[abi.MatrixStruct]]:
    matrices = [_matrix(shape, form, weights[name]) for (name, shape), form in zip(problem.matrices.items(), forms)]
    layer = abi.LayerStruct(
        problem.experts,
        abi.ActivationKind[problem.activation.name.upper()],
        problem.activation.limit or 0.0,
        problem.activation.alpha,
        problem.activation.beta,
        ctypes.addressof(matrices[0]),
        ctypes.addressof(matrices[1]) if len(matrices) > 1 else None,
    )
    return layer, matrices


def _matrix(shape: MatrixShape, form: CpuForm, packed: Packed) -> abi.MatrixStruct:
    values = form.values
    matrix = abi.MatrixStruct(
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


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _grouped(dispatch: Contiguous | Batched, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Offsets of each expert's rows, and where the rows are if they do not stand in that order."""
    if isinstance(dispatch, Contiguous):
        return _plain(dispatch.offsets, torch.int64), None
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


def _float(tensor: Tensor) -> int:
    if tensor.dtype not in FLOAT:
        raise LaunchError("the CPU kernels take floats", expected="bfloat16, float16 or float32", got=tensor.dtype)
    return FLOAT[tensor.dtype]
