"""Routing in the native library against the definition."""

from __future__ import annotations

import pytest
from routings import CASES, Case, check, make_case

from lancebill.backends.cpu import native
from lancebill.backends.cpu.route import CpuRouting
from lancebill.backends.route_call import RouteCall
from lancebill.moe.routing import Routed

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.state().why)


def run_native(case: Case) -> Routed:
    library = native.library()
    call = RouteCall.make(case.routing, case.logits, case.router, None, case.input_ids)
    assert library is not None and call is not None
    bound = CpuRouting.bind(library, call)
    assert bound is not None and bound.serves(call)
    return bound.run(call)


def test_native_routing_is_the_definition() -> None:
    for case in [*CASES, *map(make_case, range(100, 400))]:
        check(run_native(case), case)
