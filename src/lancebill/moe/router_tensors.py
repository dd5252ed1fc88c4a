"""The tensors of a layer's router, besides the gate that computes the logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lancebill.moe.routing import Routed, Routing, route


class RouterTensors(NamedTuple):
    """As `lancebill.moe.routing.route` takes them. A tuple, because every call makes one."""

    bias: Tensor | None = None  # [E] fp32, added to the logits
    correction: Tensor | None = None  # [E] fp32, added to the scores for the selection
    table: Tensor | None = None  # [vocabulary, k] experts by token id

    def addresses(self) -> tuple[int, ...]:
        """0 for absent ones."""
        return tuple([0 if tensor is None else tensor.data_ptr() for tensor in self])

    def same_as(self, other: RouterTensors) -> bool:
        """Whether these are the same objects. Their memory may have changed: compare the addresses too."""
        return self[0] is other[0] and self[1] is other[1] and self[2] is other[2]


def route_as_defined(
    routing: Routing, logits: Tensor, router: RouterTensors, hidden: Tensor | None, input_ids: Tensor | None
) -> Routed:
    """`lancebill.moe.routing.route` with the router's tensors."""
    bias, correction, table = router
    return route(
        routing, logits, hidden=hidden, bias=bias, correction_bias=correction, table=table, input_ids=input_ids
    )
