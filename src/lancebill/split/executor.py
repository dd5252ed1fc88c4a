"""Runs the calls of a split layer: the device's experts by their own executor, those in host memory by the CPU.

Each part sums its experts of a token in fp32; the two sums are added in fp32 and rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.errors import LaunchError
from lancebill.moe.device import require_on
from lancebill.moe.dispatch import Dispatch, Indexed
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing
from lancebill.split.gpu_queues import MailboxQueue, SideStream
from lancebill.split.large_batches import LargeBatches
from lancebill.split.moves import Maps, Moves
from lancebill.split.run_part import HostPart, run_part

MAILBOX_ROWS = 1024  # above, a host function's latency is negligible


class SplitExecutor(Executor):
    """Combines two executors: `own` for experts on the device, and one for experts in host memory."""

    def __init__(self, own: Executor, host: HostPart, moves: Moves | None = None) -> None:
        """With `moves`, which expert is where may change between calls."""
        super().__init__(own.backend, own.problem, own.device, own.tensors)
        self.own, self.host, self.moves = own, host, moves
        self.accepts_any_ids = True
        self.fast_routes = own.fast_routes
        self.large_batches = LargeBatches(own, host, 0 if moves is None else own.problem.experts)
        if moves is not None:
            moves.rates = self.large_batches.known_rates

    def run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        if not isinstance(dispatch, Indexed) or dispatch.expert_map is None:
            raise LaunchError(
                "a layer that is split between a GPU and host memory routes all rows itself",
                expected="ids and weights of every row",
                got=type(dispatch).__name__,
            )
        if x.numel() == 0:
            return out
        on = self.tensors.device
        if x.device != on or out.device != on:
            require_on(on, x=x, out=out)
        on_gpu = on.type == "cuda"
        if on_gpu:
            index = x.device.index or 0
            if torch._C._cuda_getDevice() != index:  # captures are asked of, and memory is pinned for, the current GPU
                with torch.cuda.device(index):
                    return self.run(x, dispatch, out)
            x, ids, weights = x.contiguous(), dispatch.ids.contiguous(), dispatch.weights.contiguous()
            dispatch = Indexed(ids, weights, dispatch.expert_map)
        # In inference mode, because only there all buffers can be written that calls in and outside of it have made.
        with torch.inference_mode(), self._maps(dispatch) as maps:
            dispatch = Indexed(dispatch.ids, dispatch.weights, maps.own)
            if on_gpu:
                return self._run_on_gpu(x, dispatch, maps.host, out)
            host = run_part(self.host.executor, x, dispatch, maps.host)
            return out.copy_(run_part(self.own, x, dispatch, maps.own).add_(host))

    def _maps(self, dispatch: Indexed) -> AbstractContextManager[Maps]:
        """Which part computes which expert in this call."""
        if self.moves is not None:
            return self.moves.call(dispatch)
        assert self.host.expert_map is not None and dispatch.expert_map is not None
        return nullcontext(Maps(dispatch.expert_map, self.host.expert_map))

    def _run_on_gpu(self, x: Tensor, dense: Indexed, host_map: Tensor, out: Tensor) -> Tensor:
        """Both parts at once. The GPU's kernels round their sum to the dtype of x, before both sums are added."""
        if self.large_batches.may_stream(x):
            done = self.large_batches.run(x, dense, host_map, out)
            if done is not None:
                return done
        queue = MailboxQueue(x.device) if len(x) <= MAILBOX_ROWS else SideStream(x.device)
        try:
            sums = self.host.calls.queue(queue, self.host.executor, host_map, x, dense)
            own = self.own.run(x, dense, torch.empty_like(x)) if self.own.problem.experts else None
        finally:
            queue.join()
        return out.copy_(sums) if own is None else torch.add(own, sums, out=out)

    def route(
        self,
        routing: Routing,
        logits: Tensor,
        router: RouterTensors,
        hidden: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Routed:
        return self.own.route(routing, logits, router, hidden, input_ids)

    @classmethod
    def reserve(cls, executors: Sequence[Executor], max_tokens: int) -> int:
        own = [executor.own for executor in executors if isinstance(executor, SplitExecutor)]
        return type(own[0]).reserve(own, max_tokens)

    def forget(self) -> None:
        super().forget()
        self.own.forget()
