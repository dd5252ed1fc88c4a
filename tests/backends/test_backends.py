"""Every registered backend, on every case that it supports, on the available devices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from lancebill.backends.base import Backend
from lancebill.backends.registry import registry
from lancebill.moe.device import Device, parse_device
from lancebill.moe.layout import Layout, Packed
from lancebill.testing import judge

DEVICES = [Device("cpu"), *([parse_device("cuda")] if torch.cuda.is_available() else [])]
CASES = list(judge.cases())


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("backend", registry().values(), ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("form", [judge.INDEXED, judge.CONTIGUOUS, judge.BATCHED])
def test_results_match_the_truth(backend: Backend, device: Device, case: judge.Case, form: str) -> None:
    if case.problem.weight_on_input and form != judge.INDEXED:
        pytest.skip("routing weights on the input need an indexed dispatch")
    case = judge.in_form(case, form)
    reasons = list(backend.reasons(case.problem, device))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    judge.check_case(backend, device, case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layout_roundtrip_is_exact(case: judge.Case) -> None:
    """Of every layout once: backends that have the same one pack the same bytes."""
    cpu, seen = Device("cpu"), list[Layout]()
    for backend in registry().values():
        if all(list(backend.reasons(case.problem, device)) for device in (Device("cuda", 90), cpu)):
            continue
        layout = backend.layout(case.problem)
        if layout not in seen:
            seen.append(layout)
            check_roundtrip(layout, case, judge.pack_weights(backend, case, cpu))
    assert seen


def check_roundtrip(layout: Layout, case: judge.Case, packed: Mapping[str, Packed]) -> None:
    for matrix, shape in case.problem.matrices.items():
        for expert, weight in enumerate(case.weights[matrix]):
            rows = {name: t[expert] for name, t in packed[matrix].items()}
            unpacked = layout.unpack(shape, rows)
            repacked = {name: torch.zeros_like(t) for name, t in rows.items()}
            layout.pack(shape, unpacked, repacked)
            assert all(torch.equal(rows[name], repacked[name]) for name in rows)
            assert unpacked.equals(weight)
