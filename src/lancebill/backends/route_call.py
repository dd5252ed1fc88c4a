"""A call of a routing kernel: tensors that kernels can read, and whether a later call is like an earlier one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lancebill.backends.call_signature import same_metadata
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing, check_inputs, check_lookup

LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGER_DTYPES = (torch.int32, torch.int64)  # of hash tables and token ids
_MOST_STRIDE = 1 << 31


# Routing, logits, router, hidden states; returns None if the call does not repeat the one it was made for.
FastRoute = Callable[[Routing, Tensor, RouterTensors, Tensor], Routed | None]


class RouteCall(NamedTuple):
    """Rows of logits with unit column stride, and flat token ids if the routing needs them."""

    routing: Routing
    logits: Tensor
    router: RouterTensors
    input_ids: Tensor | None

    @classmethod
    def make(
        cls, routing: Routing, logits: Tensor, router: RouterTensors, hidden: Tensor | None, input_ids: Tensor | None
    ) -> RouteCall | None:
        """None where only the definition computes the result, or says what is wrong. Runs on every call."""
        shape = logits.shape
        if len(shape) != 2 or not shape[0] or (hidden is not None and hidden.shape[0] != shape[0]):
            return None
        row, column = logits.stride()
        if column != 1 or not 0 <= row < _MOST_STRIDE:
            logits = logits.contiguous()
        if not routing.hashed:
            return cls(routing, logits, router, None)
        if input_ids is None or input_ids.numel() != shape[0]:
            return None
        return cls(routing, logits, router, input_ids.reshape(-1))

    def supported(self) -> bool:
        """Whether kernels can read these tensors; raises where they do not fit the routing."""
        routing, logits, (bias, correction, table), input_ids = self
        check_inputs(routing, logits, None, bias, correction)
        if routing.custom is not None or routing.simulated is not None or logits.dtype not in LOGITS_DTYPES:
            return False
        read: list[tuple[Tensor, tuple[torch.dtype, ...]]]
        read = [(tensor, (torch.float32,)) for tensor in (bias, correction) if tensor is not None]
        if routing.hashed:
            found = check_lookup(routing, len(logits), table, input_ids)
            read += [(tensor, INTEGER_DTYPES) for tensor in found]
        return all(
            tensor.dtype in dtypes and tensor.is_contiguous() and tensor.device == logits.device
            for tensor, dtypes in read
        )


class BoundRouting(ABC):
    """A routing kernel, and what its arguments were computed from, to be compared with every later call."""

    def __init__(self, call: RouteCall) -> None:
        self.routing, self.router = call.routing, call.router
        self._addresses, self._facts = call.router.addresses(), _facts(call)

    @abstractmethod
    def run(self, logits: Tensor, input_ids: Tensor | None) -> Routed:
        """Route these logits; ids and weights are new tensors."""

    @abstractmethod
    def fast_route(self, call: RouteCall) -> FastRoute:
        """A function for further calls like this one. Not for hash routing."""

    def serves(self, call: RouteCall) -> bool:
        """Whether this call differs from the first only in the number of tokens and their addresses."""
        return (
            call.routing is self.routing
            and call.router.same_as(self.router)
            and call.router.addresses() == self._addresses
            and _facts(call) == self._facts
        )

    def repeats(self, call: RouteCall) -> Callable[[Routing, Tensor, RouterTensors, Tensor], bool]:
        """A check whether another call repeats this one, logits aside: quicker than making it a `RouteCall`."""
        own_routing, own_router, own_addresses = self.routing, self.router, self._addresses
        tokens, same_as_logits = call.logits.shape[0], same_metadata(call.logits)

        def repeats(routing: Routing, logits: Tensor, router: RouterTensors, hidden: Tensor) -> bool:
            return (
                routing is own_routing
                and same_as_logits(logits)
                and hidden.shape[0] == tokens
                and router.same_as(own_router)
                and router.addresses() == own_addresses
            )

        return repeats


def _facts(call: RouteCall) -> tuple[object, ...]:
    _, logits, _, input_ids = call
    own = None if input_ids is None else (input_ids.dtype, input_ids.device)
    return logits.dtype, logits.device, logits.shape[1], logits.stride(), own
