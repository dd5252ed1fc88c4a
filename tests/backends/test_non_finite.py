"""Non-finite logits and inputs reach the output of their own token, and of no other, on every backend."""

from __future__ import annotations

import pytest
import torch

from lancebill.backends.oracle import select
from lancebill.backends.registry import registry
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.routing import SIGMOID, SOFTMAX, Routing
from lancebill.testing.layers import layer_problem, make_layer

CPU = Device("cpu")


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("activation", [Activation(), Activation("swigluoai", limit=7.0)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch-cpu", "cpu"])
def test_non_finite_logits_and_inputs_reach_their_own_row_only(
    backend: str, activation: Activation, activations: str
) -> None:
    problem = layer_problem(
        "mxfp4", activations, hidden=128, intermediate=64, experts=8, top_k=2, activation=activation
    )
    if reasons := list(registry()[backend].reasons(problem, CPU)):
        pytest.skip("; ".join(map(str, reasons)))
    weights = make_layer(problem, backend, distinct=2, device="cpu").weights
    g = torch.Generator().manual_seed(0)
    for scoring in (SOFTMAX, SIGMOID):
        layer = RoutedExperts(LayerParts(select(problem, CPU, backend), weights, Routing(2, scoring)))
        x, logits = torch.randn(6, 128, generator=g).bfloat16(), torch.randn(6, 8, generator=g)
        sound = layer.forward_routed(x, logits).clone()
        logits[1, 7], logits[2, 0] = torch.nan, -torch.nan
        x[3, 5], x[4, 127] = torch.nan, torch.inf
        out = layer.forward_routed(x, logits)
        assert sound.isfinite().all() and out[1:4].isnan().all() and not out[4].isfinite().any()
        assert torch.equal(out[[0, 5]], sound[[0, 5]])
