"""Calls into the package humming-kernels (0.1.19): weights in its order, its two kinds of GEMM.

`indexed` GEMMs gather rows themselves. `grouped_contiguous` GEMMs need rows in expert order, which the package's input
kernel produces while it quantises. The activation runs in that kernel too. `rows` adds what the package lacks: grouping
slots and summing a token's rows. The package is imported on first use, because importing it requires a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.humming.layout import PAD_COLUMNS, PAD_ROWS
from lancebill.backends.humming.rows import Grouped, group_slots, weighted_sum
from lancebill.moe.activation import Activation
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import E8M0
from lancebill.numbers.spec import ActivationSpec

INDEXED, GROUPED = ("indexed", "grouped_contiguous")
_LOCKS = 2048  # lock words, with which blocks that share a sum synchronise
_AT_ONCE = 16  # experts whose codes are expanded to 32 bits at a time


@dataclass(frozen=True)
class Tuned:
    """A tuning configuration as the package's JSON text, and the rows of its tiles."""

    height: int
    text: str


@dataclass(frozen=True)
class HummingMatrix:
    """One matrix of all experts: the package's description and its tensors."""

    config: Any
    tensors: Mapping[str, Tensor]
    locks: Tensor

    def gemm(self, gemm_type: str, x: Tensor, scale: Tensor | None, out: Tensor, tuned: Tuned, **routing: Any) -> None:
        from humming.forward import humming_forward

        humming_forward(
            self.config, inputs=x, input_scale=scale, outputs=out, locks=self.locks, valid_shape_m=out.shape[0],
            compute_config=_compute(gemm_type), tuning_config=tuned.text, **self.tensors, **routing,
        )  # fmt: skip

    def tuned(self, gemm_type: str, rows: int) -> Tuned:
        """The package's own choice for this many rows."""
        from humming.tune import get_heuristics_config

        chosen = get_heuristics_config(self.config, shape_m=rows, gemm_type=gemm_type, device=self.locks.device)
        return Tuned(chosen["block_shape"][0], json.dumps(chosen))

    def compile(self, gemm_type: str, tuned: Tuned) -> None:
        from humming.kernel.humming import HummingKernel

        HummingKernel.prepare_kernels(self.config.to_str(), _compute(gemm_type), tuned.text, self.locks.device)


@lru_cache
def _compute(gemm_type: str) -> str:
    return json.dumps({"use_f16_accum": False, "gemm_type": gemm_type})


def make_matrix(
    shape: MatrixShape, experts: int, plain: Mapping[str, Tensor], activations: ActivationSpec, dtype: torch.dtype
) -> HummingMatrix:
    """From tensors in `PlainLayout`, with the package's own conversion, which may fold scales and round biases."""
    from humming.transform import prepare_fp16_e8m0_scale, transform_humming_tensors

    level, codes = shape.spec.scales[0], plain["codes"]
    scale = plain["scale0"].view(torch.float8_e8m0fnu if level.dtype == E8M0 else level.dtype.storage)
    tensors = {"weight": codes.view(torch.int32), "weight_scale": scale}
    if shape.bias:
        tensors["bias"] = plain["bias"].view(torch.float32).to(dtype)
    schema, tensors = _centred(_schema(shape), tensors)
    config = _config(shape, experts, schema, activations, dtype, codes.device)
    config, tensors = prepare_fp16_e8m0_scale(config, tensors)
    return HummingMatrix(config, transform_humming_tensors(config, tensors), _new_locks(codes.device))


def view_matrix(shape: MatrixShape, experts: int, packed: Mapping[str, Tensor], dtype: torch.dtype) -> HummingMatrix:
    """From tensors in `HummingLayout`: the same memory, viewed as the package's dtypes."""
    level, codes = shape.spec.scales[0], packed["weight"].detach()
    scale = packed["weight_scale"].detach().view(torch.float8_e8m0fnu if level.dtype == E8M0 else level.dtype.storage)
    config = _config(replace(shape, bias=False), experts, _schema(shape), None, dtype, codes.device)
    return HummingMatrix(config, {"weight": codes, "weight_scale": scale}, _new_locks(codes.device))


