"""Dense layers in vLLM without vLLM: which part of a module a rank holds, and the matrix made of such parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lancebill import QuantizedLinear
from lancebill.errors import UnsupportedProblem
from lancebill.integrations.vllm.other_weights import DequantizedTensor
from lancebill.integrations.vllm.shards import Load, RankPart, cut, dequantized, find_shard, joined
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight

HIDDEN, HEAD = 128, 16
QUERIES, KEYS = 8 * HEAD, 2 * HEAD
MODULES = {"q": QUERIES, "k": KEYS, "v": KEYS}


def weight(rows: int, spec: str, seed: int) -> LogicalWeight:
    values = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return quantize(values * (seed + 1), parse_spec(spec))


def column_loader(rank: int, ranks: int, at: int, rows: int) -> Load:
    """Like vLLM's loaders of merged projections: this rank's rows of a module, at their place."""

    def load(target: Tensor, whole: Tensor) -> None:
        share = rows // ranks
        target[at // ranks : at // ranks + share].copy_(whole[rank * share : (rank + 1) * share])

    return load


@pytest.mark.parametrize("spec", ["int4-g64", "int4-g32-zp", "fp8-block", "nvfp4", "fp8-channel", "nf4"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_projections(spec: str, ranks: int) -> None:
    weights = {name: weight(rows, spec, i) for i, (name, rows) in enumerate(MODULES.items())}
    total = sum(MODULES.values()) // ranks
    for rank in range(ranks):
        parts: dict[RankPart, LogicalWeight | Tensor] = {}
        expected, at = [], 0
        for name, rows in MODULES.items():
            part = find_shard(column_loader(rank, ranks, at, rows), (total, HIDDEN), (rows, HIDDEN))
            parts[part] = cut(weights[name], part)
            expected.append(dequantize(weights[name])[rank * rows // ranks : (rank + 1) * rows // ranks])
            at += rows
        whole = joined(dict(reversed(parts.items())), total)
        assert torch.equal(dequantize(whole), torch.cat(expected))
        plain = torch.empty(total, HIDDEN)
        dequantized(parts, plain)
        assert torch.equal(plain, torch.cat(expected))


@pytest.mark.parametrize("spec", ["int4-g64", "int4", "fp8-block"])
def test_divided_inputs(spec: str) -> None:
    whole = weight(64, spec, 3)
    for rank in range(4):

        def load(target: Tensor, numbers: Tensor, rank: int = rank) -> None:
            target.copy_(numbers[:, rank * 32 : (rank + 1) * 32])

        part = find_shard(load, (64, 32), (64, HIDDEN))
        assert torch.equal(dequantize(cut(whole, part)), dequantize(whole)[:, rank * 32 : (rank + 1) * 32])
    ordered = replace(whole, perm=torch.randperm(HIDDEN).to(torch.int32))
    with pytest.raises(UnsupportedProblem, match="act-order"):
        cut(ordered, part)


def test_what_does_not_fit_together_is_refused() -> None:
    first, second = (RankPart(at, (0, 32), (0, HIDDEN)) for at in (0, 32))
    one, other = weight(32, "int4-g64", 0), weight(32, "int4-g32", 1)
    for parts, words in (
        ({first: one}, "not all of its rows"),
        ({first: one, second: torch.zeros(32, HIDDEN)}, "not all of its rows"),
        ({first: one, second: other}, "quantised differently"),
        ({first: replace(one, inputs={"pre_quant_scale": torch.ones(HIDDEN)}), second: one}, "input differently"),
    ):
        with pytest.raises(UnsupportedProblem, match=words):
            joined(parts, 64)
    with pytest.raises(UnsupportedProblem, match="several pieces"):
        find_shard(lambda target, whole: target[::2].copy_(whole), (8, HIDDEN), (4, HIDDEN))  # type: ignore[arg-type, return-value]


def test_a_dequantised_tensor_is_plain_for_torch() -> None:
    stored = weight(32, "int4-g64", 0)
    made = DequantizedTensor.of(dequantize(stored), stored)
    assert made.stored is stored and type(made[:3]) is type(made + 1) is Tensor
    target = torch.zeros(32, HIDDEN)
    target.copy_(made)
    assert torch.equal(target, dequantize(stored))


def test_a_linear_is_refitted_in_place() -> None:
    one, other = weight(64, "int4-g32", 0), weight(64, "int4-g32", 1)
    linear = QuantizedLinear.from_weight(one, dtype=torch.float32)
    places = [tensor.data_ptr() for tensor in linear.packed["w13"].values()]
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(9))
    for current in (one, other, one):
        linear.refit(current)
        want = x @ dequantize(current).T
        assert (linear(x) - want).norm() <= 1e-5 * want.norm()
    assert [tensor.data_ptr() for tensor in linear.packed["w13"].values()] == places
