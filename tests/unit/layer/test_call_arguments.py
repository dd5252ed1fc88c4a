"""Arguments that a call cannot take are typed errors on every backend, in first and repeated calls; layers pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lancebill import RoutedExperts
from lancebill.backends.cpu import native
from lancebill.errors import LaunchError

BACKENDS = ["reference", "torch-cpu", *(["cpu"] if native.library() is not None else [])]
CONFIG = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64,
    "moe_intermediate_size": 64, "num_hidden_layers": 1,
}  # fmt: skip


def _layer(backend: str) -> RoutedExperts:
    return RoutedExperts.random(CONFIG, 0, backend=backend, weights="mxfp4")


def _given() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 64).bfloat16(),
        "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 0]]),
        "topk_weights": torch.full((3, 2), 0.5),
        "out": torch.empty(3, 64).bfloat16(),
    }


WRONG: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "list": ("x", torch.Tensor.tolist), "ids as lists": ("topk_ids", torch.Tensor.tolist),
    "weights as lists": ("topk_weights", torch.Tensor.tolist), "out as a list": ("out", torch.Tensor.tolist),
    "sparse": ("x", torch.Tensor.to_sparse), "sparse ids": ("topk_ids", torch.Tensor.to_sparse),
    "sparse weights": ("topk_weights", torch.Tensor.to_sparse), "sparse out": ("out", torch.Tensor.to_sparse),
    "out of integers": ("out", torch.Tensor.int), "out of doubles": ("out", torch.Tensor.double),
    "out in one row": ("out", lambda out: out[:1].expand(3, 64)),
    "out in one column": ("out", lambda out: out[:, :1].expand(3, 64)),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_call_cannot_take_is_refused(backend: str) -> None:
    layer = _layer(backend)
    for repeated in (False, True):
        for name, (argument, change) in WRONG.items():
            given = _given()
            given[argument] = change(given[argument])
            with pytest.raises(LaunchError, match=argument):
                layer(given.pop("x"), **given)
                raise AssertionError(f"{name}, repeated {repeated}")
        for logits in ([[1.0] * 4] * 3, torch.ones(3, 4).to_sparse()):
            with pytest.raises(LaunchError, match="router_logits"):
                layer.forward_routed(_given()["x"], logits)
        for _ in range(2):
            layer(**_given())
            layer.forward_routed(_given()["x"], torch.ones(3, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_raises_instead_of_leaving_gradients_out(backend: str) -> None:
    layer = _layer(backend)
    want = layer(**_given())
    for name in ("x", "topk_weights"):
        given = _given()
        given[name].requires_grad_()
        got = layer(**given)
        assert torch.equal(got, want)
        with pytest.raises(LaunchError, match="no gradients"):
            got.float().sum().backward()
        with torch.no_grad():
            assert not layer(**given | {"out": None}).requires_grad
    routed = layer.forward_routed(_given()["x"], torch.ones(3, 4, requires_grad=True))
    with pytest.raises(LaunchError, match="no gradients"):
        routed.float().sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_pickle_after_they_were_used(backend: str) -> None:
    layer = _layer(backend)
    want = layer(**_given())
    copy = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copy(**_given()), want) and copy.routing == layer.routing
