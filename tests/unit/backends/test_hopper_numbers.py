"""How the roundings of the Hopper kernels compare with the reference's, modelled in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lancebill.moe.activation import Activation
from lancebill.numbers.activations import round_activations
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.layers import layer_problem, plausible_weight, worst_row

LAYER = layer_problem("mxfp4", "fp8", hidden=512, intermediate=512, experts=1, top_k=1)


def truncated(sums: Tensor, bits: int) -> Tensor:
    """Truncate every sum to `bits` bits below the leading bit of its row's largest sum."""
    unit = torch.exp2(torch.floor(torch.log2(sums.abs().amax(1, keepdim=True))) - bits)
    return torch.trunc(sums / unit) * unit


@pytest.mark.parametrize("kind", ["rounded to bf16", "summed in 14 bits"])
def test_other_roundings_of_hidden_rows_are_as_accurate(kind: str) -> None:
    """With slightly different hidden numbers, results are nearer to the reference than the reference is to the
    unquantised result, and as near to the unquantised result as the reference."""
    assert LAYER.w2 is not None
    first, second = (dequantize(plausible_weight(shape, i)).t() for i, shape in enumerate(LAYER.matrices.values()))
    x, fp8 = torch.randn(64, 512), ACTIVATIONS["fp8"]
    truth = Activation()(x @ first) @ second
    sums = round_activations(x, fp8) @ first
    reference = round_activations(Activation()(sums), fp8) @ second
    hidden = Activation()(sums).bfloat16().float() if kind == "rounded to bf16" else Activation()(truncated(sums, 13))
    ours = round_activations(hidden, fp8) @ second
    quantised = worst_row(reference, truth)
    assert 0.1 * quantised < worst_row(ours, reference) < quantised
    assert worst_row(ours, truth) < 1.2 * quantised
