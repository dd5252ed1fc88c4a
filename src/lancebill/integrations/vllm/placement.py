"""This rank's share of the experts, from vLLM's parallel config."""

from __future__ import annotations

from typing import Protocol

from lancebill.backends.base import Reason
from lancebill.moe.placement import Placement

# With these, every rank has all tokens when the experts are called. The others dispatch rows themselves, to kernels of
# their own interface.
ALL_GATHER_BACKENDS = ("naive", "allgather_reducescatter")


class ParallelConfig(Protocol):
    """The fields of vLLM's `FusedMoEParallelConfig` that decide a placement."""

    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    use_ep: bool
    all2all_backend: str

    @property
    def use_all2all_kernels(self) -> bool: ...


def placement_of(parallel: ParallelConfig, strategy: str, redundant: int) -> Placement:
    """vLLM has already folded data parallelism into the tensor- or expert-parallel size."""
    return Placement(
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        ep_rank=parallel.ep_rank if parallel.use_ep else 0,
        ep_size=parallel.ep_size if parallel.use_ep else 1,
        strategy=strategy,
        redundant=redundant,
    )


def dispatch_reason(parallel: ParallelConfig) -> Reason | None:
    """Why our layer cannot take rows as this configuration brings them; None where it can."""
    if parallel.use_all2all_kernels and parallel.all2all_backend not in ALL_GATHER_BACKENDS:
        return Reason(
            "all2all",
            f"the all-to-all backend {parallel.all2all_backend} dispatches rows itself",
            f"--all2all-backend {ALL_GATHER_BACKENDS[-1]}",
        )
    return None
