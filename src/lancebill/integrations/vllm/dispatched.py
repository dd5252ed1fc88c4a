"""Our layer as the experts of vLLM's modular kernels, for all-to-all backends that dispatch rows themselves (DeepEP).

A backend passes rows in one of the three forms of `moe.dispatch`: tokens with ids and weights
(`Indexed`); one row for each expert of a token, grouped by expert (`Contiguous`); a batch for each local expert
(`Batched`). Rows are dispatched unquantised: our kernels quantise them.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from lancebill.errors import LaunchError
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch


class LayerConfig(FusedMoEQuantConfig):
    """What vLLM passes to experts when it makes them, also for another number of ranks: here the layer itself."""

    def __init__(self, layer: RoutedExperts) -> None:
        plain = FusedMoEQuantConfig.make()
        super().__init__(plain._a1, plain._a2, plain._w1, plain._w2)
        self.layer = layer


class DispatchedExperts(FusedMoEExpertsModular):
    """What both formats of activations share. vLLM asks about support only where it chooses experts itself."""

    @property
    def layer(self) -> RoutedExperts:
        layer: RoutedExperts = self.quant_config.layer
        return layer

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Any, w2: Any, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        problem = self.layer.problem
        return problem.experts, a1.shape[-2], problem.w13.n, a1.shape[-1], topk_ids.shape[1]

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Any,
        w2: Any,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        if apply_router_weight_on_input:  # vLLM has multiplied the rows before it sent them
            topk_weights = torch.ones_like(topk_weights)
        self.run(hidden_states, topk_ids, topk_weights, expert_tokens_meta, output)

    @abstractmethod
    def run(self, x: Tensor, ids: Tensor, weights: Tensor, meta: Any, output: Tensor) -> None:
        """Compute the rows of one format; `meta` has the number of rows of each expert, where the backend counts."""

    def run_local(self, x: Tensor, dispatch: Dispatch, output: Tensor) -> None:
        """`RoutedExperts.run_local` on rows that may be wider than the layer: some backends pad them."""
        hidden = self.layer.problem.hidden
        if x.shape[-1] == hidden:
            self.layer.run_local(x, dispatch, output)
        else:
            inner = x[..., :hidden].contiguous()
            output.zero_()[..., :hidden] = self.layer.run_local(inner, dispatch, torch.zeros_like(inner))


class DispatchedRows(DispatchedExperts):
    """For backends that dispatch rows [M, H]. What we return is weighted, and summed over a row's experts."""

    @staticmethod
    def activation_format() -> Any:
        return FusedMoEActivationFormat.Standard

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, meta: Any, output: Tensor) -> None:
        if ids.shape[1] == self.layer.problem.top_k:
            self._run_tokens(x, ids, weights, output)
        else:
            self._run_grouped(x, weights, meta, output)

    def _run_tokens(self, x: Tensor, ids: Tensor, weights: Tensor, output: Tensor) -> None:
        layer, hidden = self.layer, self.layer.problem.hidden
        if x.shape[-1] == hidden:
            layer(x, topk_ids=ids, topk_weights=weights, out=output)
        else:
            output.zero_()[:, :hidden] = layer(x[:, :hidden].contiguous(), topk_ids=ids, topk_weights=weights)

    def _run_grouped(self, x: Tensor, weights: Tensor, meta: Any, output: Tensor) -> None:
        """One row for each expert of a token: rows are grouped by expert, and the counts say how."""
        counts = None if meta is None else meta.expert_num_tokens
        if counts is None or weights.shape != (x.shape[0], 1):
            got = f"weights {list(weights.shape)} for {x.shape[0]} rows, {'no ' if counts is None else ''}counts"
            raise LaunchError(
                "cannot tell how these rows were dispatched", expected="one weight a row, counts", got=got
            )
        offsets = torch.zeros(self.layer.problem.experts + 1, dtype=torch.int64, device=x.device)
        offsets[1:] = counts[: self.layer.problem.experts].cumsum(0)
        self.run_local(x, Contiguous(offsets), output)
        output.copy_(output * weights.float())  # the product in fp32, rounded once


class DispatchedBatches(DispatchedExperts):
    """For backends that dispatch a batch for each local expert, [E, T, H], and weight and sum results themselves."""

    @staticmethod
    def activation_format() -> Any:
        return FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (self.layer.problem.experts, M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, meta: Any, output: Tensor) -> None:
        counts = meta.expert_num_tokens[: self.layer.problem.experts]
        self.run_local(x, Batched(counts.to(torch.int32)), output)


def make_kernel(moe: Any, config: LayerConfig, routing_tables: Any) -> FusedMoEKernel:
    """vLLM's kernel: its dispatch and combine around our experts."""
    dispatch = maybe_make_prepare_finalize(moe, config, routing_tables, allow_new_interface=True)
    if dispatch.activation_format == FusedMoEActivationFormat.Standard:
        return FusedMoEKernel(dispatch, DispatchedRows(moe, config))
    batch, ranks = dispatch.max_num_tokens_per_rank(), dispatch.num_dispatchers()
    return FusedMoEKernel(dispatch, DispatchedBatches(moe, config, max_num_tokens=batch, num_dispatchers=ranks))
