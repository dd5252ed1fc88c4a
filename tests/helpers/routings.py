"""Random routings with difficult logits, and the check of a kernel's result against the definition."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import NONE, SIGMOID, SOFTMAX, SQRTSOFTPLUS, Routed, Routing, route

INF, NAN = float("inf"), float("nan")
VOCABULARY = 50
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A call of `route`."""

    number: int
    routing: Routing
    logits: Tensor
    router: RouterTensors
    input_ids: Tensor | None = None

    def __str__(self) -> str:
        held = ", ".join(name for name, tensor in self.router._asdict().items() if tensor is not None)
        return f"{self.number}: {self.logits.shape[1]} in {self.logits.dtype}, {held}, {self.routing}"

    def to(self, device: str) -> Case:
        """The same call elsewhere; rows stay views of wider rows."""
        wide = self.logits._base if self.logits._base is not None else self.logits
        router = RouterTensors(*(None if tensor is None else tensor.to(device) for tensor in self.router))
        ids = None if self.input_ids is None else self.input_ids.to(device)
        return replace(self, logits=wide.to(device)[:, : self.logits.shape[1]], router=router, input_ids=ids)

    def rows(self, chosen: slice) -> Case:
        """Only these rows."""
        ids = None if self.input_ids is None else self.input_ids[chosen].clone()
        return replace(self, logits=self.logits[chosen], input_ids=ids)


def make_case(number: int) -> Case:
    """Case `number`: every setting drawn at random, but selections and scoring functions in turn."""
    draw, g = random.Random(number), torch.Generator().manual_seed(number)
    scoring = (SOFTMAX, SIGMOID, SQRTSOFTPLUS, NONE)[number % 4]
    selection = ("plain", "grouped", "after", "hashed", "plain")[number % 5]
    groups, experts = 0, draw.choice((1, 3, 8, 33, 60, 64, 128, 160, 257))
    if selection == "grouped":
        groups = draw.choice((2, 3, 8))
        experts = groups * draw.choice((2, 5, 20, 32))
    kept = draw.randint(1, groups - 1) if groups else 0
    most = kept * experts // groups if groups else experts
    zeros = draw.choice((0, 0, experts // 3))
    routing = Routing(
        draw.randint(1, min(most, 12)), scoring, renormalize=draw.random() < 0.6,
        epsilon=draw.choice((0.0, 1e-20, 0.1)), after_top_k=selection == "after", n_group=groups, topk_group=kept,
        routed_scaling_factor=draw.choice((1.0, 2.5)), apply_scale_to_output=draw.random() < 0.2, zero_experts=zeros,
        hashed=selection == "hashed",
    )  # fmt: skip
    logits = difficult_logits(experts, g, DTYPES[number % 3], padding=draw.choice((0, 0, 3)))
    bias = torch.randn(experts, generator=g) if draw.random() < 0.4 else None
    correction = None
    if draw.random() < 0.6:
        correction = torch.randn(experts, generator=g)
        correction[torch.rand(experts, generator=g) < 0.05] = draw.choice((NAN, -INF, INF, 0.0))
    if selection != "hashed":
        return Case(number, routing, logits, RouterTensors(bias, correction))
    integer = draw.choice((torch.int32, torch.int64))
    table = torch.randint(-1, experts + 1, (VOCABULARY, routing.top_k), generator=g).to(integer)
    ids = torch.randint(-2, VOCABULARY, (len(logits),), generator=g)
    return Case(
        number, routing, logits, RouterTensors(bias, correction, table), ids.to(draw.choice((torch.int32, torch.int64)))
    )


def difficult_logits(experts: int, g: torch.Generator, dtype: torch.dtype, padding: int = 0) -> Tensor:
    """Rows with ties, NaN, infinities, signed zeros and large distances, with `padding` columns between them."""
    rows = torch.randn(12, experts + padding, generator=g) * 3
    rows[1] = torch.randint(-2, 2, rows[1].shape, generator=g).float()
    rows[2] *= 20
    rows[3, torch.rand(rows[3].shape, generator=g) < 0.3] = NAN
    rows[4, torch.rand(rows[4].shape, generator=g) < 0.5] = -INF
    rows[5, torch.rand(rows[5].shape, generator=g) < 0.1] = INF
    rows[6] = torch.where(torch.rand(rows[6].shape, generator=g) < 0.5, 0.0, -0.0)
    rows[7], rows[8], rows[9] = -INF, NAN, 1.5
    rows[10] = -100 - rows[10].abs()
    return rows.to(dtype)[:, :experts]


def expected(case: Case) -> Routed:
    """What the definition says, on the CPU."""
    inputs = [None if tensor is None else tensor.cpu() for tensor in (*case.router, case.input_ids)]
    names = ("bias", "correction_bias", "table", "input_ids")
    return route(case.routing, case.logits.cpu(), **dict(zip(names, inputs)))


def check(got: Routed, case: Case) -> None:
    """Equal experts, and weights that differ by at most one unit in the last place.

    Kernels compute scores in double too and round them once, so scores and selections are equal; the rule that
    selections may differ within 4 units in the last place is not needed.
    """
    want = expected(case)
    torch.testing.assert_close(got.ids.cpu(), want.ids, rtol=0, atol=0)
    torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=1.2e-7, atol=1.5e-45, equal_nan=True)
    assert (got.identity_weight is None) == (want.identity_weight is None)
    if got.identity_weight is not None and want.identity_weight is not None:
        torch.testing.assert_close(
            got.identity_weight.cpu(), want.identity_weight, rtol=5e-7, atol=1.5e-45, equal_nan=True
        )


CASES = [make_case(number) for number in range(20)]
