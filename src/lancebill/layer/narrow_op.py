"""Matrices in 16 bits as operands of opaque operators, for engines whose compiled graphs compute with them in fp32.

The matrix is an input of the graph, so a refit in place, or one that needs fp32, is seen by graphs compiled before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.backends.cpu.narrow_linear import narrow_linear as _multiply

_LIBRARY = torch.library.Library("lancebill", "FRAGMENT")


def _like_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _rows(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, weight).float()


def _like_rows(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1], dtype=torch.float32)


for _schema, _run, _fake in (
    ("narrow_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _multiply, _like_product),
    ("narrow_rows(Tensor ids, Tensor weight) -> Tensor", _rows, _like_rows),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"lancebill::{_name}", _fake, lib=_LIBRARY)

narrow_linear = torch.ops.lancebill.narrow_linear.default
narrow_rows = torch.ops.lancebill.narrow_rows.default
