"""This rank's share of the experts, from vLLM's parallel config and from its maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lancebill.backends.base import Reason
from lancebill.errors import LaunchError
from lancebill.moe.placement import Placement
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED

# With these, every rank has all tokens when the experts are called.
ALL_GATHER_BACKENDS = ("naive", "allgather_reducescatter")
# These dispatch rows themselves, to experts of vLLM's modular kernels, and bring them in this form.
DISPATCHING_BACKENDS = {
    "deepep_high_throughput": INDEXED,
    "deepep_low_latency": BATCHED,
    "deepep_v2": CONTIGUOUS,  # without CUDA graphs, otherwise indexed
    "nixl_ep": BATCHED,
    "flashinfer_all2allv": INDEXED,
    "flashinfer_nvlink_two_sided": INDEXED,
    "flashinfer_nvlink_one_sided": INDEXED,
}


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


def slots_of(expert_map: Sequence[int]) -> list[int]:
    """The physical id of each local slot."""
    held = {slot: physical for physical, slot in enumerate(expert_map) if slot >= 0}
    return [held[slot] for slot in range(len(held))]


def experts_of(copies: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[int, ...]:
    """The logical expert in each slot; `copies` are the physical ids of each logical expert, or -1."""
    logical = {physical: expert for expert, ids in enumerate(copies) for physical in ids if physical >= 0}
    empty = [physical for physical in slots if physical not in logical]
    if empty:
        raise LaunchError("no expert is in some slots", expected="a finished rearrangement", got=f"slots {empty}")
    return tuple(logical[physical] for physical in slots)


def dispatched_form(parallel: ParallelConfig) -> str | None:
    """The form in which an all-to-all backend brings rows; None where vLLM gathers the tokens of all ranks."""
    return DISPATCHING_BACKENDS.get(parallel.all2all_backend) if parallel.use_all2all_kernels else None


def dispatch_reason(parallel: ParallelConfig) -> Reason | None:
    """Why our layer cannot take rows as this configuration brings them; None where it can."""
    if not parallel.use_all2all_kernels or parallel.all2all_backend in (*ALL_GATHER_BACKENDS, *DISPATCHING_BACKENDS):
        return None
    return Reason(
        "all2all",
        f"the all-to-all backend {parallel.all2all_backend} needs experts of its own",
        f"--all2all-backend {ALL_GATHER_BACKENDS[-1]}",
    )
