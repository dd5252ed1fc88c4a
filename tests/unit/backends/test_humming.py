"""The Humming backend without its package and without a GPU: refusals, layout, grouping of slots, sums of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.backends import oracle
from lancebill.backends.humming import BACKEND, support
from lancebill.backends.humming.layout import HummingLayout, padded
from lancebill.backends.registry import registry
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Contiguous
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import BATCH_INVARIANT, CONTIGUOUS, Problem
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.layers import layer_problem, plausible_weight

HOPPER = Device("cuda", 90)
SIZES = {"hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2}


def problem_of(spec: str = "mxfp4", activations: str = "bf16", **options: object) -> Problem:
    return layer_problem(spec, activations, **SIZES, **options)  # type: ignore[arg-type]


def codes(problem: Problem, device: Device = HOPPER) -> set[str]:
    return {reason.code for reason in BACKEND.check(problem, device)}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "version", lambda name: "0.1.19")


def test_it_is_selected_by_name_only() -> None:
    assert registry()["humming"] is BACKEND
    assert BACKEND.on_request


def test_a_missing_package_is_the_reason() -> None:
    (reason,) = BACKEND.check(problem_of(), HOPPER)
    assert reason.code == "package"
    assert reason.text == "humming-kernels is not installed" and reason.hint == "pip install humming-kernels"
    with pytest.raises(UnsupportedProblem, match="humming-kernels is not installed"):
        oracle.select(problem_of(), HOPPER, "humming")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("spec", ["mxfp4", "int4-g128", "int4-g32", "int8", "fp8-block"])
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_supported_weights(spec: str, arch: int) -> None:
    assert not codes(problem_of(spec), Device("cuda", arch))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("spec", ["nvfp4", "int4-g32-zp", "nf4", "bf16", "fp8", "int8-g128"])
def test_unsupported_weights(spec: str) -> None:
    assert "spec" in codes(problem_of(spec))


@pytest.mark.usefixtures("installed")
def test_all_reasons_are_given() -> None:
    fine = problem_of()
    assert (
        codes(fine, Device("cpu")) == codes(fine, Device("cuda", 100)) == codes(fine, Device("cuda", 75)) == {"device"}
    )
    assert codes(problem_of(activations="fp8")) == {"activations"}
    assert codes(problem_of(activations="fp16")) == {"input"}
    assert codes(problem_of("int4-g128:fp16", "fp16")) == set()
    assert codes(problem_of(bias=True)) == {"bias"}
    assert codes(problem_of(act_order=True)) == {"act-order"}
    assert codes(problem_of(activation=Activation("gelu"))) == {"activation"}
    assert codes(replace(fine, order=BATCH_INVARIANT)) == {"order"}
    assert codes(replace(fine, dispatch=CONTIGUOUS)) == {"dispatch"}
    assert codes(replace(fine, pre_scale=True)) == {"input-scale"}
    hints = {reason.hint for reason in BACKEND.check(problem_of(activations="fp32"), HOPPER)}
    assert hints == {"use bf16 or fp16", "use bf16 or fp16 or fp8"}
    several = replace(problem_of("nf4", "fp8", bias=True), order=BATCH_INVARIANT)
    assert codes(several, Device("cpu")) == {"device", "spec", "bias", "activations", "order"}


@pytest.mark.parametrize(
    ("spec", "n", "k"),
    [("mxfp4", 96, 64), ("int4-g32", 100, 160), ("int4-g128", 512, 256), ("int8", 72, 96), ("fp8-block", 128, 384)],
)
def test_the_layout_is_lossless(spec: str, n: int, k: int) -> None:
    shape, layout = MatrixShape("w13", n, k, parse_spec(spec)), HummingLayout()
    held = layout.allocate(shape, 3)
    for expert in range(3):
        weight = plausible_weight(shape, expert)
        layout.pack(shape, weight, {name: tensor[expert] for name, tensor in held.items()})
    for expert in range(3):
        row = {name: tensor[expert] for name, tensor in held.items()}
        assert layout.unpack(shape, row).equals(plausible_weight(shape, expert))
    assert all(not tensor.is_floating_point() for tensor in held.values())
    assert padded(shape) == (-(-n // 256) * 256, -(-k // 128) * 128)


def test_codes_are_in_the_order_of_the_kernels() -> None:
    """In a block of 64 rows and 16 columns, the first word of thread t has rows t // 4 and 8 + t // 4."""
    shape, layout = MatrixShape("w13", 256, 128, parse_spec("mxfp4")), HummingLayout()
    weight = plausible_weight(shape, 0)
    held = layout.allocate(shape, 1)
    layout.pack(shape, weight, {name: tensor[0] for name, tensor in held.items()})
    words = held["weight"][0].view(128 // 16, 256 // 64, 32, 4).long() & 0xFFFFFFFF
    for block, band, thread, word in ((0, 0, 0, 0), (3, 1, 13, 2), (7, 3, 31, 3)):
        row, column = 64 * band + 16 * word + thread // 4, 16 * block + 2 * (thread % 4)
        places = [(r, c) for r in (0, 8) for c in (0, 8)]
        expected = [weight.codes[row + r, column + c + odd] for odd in (0, 1) for r, c in places]
        found = [(int(words[block, band, thread, word]) >> (4 * i)) & 15 for i in range(8)]
        assert found == [int(code) for code in expected]


def test_plans_are_pure_and_note_compilation() -> None:
    problem = problem_of()
    assert BACKEND.plan(problem, 16, HOPPER) == BACKEND.plan(problem, 16, HOPPER)
    assert BACKEND.plan(problem, 4096, HOPPER).estimate_us > BACKEND.plan(problem, 1, HOPPER).estimate_us
    assert "compiles" in BACKEND.plan(problem, 1, HOPPER).notes[0]


def test_run_refuses_other_dispatches() -> None:
    problem = problem_of()
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    with pytest.raises(LaunchError, match="by token ids"):
        BACKEND.run(BACKEND.plan(problem, 2, HOPPER), x, Contiguous(torch.zeros(5, dtype=torch.int64)), {}, x.clone())
