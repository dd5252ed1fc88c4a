"""Routing in the native library: one call from logits to ids and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.backends.cpu.call import FLOAT
from lancebill.backends.cpu.native import Library, abi
from lancebill.backends.route_call import BoundRouting, FastRoute, RouteCall
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing, token_outside


class CpuRouting(BoundRouting):
    """The struct of a layer's routing without what differs between calls."""

    def __init__(self, native: Library, call: RouteCall) -> None:
        super().__init__(call)
        routing, logits, router, _ = call
        bias, correction, table = router.addresses()
        self.native = native
        self.template = abi.RoutingStruct(
            logits.shape[1], routing.top_k, abi.Scoring[routing.scoring.upper()], routing.after_top_k,
            routing.n_group if routing.grouped else 0, routing.topk_group if routing.grouped else 0,
            routing.renormalize, routing.zero_experts, routing.epsilon, routing.folded_scale, bias, correction, table,
            router.table is not None and router.table.dtype == torch.int64,
            0 if router.table is None else len(router.table), 0, logits.stride(0), FLOAT[logits.dtype],
        )  # fmt: skip

    @classmethod
    def bind(cls, native: Library, call: RouteCall) -> CpuRouting | None:
        """None if the library does not support this call."""
        on_cpu = call.logits.device.type == "cpu" and call.logits.shape[1] <= abi.MOST_EXPERTS
        return cls(native, call) if on_cpu and call.supported() else None

    def fast_route(self, call: RouteCall) -> FastRoute:
        """Further calls like this one. Not for hash routing."""
        repeats, run = self.repeats(call), self.run

        def fast_route(routing: Routing, logits: Tensor, router: RouterTensors, hidden: Tensor) -> Routed | None:
            return run(logits, None) if repeats(routing, logits, router, hidden) else None

        return fast_route

    def run(self, logits: Tensor, input_ids: Tensor | None) -> Routed:
        """On the CPU all of them: `bind` and every comparison with its call have seen that."""
        tokens = logits.shape[0]
        ids = logits.new_empty(tokens, self.routing.top_k, dtype=torch.int32)
        weights = logits.new_empty(tokens, self.routing.top_k, dtype=torch.float32)
        identity = logits.new_empty(tokens, dtype=torch.float32) if self.routing.zero_experts else None
        struct = abi.RoutingStruct.from_buffer_copy(self.template)
        struct.logits, struct.tokens, struct.threads = logits.data_ptr(), tokens, torch.get_num_threads()
        struct.ids, struct.weights = ids.data_ptr(), weights.data_ptr()
        if identity is not None:
            struct.identity = identity.data_ptr()
        wide = None if input_ids is None else input_ids.long()
        if wide is not None:
            struct.input_ids = wide.data_ptr()
        if not self.native.route(struct):
            assert self.router.table is not None and wide is not None
            raise token_outside(self.router.table, wide)
        return Routed(ids, weights, identity)
