"""Matrices that are stored in 16 bits where that loses nothing, and computed with in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from lancebill.integrations.transformers.narrow_modules import keep_narrow


class Scaled(nn.Linear):
    """A subclass with a forward of its own computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def make_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(8, 4),
            "head": nn.Linear(4, 8, bias=False),
            "fine": nn.Linear(4, 4),
            "wide": nn.Linear(4, 4, dtype=torch.float64),
            "norm": nn.LayerNorm(4),
            "scaled": Scaled(4, 4),
        }
    )
    model["head"].weight = model["embedding"].weight
    with torch.no_grad():
        for name in ("embedding", "scaled"):
            model[name].weight.copy_(model[name].weight.bfloat16().float())
    return model


def test_matrices_are_narrow_where_that_loses_nothing() -> None:
    model, x = make_model(), torch.randn(3, 4)
    expected = [model["embedding"](torch.arange(8)), model["head"](x), model["fine"](x), model["scaled"](x)]
    assert keep_narrow(model, torch.bfloat16) == 8 * 4 * 2  # once, though two modules have the matrix
    dtypes = {name: module.weight.dtype for name, module in model.items()}
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert narrow == {"embedding", "head"} and dtypes["wide"] == torch.float64
    assert model["head"].weight is model["embedding"].weight
    found = [model["embedding"](torch.arange(8)), model["head"](x), model["fine"](x), model["scaled"](x)]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found, expected))
