"""The routing kernel in Triton's interpreter, against the definition.

Not collected by pytest: `test_hopper_dispatch.py` runs it in a separate process, where TRITON_INTERPRET is set before
Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import scalars
from routings import CASES, Case, check

from lancebill.backends.gpu.kernels import route as kernels
from lancebill.backends.gpu.route_step import RouteStep
from lancebill.backends.route_call import RouteCall
from lancebill.moe.routing import Routed


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dependent-launch calls no-ops and convert loop bounds for newer numpy."""
    monkeypatch.setattr(kernels, "gdc_wait", lambda **_: None)
    monkeypatch.setattr(kernels, "gdc_launch_dependents", lambda **_: None)
    monkeypatch.setattr(kernels, "range", scalars, raising=False)


def run_kernel(case: Case) -> Routed:
    routing, logits, router = case.routing, case.logits, case.router
    table = router.table if router.table is not None else torch.zeros(1, 1, dtype=torch.int32)
    tokens = case.input_ids if case.input_ids is not None else torch.zeros(1, dtype=torch.int32)
    call = RouteCall.make(routing, logits, router, None, case.input_ids)
    assert call is not None and call.supported()
    step = RouteStep.of(call)
    assert step is not None
    shape, nothing = (len(logits), routing.top_k), torch.zeros(1)
    ids, weights, identity = (
        torch.full(shape, -7, dtype=torch.int32),
        torch.full(shape, 7.0),
        torch.full(shape[:1], 7.0),
    )
    tensors = {
        "logits": logits, "bias": nothing if router.bias is None else router.bias,
        "correction": nothing if router.correction is None else router.correction, "table": table,
        "input_ids": tokens, "ids": ids, "weights": weights, "identity": identity, "stride": logits.stride(0),
    }  # fmt: skip
    kernels.route_tokens[(len(logits),)](**tensors, **step.values, **dict(step.source.constants))
    return Routed(ids, weights, identity if routing.zero_experts else None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case: Case) -> None:
    """A third of the rows: the interpreter takes 50 ms for one."""
    some = case.rows(slice(case.number % 3, None, 3))
    check(run_kernel(some), some)
