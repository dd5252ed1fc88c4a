"""Peers on NVIDIA GPUs: Humming and vLLM's Marlin, each used if its package is installed.

Each packs the same quantised weights with its own package's functions and calls the entry point that an inference
engine would call. Humming has no kernels for sorting slots and combining rows, so we add fast ones. Marlin
(`peers_marlin.py`) has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.humming.support import unsupported
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.peers_marlin import Marlin
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.layout import PlainLayout
from lancebill.moe.problem import Problem


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
        self._out = torch.empty(0, dtype=torch.float32, device="cpu")

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


PEERS: dict[str, type[Peer]] = {
    "humming-indexed": HummingIndexed,
    "humming-grouped": HummingGrouped,
    "marlin": Marlin,
}
FAMILIES = {"humming": ("humming-indexed", "humming-grouped")}
