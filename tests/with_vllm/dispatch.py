"""An all-to-all backend of our own, in place of DeepEP: rows go to the ranks of their experts, and results back.

It brings rows in each of the three ways that vLLM's backends do. Every rank sends everything to all ranks, which keep
what is theirs; results are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe import all2all_utils, eep_reconfigure
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
)

from lancebill.integrations.vllm import dispatched

TOKENS, GROUPED, BATCHES = "tokens", "grouped", "batches"
BACKENDS = {TOKENS: "deepep_high_throughput", GROUPED: "deepep_v2", BATCHES: "deepep_low_latency"}
WIDER = 32  # columns that the backend adds to rows, as DeepEP does for widths that it does not know


class GlooDispatch(FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """`way` is one of `BACKENDS`; `experts` is the number of experts on each rank."""

    def __init__(self, way: str, experts: int, capacity: int) -> None:
        super().__init__()
        self.way, self.experts, self.capacity = way, experts, capacity
        self.calls = 0

    @property
    def activation_format(self) -> Any:
        batched = self.way == BATCHES
        return FusedMoEActivationFormat.BatchedExperts if batched else FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> Any:
        return torch.int64

    def max_num_tokens_per_rank(self) -> int | None:
        return self.capacity

    def num_dispatchers(self) -> int:
        return int(get_ep_group().world_size)

    def output_is_reduced(self) -> bool:
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Any:
        assert not defer_input_quant and quant_config.quant_dtype is None
        self.calls += 1
        group = get_ep_group()
        sent: list[Any] = [None] * group.world_size
        dist.all_gather_object(sent, (a1, topk_ids, topk_weights), group=group.cpu_group)
        x, ids, weights = (torch.cat(parts) for parts in zip(*sent, strict=True))
        self.first, self.total = sum(part[0].shape[0] for part in sent[: group.rank_in_group]), x.shape[0]
        offset = group.rank_in_group * self.experts
        local = torch.where((ids >= offset) & (ids < offset + self.experts), ids - offset, -1)
        return getattr(self, f"_{self.way}")(x, local, weights, offset)

    def _tokens(self, x: Tensor, local: Tensor, weights: Tensor, offset: int) -> Any:
        """Like DeepEP, with the id of an expert on another rank in slots that are not this rank's."""
        self.rows = (local >= 0).any(1).nonzero().flatten()
        elsewhere = 0 if offset else self.experts
        ids = torch.where(local >= 0, local + offset, elsewhere)[self.rows]
        return x[self.rows], None, None, ids, weights[self.rows]

    def _grouped(self, x: Tensor, local: Tensor, weights: Tensor, offset: int) -> Any:
        self.rows, slot, counts = self._by_expert(local)
        meta = ExpertTokensMetadata(counts, None)
        chosen = self.rows, slot
        return x[self.rows], None, meta, (local + offset)[chosen][:, None], weights[chosen][:, None]

    def _batches(self, x: Tensor, local: Tensor, weights: Tensor, offset: int) -> Any:
        self.rows, slot, counts = self._by_expert(local)
        self.weights = weights[self.rows, slot]
        self.expert = torch.repeat_interleave(torch.arange(self.experts), counts)
        self.place = torch.arange(len(self.rows)) - (counts.cumsum(0) - counts)[self.expert]
        batch = x.new_full((self.experts, self.capacity * self.num_dispatchers(), x.shape[1]), float("nan"))
        batch[self.expert, self.place] = x[self.rows]
        return batch, None, ExpertTokensMetadata(counts.to(torch.int32), None), None, None

    def _by_expert(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row and slot of everything routed to this rank, ordered by expert, and the number of each expert."""
        rows, slots = (local >= 0).nonzero(as_tuple=True)
        order = local[rows, slots].argsort(stable=True)
        return rows[order], slots[order], torch.bincount(local[rows, slots], minlength=self.experts)

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        made = fused_expert_output
        if self.way == BATCHES:
            made = made[self.expert, self.place] * self.weights[:, None]
        elif len(made):
            made = weight_and_reduce_impl.apply(None, made, topk_weights, topk_ids, apply_router_weight_on_input)
        total = made.new_zeros(self.total, output.shape[1]).index_add_(0, self.rows, made)
        dist.all_reduce(total, group=get_ep_group().cpu_group)
        output.copy_(total[self.first : self.first + output.shape[0]])


class Widths:
    """DeepEP's answer about the widths that it sends."""

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden: int, *_: Any) -> int:
        return hidden + WIDER


@contextmanager
def gloo_dispatch(way: str) -> Iterator[list[GlooDispatch]]:
    """Makes vLLM dispatch in this way; gives what was made, one for each layer."""
    made: list[GlooDispatch] = []

    def make(moe: Any, *_: Any, **__: Any) -> GlooDispatch:
        made.append(GlooDispatch(way, moe.num_local_experts, moe.max_num_tokens))
        return made[-1]

    names = ("DeepEPHTPrepareAndFinalize", "DeepEPV2PrepareAndFinalize", "DeepEPLLPrepareAndFinalize")
    original, makers = dispatched.maybe_make_prepare_finalize, (dispatched, eep_reconfigure)
    for module in makers:
        module.maybe_make_prepare_finalize = make
    for name in names:
        setattr(all2all_utils, name, Widths)
    try:
        yield made
    finally:
        for module in makers:
            module.maybe_make_prepare_finalize = original
        for name in names:
            delattr(all2all_utils, name)
