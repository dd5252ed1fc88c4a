"""Layers that are made, called and refitted inside and outside of torch's inference mode, in any order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs
from torch import Tensor

from lancebill import QuantizedLinear, RoutedExperts
from lancebill.testing.checkpoints import Generated, save
from lancebill.testing.layers import worst_row

INSIDE, OUTSIDE = torch.inference_mode, nullcontext
Mode = Callable[[], AbstractContextManager[Any]]
MODULE = "model.layers.0.mlp.experts.0.down_proj"


def _call(layer: RoutedExperts) -> list[Tensor]:
    return [layer(*make_inputs(tokens)).clone() for tokens in (3, 70)]


def _refit(layer: RoutedExperts, made: Generated) -> None:
    layer.load_weights([(name, tensor) for name, tensor in made.tensors.items() if layer.claim(name)])
    layer.finish()


@pytest.mark.parametrize("modes", [(INSIDE, OUTSIDE), (OUTSIDE, INSIDE)], ids=["inside first", "outside first"])
@pytest.mark.parametrize("options", [{}, {"gpu_experts": 2}, {"gpu_experts": 2, "moves": "recency"}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer(tmp_path: Path, modes: tuple[Mode, Mode], options: dict[str, Any], backend: str) -> None:
    first, second = make_checkpoint(seed=0), make_checkpoint(seed=1)
    folders = [save(made, tmp_path / f"m{number}") for number, made in enumerate((first, second))]
    want = [_call(RoutedExperts.from_checkpoint(folder, 0, backend=backend)) for folder in folders]
    with modes[0]():
        layer = RoutedExperts.from_checkpoint(folders[0], 0, backend=backend, router=False, **options)
        found = _call(layer)
    with modes[1]():
        found += _call(layer)
        _refit(layer, second)
        found += _call(layer)
        moved = copy.deepcopy(layer).to("cpu")
    found += _call(moved)
    expected = [want[0], want[0], want[1], want[1]]
    for got, exact in zip(found, [output for outputs in expected for output in outputs], strict=True):
        assert worst_row(got, exact) < 1.5e-2  # the parts of a split layer are added in another order


@pytest.mark.parametrize("modes", [(INSIDE, OUTSIDE), (OUTSIDE, INSIDE)], ids=["inside first", "outside first"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_linear(tmp_path: Path, modes: tuple[Mode, Mode], backend: str) -> None:
    folders = [save(make_checkpoint(seed=seed), tmp_path / f"m{seed}") for seed in (0, 1)]
    x = torch.linspace(-1, 1, 768).bfloat16().view(3, 256)
    other = QuantizedLinear.from_checkpoint(folders[1], MODULE, backend=backend)
    with modes[0]():
        linear = QuantizedLinear.from_checkpoint(folders[0], MODULE, backend=backend)
        linear(x)
    with modes[1]():
        linear.refit(other.stored)
        assert torch.equal(linear(x), other(x))
