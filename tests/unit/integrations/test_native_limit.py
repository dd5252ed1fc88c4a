"""Up to how many tokens native steps are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lancebill.backends.cpu.native import library
from lancebill.integrations.transformers import native_limit
from lancebill.integrations.transformers.native_limit import NO_LIMIT, most_tokens

LAYERS = nn.ModuleList([nn.Linear(64, 96), nn.Linear(64, 32)])


def limit(monkeypatch: pytest.MonkeyPatch, fixed: float, own: float, native: float, layers: Any = LAYERS) -> int:
    """Where 128 rows of the larger matrix take so many seconds; the smaller one is a third of it."""
    timed: list[nn.Linear] = []

    def seconds(_: Any, linear: nn.Linear, __: torch.dtype) -> list[float]:
        timed.append(linear)
        return [own, native]

    monkeypatch.setattr(native_limit, "_product_seconds", seconds)
    found = most_tokens(None, layers, torch.float32, fixed)  # type: ignore[arg-type]
    assert all(linear is LAYERS[0] for linear in timed)
    return found


def test_what_is_lost_with_each_token_is_weighed_against_what_a_step_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit(monkeypatch, 0.020, 0.003, 0.006) == 640  # 0.003 * 4/3 / 128 with each token
    assert limit(monkeypatch, 0.010, 0.003, 0.006) == 320
    assert limit(monkeypatch, 0.010, 0.003, 0.009) == 160


@pytest.mark.parametrize("native", [0.001, 0.003])
def test_products_that_are_no_slower_have_no_limit(native: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit(monkeypatch, 0.020, 0.003, native) == NO_LIMIT
    assert limit(monkeypatch, -0.001, 0.003, native) == 0  # unless a small step is no faster at all


def test_packed_matrices_are_the_same_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit(monkeypatch, 0.020, 0.003, 0.006, nn.ModuleList([nn.LayerNorm(8)])) == NO_LIMIT


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
def test_both_products_of_a_matrix_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    native = library()
    assert native is not None
    monkeypatch.setattr(native_limit, "_SECONDS", 60)  # all repeats, however busy the machine is
    small, large = (native_limit._product_seconds(native, nn.Linear(64, n), torch.float32) for n in (16, 4096))
    assert all(0 <= few < many for few, many in zip(small, large))
