"""Other ways to compute the same layer, each through its own interface, timed beside ours.

A peer is a small class with a line in `PEERS`. It is made from the same weights, gets the same
batches, and is checked against the same reference. One that cannot be made or does not run here
(its package is missing, its kernels refuse the device) is left out of the figures, and the report
says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.bench import peers_cpu, peers_cuda, peers_triton
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.problem import Problem


class _Dense(Peer):
    """Unquantised weights: what a model costs that nobody quantised."""

    dtype = torch.bfloat16

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem = problem
        self.w13, self.w2 = (weights.dense(matrix, self.dtype) for matrix in ("w13", "w2"))
        self.b13, self.b2 = (weights.bias(matrix, self.dtype) for matrix in ("w13", "w2"))


@dataclass(frozen=True)
class InOrder:
    """Slots in expert order, whose they are, and where each expert's end."""

    slots: Tensor
    expert: Tensor
    ends: Tensor


class TorchGrouped(_Dense, SortingPeer[InOrder]):
    """`torch._grouped_mm`: rows sorted by expert, one product for all experts, nothing on the host."""

    def sort(self, ids: Tensor) -> InOrder:
        expert, slots = torch.sort(ids.reshape(-1), stable=True)
        every = torch.arange(self.problem.experts, dtype=expert.dtype, device=ids.device)
        return InOrder(slots, expert, torch.searchsorted(expert, every, right=True).to(torch.int32))

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, routed: InOrder) -> Tensor:
        tokens, top_k = ids.shape
        hidden = torch._grouped_mm(x.to(self.dtype)[routed.slots // top_k], self.w13.transpose(1, 2), offs=routed.ends)
        hidden = hidden if self.b13 is None else hidden + self.b13[routed.expert]
        rows = torch._grouped_mm(self.problem.activation(hidden), self.w2.transpose(1, 2), offs=routed.ends)
        rows = rows if self.b2 is None else rows + self.b2[routed.expert]
        spread = torch.empty_like(rows)
        spread[routed.slots] = rows
        spread = spread.view(tokens, top_k, -1)
        return (spread * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


class TorchLoop(_Dense):
    """Expert by expert: index the rows, multiply, add back; how models are written in plain torch."""

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
    """The same in fp32: the fair one on CPUs without bf16 products."""

    dtype = torch.float32


PEERS: dict[str, type[Peer]] = {
    "torch-grouped": TorchGrouped,
    "torch-loop": TorchLoop,
    "torch-loop-fp32": TorchLoopFloat,
    **peers_cpu.PEERS,
    **peers_cuda.PEERS,
    **peers_triton.PEERS,
}
# All of one package's ways: the fastest of them is the one to beat.
FAMILIES = {"torch": ("torch-grouped",), **peers_cuda.FAMILIES, **peers_triton.FAMILIES}


def expand(names: tuple[str, ...]) -> tuple[str, ...]:
    """Peers by name, families by their members."""
    found = [member for name in names for member in FAMILIES.get(name, (name,))]
    for name in found:
        if name not in PEERS:
            known = ", ".join((*PEERS, *FAMILIES))
            raise SpecError(f"no peer is called '{name}'", expected=f"one of {known}")
    return tuple(dict.fromkeys(found))
