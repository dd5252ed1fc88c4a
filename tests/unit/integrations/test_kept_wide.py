"""Modules in fp32 inside a model of 16 bits: every release of transformers, and every dtype."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))

import tiny  # noqa: E402

from lancebill.integrations.transformers.compare_modules import is_close  # noqa: E402
from lancebill.integrations.transformers.kept_wide import return_inputs_dtype  # noqa: E402

WIDTH = 8


class Norm(nn.Module):
    """As transformers 5.17 writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() / x.float().norm(dim=-1, keepdim=True)).to(x.dtype)


class Router(nn.Module):
    """Its logits are of fp32 on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_a_module_returns(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"norm": Norm(), "linear": nn.Linear(WIDTH, 4), "router": Router()})
    x = torch.randn(2, WIDTH).to(dtype)
    want = {name: module(x.float()) for name, module in model.items()}
    return_inputs_dtype(model, dtype)
    for name, module in model.items():
        made = module(x)
        assert made.dtype == (torch.float32 if name == "router" else dtype)
        torch.testing.assert_close(made.float(), want[name], atol=2e-2, rtol=2e-2)
        assert torch.equal(module(x.float()), want[name]), "rows of fp32 are as before"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_plain_model_of_transformers_computes(dtype: torch.dtype, tmp_path: Path) -> None:
    """As on a GPU, where norms are not replaced. transformers alone fails: 5.17 with both, 5.23 with fp16."""
    assert tiny.save_model(transformers, "deepseek_v4", tmp_path)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        want = load(tmp_path, dtype=torch.float32)(tokens).logits
        model = load(tmp_path, dtype=dtype)
        assert any(parameter.dtype == torch.float32 for parameter in model.parameters())
        return_inputs_dtype(model, dtype)
        got = model(tokens).logits
    assert got.dtype == dtype and (got.float() - want).norm() < 0.2 * want.norm()


def test_a_replacement_of_another_dtype_is_not_the_same() -> None:
    assert is_close(torch.ones(2), torch.ones(2)) and not is_close(torch.ones(2), torch.ones(2).bfloat16())
