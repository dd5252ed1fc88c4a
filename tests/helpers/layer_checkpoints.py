"""Small checkpoints with two MoE layers, and inputs for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lancebill.checkpoint.resolve import naming as names
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.testing.checkpoints import Generated, Geometry, generate

SIZE = Geometry(experts=4, hidden=128, intermediate=256, layers=2, top_k=2)
ROWS = {row.family: row for row in names.TABLE}


def _example(fmt: str, part: str = "") -> Example:
    return next(e for e in registry()[fmt].examples() if part in e.name)


def make_checkpoint(
    fmt: str = "gptq", part: str = "", family: str = "qwen3_moe", form: int = 0, seed: int = 0, layers: int = 2
) -> Generated:
    row = ROWS[family]
    return generate(_example(fmt, part), row, row.forms[form], replace(SIZE, layers=layers), seed=seed)


def make_inputs(tokens: int = 9, seed: int = 0, experts: int = SIZE.experts) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SIZE.hidden, generator=g).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=g)[: SIZE.top_k] for _ in range(tokens)])
    return x, ids, torch.rand(tokens, SIZE.top_k, generator=g)