def describe_matrix(
    shape: MatrixShape, experts: int, activations: ActivationSpec, dtype: torch.dtype, device: torch.device
) -> HummingMatrix:
    """Without weights, to compile kernels ahead. Integers are described as if every code occurs."""
    config = _config(shape, experts, _schema(shape), activations, dtype, device)
    return HummingMatrix(config, {}, _new_locks(device))


def _config(
    shape: MatrixShape,
    experts: int,
    schema: Any,
    activations: ActivationSpec | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    from humming import dtypes
    from humming.schema import HummingInputSchema
    from humming.transform import prepare_layer_config

    inputs = HummingInputSchema(a_dtype=dtypes.float8e4m3) if activations and activations.spec.quantized else None
    return prepare_layer_config(
        shape.n, shape.k, schema, inputs, experts, PAD_ROWS, PAD_COLUMNS, shape.bias, dtype, device
    )


def _schema(shape: MatrixShape) -> Any:
    from humming import dtypes
    from humming.schema import HummingWeightSchema

    level = shape.spec.scales[0]
    high, wide = level.block
    return HummingWeightSchema(
        b_dtype=dtypes.DataType.from_str(_WEIGHTS[shape.spec.dtype.name]),
        bs_dtype=dtypes.float8e8m0 if level.dtype == E8M0 else None,
        weight_scale_group_size=wide if wide < shape.k else 0,
        weight_scale_group_size_n=high if high > 1 else 0,
    )


def _new_locks(device: torch.device) -> Tensor:
    return torch.zeros(_LOCKS, dtype=torch.int32, device=device)


_WEIGHTS = {"e2m1": "float4e2m1", "uint4b8": "uint4", "uint8b128": "uint8", "e4m3fn": "float8e4m3"}


def _centred(schema: Any, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Symmetric integers as sign and magnitude, the package's faster form. Unchanged if a code is the lowest one."""
    if not schema.b_dtype.is_integer_type:
        return schema, tensors
    parts = []
    for part in tensors["weight"].split(_AT_ONCE):
        changed, made = schema.convert_symmetric_integer_weight({"weight": part.contiguous()})
        if changed is schema:
            return schema, tensors
        parts.append(made["weight"])
    return changed, tensors | {"weight": torch.cat(parts)}


@dataclass(frozen=True)
class HummingRouting:
    """The routing of a batch as the GEMMs read it, and the place of each slot's row."""

    blocks: Mapping[int, Grouped]  # by rows per tile; 1 if rows are in expert order
    order: Tensor | None  # the place of each slot's row, or None: rows stay in slot order


class Experts:
    """A layer computed with one of the package's kinds of GEMM."""

    def __init__(self, problem: Problem, matrices: Mapping[str, HummingMatrix], gemm_type: str) -> None:
        self.problem, self.gemm_type = problem, gemm_type
        self.matrices = (matrices["w13"], matrices["w2"])
        self._tuned: dict[int, tuple[Tuned, ...]] = {}

    def tuned(self, slots: int) -> tuple[Tuned, ...]:
        """The configurations of both GEMMs, for the rows that are expected on this rank."""
        if slots not in self._tuned:
            rows = max(1, round(slots * self.problem.experts / self.problem.global_experts))
            self._tuned[slots] = tuple(matrix.tuned(self.gemm_type, rows) for matrix in self.matrices)
        return self._tuned[slots]

    def compile(self, tokens: Sequence[int]) -> None:
        """Compile the GEMMs for these numbers of tokens in parallel, each in a process, and the input kernels."""
        per_count = [zip(self.matrices, self.tuned(count * self.problem.top_k)) for count in tokens]
        jobs = {(matrix.config.to_str(), tuned): matrix for pairs in per_count for matrix, tuned in pairs}
        with ThreadPoolExecutor(min(32, len(jobs))) as pool:
            list(pool.map(lambda job: job[1].compile(self.gemm_type, job[0][1]), jobs.items()))
        problem, device = self.problem, self.matrices[0].locks.device
        one = self.sort(torch.zeros(1, problem.top_k, dtype=torch.int32, device=device))
        for process, width in ((self._tokens, problem.hidden), (self._hidden, problem.w13.n)):
            process(torch.zeros(1, width, dtype=problem.input.storage, device=device), one)

    def sort(self, ids: Tensor) -> HummingRouting:
        """Group the slots by expert: in expert order, or padded for each tile height in use."""
        if self.gemm_type == GROUPED:
            groups = group_slots(ids, self.problem.experts)
            return HummingRouting({1: groups}, groups.places)
        heights = {tuned.height for tuned in self.tuned(ids.numel())}
        return HummingRouting({height: group_slots(ids, self.problem.experts, height) for height in heights}, None)

    def compute(self, x: Tensor, routed: HummingRouting, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Compute the layer, from grouped slots to the weighted sum."""
        tokens, top_k = ids.shape
        projected, rows = (x.new_empty(tokens * top_k, width) for width in (self.problem.w13.n, self.problem.hidden))
        self._gemm(0, *self._tokens(x, routed), projected, routed, top_k)
        self._gemm(1, *self._hidden(projected, routed), rows, routed, 1)
        order = routed.order
        return weighted_sum(rows, ids if order is None else order, weights, out, in_order=order is None)

    def _tokens(self, x: Tensor, routed: HummingRouting) -> tuple[Tensor, Tensor | None]:
        """The input of w13 and its scales: a row for each token, or for each slot in expert order."""
        order = routed.order
        return _process(self.matrices[0], x, **({} if order is None else {"layout": "scatter", "scatter_idx": order}))

    def _hidden(self, projected: Tensor, routed: HummingRouting) -> tuple[Tensor, Tensor | None]:
        """The input of w2 and its scales. Rows of other ranks' slots are skipped where they are last."""
        matrix = self.matrices[1]
        how: dict[str, Any] = {"activation_type": "binary_split"}
        if not matrix.config.input_quant_mode.should_quantize:
            how["outputs"] = projected.new_empty(projected.shape[0], self.problem.intermediate)
        if self.gemm_type == GROUPED and self.problem.experts < self.problem.global_experts:
            how["num_valid_tokens"] = routed.blocks[1].edges[-1:]
        return _process(matrix, projected, activation_impl=expression(self.problem.activation), **how)

    def _gemm(
        self, which: int, x: Tensor, scale: Tensor | None, out: Tensor, routed: HummingRouting, per_row: int
    ) -> None:
        matrix, tuned = self.matrices[which], self.tuned(out.shape[0])[which]
        if self.gemm_type == GROUPED:
            how: dict[str, Any] = {"expert_layout": routed.blocks[1].edges}
        else:
            groups = routed.blocks[tuned.height]
            how = {
                "sorted_ids": groups.slots, "expert_ids": groups.owners, "num_tokens_padded": groups.edges[-1:],
                "top_k": per_row,
            }  # fmt: skip
        matrix.gemm(self.gemm_type, x, scale, out, tuned, **how)


def _process(matrix: HummingMatrix, x: Tensor, **how: Any) -> tuple[Tensor, Tensor | None]:
    """The input of a GEMM (activated, reordered, quantised) and its scales."""
    from humming.forward import may_process_input

    rows, _, scales = may_process_input(matrix.config, x, **how)
    return rows, scales


def expression(activation: Activation) -> str:
    """The CUDA expression of an activation of gate `a` and up `b`."""
    gate, up = "a", "b"
    if activation.limit is not None:
        gate = f"fminf(a, {activation.limit!r}f)"
        up = f"fmaxf(fminf(b, {activation.limit!r}f), -{activation.limit!r}f)"
    if activation.name == "silu":
        return f"__fdividef({gate}, 1.0f + __expf(-{gate})) * {up}"
    if activation.name == "swigluoai":
        sigmoid = f"1.0f + __expf({-activation.alpha!r}f * {gate})"
        return f"__fdividef({gate}, {sigmoid}) * ({up} + {activation.beta!r}f)"
    raise KeyError(activation.name)
