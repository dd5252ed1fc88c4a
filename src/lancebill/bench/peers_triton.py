"""triton_kernels from Triton's repository: one `matmul_ogs` per matrix.

Written for the package of Triton 3.6. Its routing kernels need a power of two of experts per token (DeepSeek has six),
so torch sorts the slots and the package's kernel makes the block schedule from them. Its fused activations need w13's
rows as gate, up, gate, up. The scale layout depends on the number of warps; four and eight are both timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.layout import Packed, PlainLayout
from lancebill.moe.problem import Problem
from lancebill.numbers.spec import MXFP4


@dataclass(frozen=True)
class TritonRouting:
    """Slots in expert order, and the package's routing structs made from them."""

    slots: Tensor
    data: Any
    gather: Any
    scatter: Any


class FourWarps(SortingPeer[TritonRouting]):
    """Tiles of 128 columns, which the package chooses up to 512 tokens."""

    warps = 4

    def __init__(self, problem: Problem, weights: Weights) -> None:
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs

        from lancebill.bench.fused_silu import silu_and_multiply

        _require_silu_mxfp4(problem)
        self.problem, self.matmul = problem, matmul_ogs
        self.silu = FusedActivation(FnSpecs("silu", silu_and_multiply, (), reduction_n=2), ())
        plain = weights.cached("plain", lambda: weights.packed(PlainLayout()))
        values = weights.cached("triton_kernels", lambda: {name: _values(name, plain) for name in problem.matrices})
        self.matrices = {name: (values[name], _precision(name, plain, self.warps)) for name in problem.matrices}
        self.expert_ids = torch.arange(problem.experts, dtype=torch.int32, device=weights.device)

    def sort(self, ids: Tensor) -> TritonRouting:
        from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx
        from triton_kernels.tensor import make_ragged_tensor_metadata

        experts, slots = torch.sort(ids.reshape(-1), stable=True)
        ends = torch.searchsorted(experts, self.expert_ids, right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int32)
        blocks = make_ragged_tensor_metadata(counts, slots.numel())
        order = slots.to(torch.int32)
        inverse = torch.empty_like(order)
        inverse[slots] = torch.arange(slots.numel(), dtype=torch.int32, device=ids.device)
        data = RoutingData(None, blocks.slice_sizes, self.problem.experts, ids.shape[1], blocks)
        return TritonRouting(slots, data, GatherIndx(order, inverse), ScatterIndx(inverse, order))

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, routed: TritonRouting) -> Tensor:
        (w13, precision13), (w2, precision2) = self.matrices["w13"], self.matrices["w2"]
        hidden = self.matmul(
            x, w13, None, routed.data, gather_indx=routed.gather,
            precision_config=precision13, fused_activation=self.silu,
        )  # fmt: skip
        result: Tensor = self.matmul(
            hidden, w2, None, routed.data, scatter_indx=routed.scatter,
            precision_config=precision2, gammas=weights.reshape(-1)[routed.slots],
        )  # fmt: skip
        return result


class EightWarps(FourWarps):
    """Tiles of 256 columns, which the package chooses above 512 tokens."""

    warps = 8


def _require_silu_mxfp4(problem: Problem) -> None:
    biased = any(shape.bias for shape in problem.matrices.values())
    mxfp4 = all(shape.spec == MXFP4 for shape in problem.matrices.values())
    if biased or str(problem.activation) != "silu" or not mxfp4 or problem.activations.spec.quantized:
        raise SpecError("triton_kernels is only set up here for silu experts of MXFP4 without biases and 16-bit inputs")


def _values(matrix: str, plain: dict[str, Packed]) -> Any:
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details.layout import make_default_matmul_mxfp4_w_layout

    layout, options = make_default_matmul_mxfp4_w_layout(mx_axis=1)
    codes = _alternating(matrix, plain[matrix]["codes"])
    return convert_layout(wrap_torch_tensor(codes.transpose(1, 2), dtype=FP4), layout, **options)


def _precision(matrix: str, plain: dict[str, Packed], warps: int) -> Any:
    from triton_kernels.matmul_ogs import PrecisionConfig
    from triton_kernels.tensor import convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details.layout import make_default_matmul_mxfp4_w_scale_layout

    layout, options = make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=warps)
    scales = _alternating(matrix, plain[matrix]["scale0"])
    return PrecisionConfig(weight_scale=convert_layout(wrap_torch_tensor(scales.transpose(1, 2)), layout, **options))


def _alternating(matrix: str, rows: Tensor) -> Tensor:
    """[E, n, ...] with w13's rows reordered to gate, up, gate, up."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous() if matrix == "w13" else rows


PEERS: dict[str, type[Peer]] = {"triton_kernels-4": FourWarps, "triton_kernels-8": EightWarps}
FAMILIES = {"triton_kernels": tuple(PEERS)}
