"""Peers on NVIDIA GPUs: Humming and vLLM's Marlin, each used if its package is installed.

Each packs the same quantised weights with its own package's functions and calls the entry point that an inference
engine would call. Humming has no kernels for sorting slots and combining rows, so we add fast ones. Marlin has its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.humming.support import unsupported
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.layout import PlainLayout
from lancebill.moe.problem import Problem
from lancebill.numbers.spec import MXFP4


class HummingIndexed(SortingPeer[Any]):
    """GEMMs that gather their input rows by index."""

    mode = "indexed"

    def __init__(self, problem: Problem, weights: Weights) -> None:
        for reason in unsupported(problem):
            raise SpecError(f"Humming: {reason}")
        from lancebill.backends.humming.package import Experts, make_matrix

        if problem.activations.spec.quantized:
            self.activations = "fp8"
        plain = weights.cached("plain", lambda: weights.packed(PlainLayout()))
        matrices = weights.cached(
            "humming",
            lambda: {
                name: make_matrix(shape, problem.experts, plain[name], problem.activations, problem.input.storage)
                for name, shape in problem.matrices.items()
            },
        )
        self.experts = Experts(problem, matrices, self.mode)
        self._out = torch.empty(0)

    def compile(self, tokens: Sequence[int]) -> None:
        self.experts.compile(tokens)

    def sort(self, ids: Tensor) -> Any:
        return self.experts.sort(ids)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, routed: Any) -> Tensor:
        if self._out.shape != x.shape:
            self._out = torch.full_like(x, torch.nan)
        return self.experts.compute(x, routed, ids, weights, self._out)


class HummingGrouped(HummingIndexed):
    """GEMMs on contiguous rows in expert order; an extra input kernel writes these rows."""

    mode = "grouped_contiguous"


def compile_humming(problem: Problem, tokens: Sequence[int], device: torch.device) -> None:
    """Compile what Humming needs for these batch sizes into its cache, without weights; no GEMM is run."""
    from lancebill.backends.humming.package import Experts, describe_matrix

    matrices = {
        name: describe_matrix(shape, problem.experts, problem.activations, problem.input.storage, device)
        for name, shape in problem.matrices.items()
    }
    for peer in (HummingIndexed, HummingGrouped):
        Experts(problem, matrices, peer.mode).compile(tokens)


class Marlin(Peer):
    """vLLM's Marlin through its fused layer, `fused_marlin_moe`."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe.fused_marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
        from vllm.scalar_type import scalar_types

        _require_plain_silu(problem)
        spec = problem.w13.spec
        self.layer, self.parameters = fused_marlin_moe, set(inspect.signature(fused_marlin_moe).parameters)
        self.packed: dict[str, Any] = {}
        plain = weights.cached("plain", lambda: weights.packed(PlainLayout()))
        for name, (matrix, shape) in zip(("w1", "w2"), problem.matrices.items()):
            codes, scales, dtype = plain[matrix]["codes"], plain[matrix]["scale0"], problem.input.storage
            no_order = torch.empty(0, dtype=torch.int32, device=codes.device)
            words = [code.view(torch.int32).t().contiguous() for code in codes]
            self.packed[name] = torch.stack([ops.gptq_marlin_repack(w, no_order, shape.k, shape.n, 4) for w in words])
            stored = torch.float8_e8m0fnu if spec == MXFP4 else spec.scales[0].dtype.storage
            group = spec.scales[0].block[1]
            permuted = [
                marlin_utils.marlin_permute_scales(
                    scale.view(stored).to(dtype).t().contiguous(), shape.k, shape.n, group
                )
                for scale in scales
            ]
            if spec == MXFP4:
                permuted = [marlin_utils_fp4.mxfp4_marlin_process_scales(scale) for scale in permuted]
            self.packed[f"{name}_scale"] = torch.stack(permuted)
        kind = scalar_types.float4_e2m1f if spec == MXFP4 else scalar_types.uint4b8
        self.packed |= {"quant_type_id": kind.id, "bias1": None, "bias2": None, "gating_output": None}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given = self.packed | {"hidden_states": x, "topk_weights": weights, "topk_ids": ids}
        result: Tensor = self.layer(**{name: value for name, value in given.items() if name in self.parameters})
        return result


def _require_plain_silu(problem: Problem) -> None:
    biased = any(shape.bias for shape in problem.matrices.values())
    four_bit = all(shape.spec.dtype.bits == 4 for shape in problem.matrices.values())
    if biased or str(problem.activation) != "silu" or not four_bit or problem.activations.spec.quantized:
        raise SpecError("Marlin is only set up here for silu experts of 4-bit weights without biases and 16-bit inputs")


PEERS: dict[str, type[Peer]] = {
    "humming-indexed": HummingIndexed,
    "humming-grouped": HummingGrouped,
    "marlin": Marlin,
}
FAMILIES = {"humming": ("humming-indexed", "humming-grouped")}
