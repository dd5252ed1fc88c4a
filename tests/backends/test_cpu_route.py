"""Routing in the native library against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from routings import CASES, VOCABULARY, Case, check, make_case

from lancebill.backends.cpu import native
from lancebill.backends.cpu.native import abi
from lancebill.backends.cpu.route import CpuRouting
from lancebill.backends.route_call import RouteCall
from lancebill.errors import LaunchError
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.state().why)


def run_native(case: Case) -> Routed:
    library = native.library()
    call = RouteCall.make(case.routing, case.logits, case.router, None, case.input_ids)
    assert library is not None and call is not None
    bound = CpuRouting.bind(library, call)
    assert bound is not None and bound.serves(call)
    return bound.run(call.logits, call.input_ids)


def test_native_routing_is_the_definition() -> None:
    for case in [*CASES, *map(make_case, range(100, 400))]:
        check(run_native(case), case)


def test_many_tokens_on_several_threads() -> None:
    """Rows are independent of the batch and of the thread that computes them."""
    case = make_case(1)
    copies = replace(case, logits=case.logits.repeat(50, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(run_native(copies), copies)
    finally:
        torch.set_num_threads(threads)


def test_calls_that_the_library_does_not_take() -> None:
    hashed = make_case(3)
    assert hashed.input_ids is not None
    with pytest.raises(LaunchError, match="outside the table"):
        run_native(replace(hashed, input_ids=hashed.input_ids + VOCABULARY))
    library, case = native.library(), make_case(0)
    assert library is not None
    for logits in (case.logits.double(), torch.zeros(2, abi.MOST_EXPERTS + 1)):
        call = RouteCall.make(case.routing, logits, RouterTensors(), None, None)
        assert call is not None and CpuRouting.bind(library, call) is None
    assert RouteCall.make(hashed.routing, hashed.logits, hashed.router, None, hashed.input_ids[1:]) is None
