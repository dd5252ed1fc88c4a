"""Other implementations of the same layer, timed in the same run as ours.

A peer is a small class with an entry in `PEERS`. It gets the same weights and batches and is checked against the
same reference. A peer that cannot run here (package missing, device not supported) is not timed, and the report
gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.bench import peers_cpu, peers_cuda, peers_ggml, peers_triton
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.peers_kt import KtKernel
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.problem import Problem


class _Dense(Peer):
    """Weights dequantised to `dtype`: the cost of the unquantised model."""

    dtype = torch.bfloat16

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem = problem
        self.w13, self.w2 = (weights.dense(matrix, self.dtype) for matrix in ("w13", "w2"))
        self.b13, self.b2 = (weights.bias(matrix, self.dtype) for matrix in ("w13", "w2"))


@dataclass(frozen=True)
class SlotsByExpert:
    """Slots sorted by expert, the expert of each sorted slot, and the end offset of each expert."""

    slots: Tensor
    expert: Tensor
    ends: Tensor


class TorchGrouped(_Dense, SortingPeer[SlotsByExpert]):
    """`torch._grouped_mm`: rows sorted by expert, one grouped GEMM for all experts, no host synchronisation."""

    def sort(self, ids: Tensor) -> SlotsByExpert:
        expert, slots = torch.sort(ids.reshape(-1), stable=True)
        experts = torch.arange(self.problem.experts, dtype=expert.dtype, device=ids.device)
        return SlotsByExpert(slots, expert, torch.searchsorted(expert, experts, right=True).to(torch.int32))

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, routed: SlotsByExpert) -> Tensor:
        tokens, top_k = ids.shape
        hidden = torch._grouped_mm(x.to(self.dtype)[routed.slots // top_k], self.w13.transpose(1, 2), offs=routed.ends)
        hidden = hidden if self.b13 is None else hidden + self.b13[routed.expert]
        rows = torch._grouped_mm(self.problem.activation(hidden), self.w2.transpose(1, 2), offs=routed.ends)
        rows = rows if self.b2 is None else rows + self.b2[routed.expert]
        by_slot = torch.empty_like(rows)
        by_slot[routed.slots] = rows
        by_slot = by_slot.view(tokens, top_k, -1)
        return (by_slot * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


class TorchLoop(_Dense):
    """A loop over experts (gather rows, matmul, scatter-add), as models are written in plain torch."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        x = x.to(self.dtype)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            hidden = x[token] @ self.w13[expert].t()
            hidden = hidden if self.b13 is None else hidden + self.b13[expert]
            rows = self.problem.activation(hidden) @ self.w2[expert].t()
            rows = rows if self.b2 is None else rows + self.b2[expert]
            out.index_add_(0, token, rows.float() * weights[token, slot].unsqueeze(-1))
        return out.to(self.problem.input.storage)


class TorchLoopFloat(TorchLoop):
    """The same in fp32, for a fair comparison on CPUs without bf16 instructions."""

    dtype = torch.float32


PEERS: dict[str, type[Peer]] = {
    "torch-grouped": TorchGrouped,
    "torch-loop": TorchLoop,
    "torch-loop-fp32": TorchLoopFloat,
    **peers_cpu.PEERS,
    **peers_ggml.PEERS,
    "kt-kernel": KtKernel,
    **peers_cuda.PEERS,
    **peers_triton.PEERS,
}
# All variants of one package; we compare with the fastest of them.
FAMILIES = {"torch": ("torch-grouped",), **peers_cuda.FAMILIES, **peers_triton.FAMILIES}


def expand_families(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names with each family replaced by its members; raises if a name is unknown."""
    members = [member for name in names for member in FAMILIES.get(name, (name,))]
    for name in members:
        if name not in PEERS:
            valid = ", ".join((*PEERS, *FAMILIES))
            raise SpecError(f"no peer is called '{name}'", expected=f"one of {valid}")
    return tuple(dict.fromkeys(members))
