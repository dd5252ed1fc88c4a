"""Every backend of the registry, on every case it says it supports, on the devices that are here."""

from __future__ import annotations

import pytest
import torch

from lancebill.backends.base import Backend
from lancebill.backends.registry import registry
from lancebill.moe.problem import Device, parse_device
from lancebill.testing import judge

DEVICES = [Device("cpu"), *([parse_device("cuda")] if torch.cuda.is_available() else [])]
CASES = list(judge.cases())


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("backend", registry().values(), ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("form", [judge.INDEXED, judge.CONTIGUOUS, judge.BATCHED])
def test_numbers(backend: Backend, device: Device, case: judge.Case, form: str) -> None:
    if case.problem.weight_on_input and form != judge.INDEXED:
        pytest.skip("rows of a finished form come weighted")
    case = judge.in_form(case, form)
    reasons = list(backend.check(case.problem, device))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    judge.check_case(backend, device, case)


@pytest.mark.parametrize("backend", registry().values(), ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layout_is_a_bijection(backend: Backend, case: judge.Case) -> None:
    device = Device("cpu")
    if list(backend.check(case.problem, Device("cuda", 90))) and list(backend.check(case.problem, device)):
        pytest.skip("not supported")
    packed = judge.pack_weights(backend, case, device)
    layout = backend.layout(case.problem)
    for matrix, shape in case.problem.matrices.items():
        for expert, weight in enumerate(case.weights[matrix]):
            rows = {name: t[expert] for name, t in packed[matrix].items()}
            back = layout.unpack(shape, rows)
            again = {name: torch.zeros_like(t) for name, t in rows.items()}
            layout.pack(shape, back, again)
            assert all(torch.equal(rows[name], again[name]) for name in rows)
            assert back.equals(weight)
