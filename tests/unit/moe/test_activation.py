"""Activation functions against reference values and float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lancebill.errors import LaunchError, SpecError
from lancebill.moe.activation import Activation

GATES, UPS = [1.0, -2.0, 9.0], [0.5, 3.0, -9.0]
PROJECTED = torch.tensor([GATES + UPS])

NUMBERS = [
    (Activation("silu"), [0.365529, -0.715218, -80.990005]),
    (Activation("silu", limit=10.0), [0.365529, -0.715218, -80.990005]),
    (Activation("silu", limit=7.0), [0.365529, -0.715218, -48.955358]),
    (Activation("gelu"), [0.420672, -0.136501, -81.0]),
    (Activation("gelu_tanh"), [0.420596, -0.136207, -81.0]),
    (Activation("swigluoai", limit=7.0), [1.268694, -0.257366, -41.999719]),
    (Activation("swiglustep", limit=7.0), [0.365529, -0.715218, -49.0]),
]


@pytest.mark.parametrize(("activation", "expected"), NUMBERS, ids=str)
def test_reference_values(activation: Activation, expected: list[float]) -> None:
    assert activation.gated
    assert activation(PROJECTED)[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_relu2_squares_positive_values() -> None:
    activation = Activation("relu2_no_mul")
    assert not activation.gated
    assert activation(torch.tensor([GATES]))[0].tolist() == [1, 0, 81]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamp(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


FORMULAS: list[tuple[Activation, Callable[[float, float], float]]] = [
    (Activation("silu"), lambda g, u: g * sigmoid(g) * u),
    (Activation("silu", limit=2.0), lambda g, u: min(g, 2) * sigmoid(min(g, 2)) * clamp(u, 2)),
    (Activation("gelu"), lambda g, u: 0.5 * g * (1 + math.erf(g / math.sqrt(2))) * u),
    (Activation("gelu_tanh"), lambda g, u: gelu_tanh(g) * u),
    (
        Activation("swigluoai", limit=3.0, alpha=1.5, beta=0.25),
        lambda g, u: min(g, 3) * sigmoid(1.5 * min(g, 3)) * (clamp(u, 3) + 0.25),
    ),
    (Activation("swiglustep", limit=2.0), lambda g, u: min(g * sigmoid(g), 2) * clamp(u, 2)),
    (Activation("situ", beta=2.0), lambda g, u: 2 * math.tanh(g / 2) * sigmoid(g) * u),
    (
        Activation("situ", beta=2.0, limit=3.0),
        lambda g, u: 2 * math.tanh(g / 2) * sigmoid(g) * 3 * math.tanh(u / 3),
    ),
    (Activation("relu2_no_mul"), lambda g, u: max(g, 0) ** 2),
    (Activation("silu_no_mul"), lambda g, u: g * sigmoid(g)),
    (Activation("gelu_no_mul"), lambda g, u: 0.5 * g * (1 + math.erf(g / math.sqrt(2)))),
    (Activation("gelu_tanh_no_mul"), lambda g, u: gelu_tanh(g)),
]


@pytest.mark.parametrize(("activation", "formula"), FORMULAS, ids=lambda v: str(v) if isinstance(v, Activation) else "")
def test_formulas(activation: Activation, formula: Callable[[float, float], float]) -> None:
    gates, ups = (torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(1)) * 4).unbind(0)
    projected = torch.cat([gates, ups], dim=-1) if activation.gated else gates
    expected = [[formula(g, u) for g, u in zip(*rows)] for rows in zip(gates.tolist(), ups.tolist())]
    error = activation(projected).double() - torch.tensor(expected, dtype=torch.float64)
    factors = gates * ups if activation.gated else gates  # of which gelu subtracts two shares that are nearly equal
    assert (error.abs() <= 1e-5 * torch.tensor(expected).abs() + 2.0**-22 * factors.abs()).all()
    for dtype in (torch.bfloat16, torch.float64):
        assert activation(projected.to(dtype)).dtype == dtype


def test_padding_of_zeros_stays_zero() -> None:
    """Padded rows of w13 give gate 0 and up 0; they must contribute nothing to w2."""
    for activation, _ in FORMULAS:
        width = 8 if activation.gated else 4
        assert not activation(torch.zeros(1, width)).any()


def test_the_gate_is_clamped_from_above_only() -> None:
    for name in ("silu", "swigluoai"):
        far = Activation(name, limit=7.0, alpha=0.01)(torch.tensor([[-100.0, 1.0]]))
        near = Activation(name, limit=7.0, alpha=0.01)(torch.tensor([[-7.0, 1.0]]))
        assert not torch.equal(far, near)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "relu2"}, "relu2"),  # would be gated; only relu2_no_mul exists
        ({"name": "swigluoai"}, "needs a limit"),
        ({"name": "swiglustep"}, "needs a limit"),
        ({"name": "gelu", "limit": 7.0}, "has no limit"),
        ({"name": "relu2_no_mul", "limit": 7.0}, "has no limit"),
        ({"name": "silu", "limit": 0.0}, "positive and finite"),
        ({"name": "silu", "limit": math.nan}, "positive and finite"),
    ],
)
def test_invalid_activations_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Activation(**arguments)  # type: ignore[arg-type]


def test_gated_activations_need_an_even_width() -> None:
    with pytest.raises(LaunchError, match="gates and ups"):
        Activation("silu")(torch.zeros(1, 5))
