"""Rows and their experts: routed uniformly, or with the reuse that real models show."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.moe.model_shapes import Shape
from lancebill.split.traces import REUSE, Reuse, make_trace

UNIFORM, RECENCY = "uniform", "recency"
APART = 25  # steps between two batches of a trace: in a model, other layers have evicted an expert by its next use


@dataclass(frozen=True)
class Batch:
    """A call: rows [M, H], ids and weights [M, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def reuse_of(shape: Shape) -> Reuse:
    """The measured reuse of as many experts, or of the nearest number, with its places in proportion."""
    nearest = min(REUSE.values(), key=lambda known: abs(known.experts - shape.experts))
    hits = tuple((places * shape.experts // nearest.experts, rate) for places, rate in nearest.hits)
    return Reuse(shape.experts, shape.top_k, hits)


def steps(shape: Shape, routing: str, tokens: int, count: int, seed: int = 0) -> list[list[tuple[int, ...]]]:
    """The experts of `tokens` sequences in each of `count` steps, one after the other."""
    if routing == UNIFORM:
        chosen = random.Random(seed)
        return [[tuple(chosen.sample(range(shape.experts), shape.top_k)) for _ in range(tokens)] for _ in range(count)]
    traces = [make_trace(reuse_of(shape), count, seed * 1000 + sequence) for sequence in range(tokens)]
    return [list(step) for step in zip(*traces)]


def batches(shape: Shape, routing: str, tokens: int, count: int, device: str, most: int | None = None) -> list[Batch]:
    """Calls with different rows; `most`: only the first experts are used."""
    apart = 1 if routing == UNIFORM else APART
    used = steps(shape, routing, tokens, count * apart, seed=tokens)[::apart]
    g = torch.Generator(device).manual_seed(tokens)
    made = []
    for each in used:
        ids = torch.tensor(each, dtype=torch.int32, device=device)
        if most is not None:
            ids = torch.rand(tokens, most, generator=g, device=device).topk(shape.top_k).indices.int()
        x = torch.randn(tokens, shape.hidden, generator=g, device=device).bfloat16()
        made.append(Batch(x, ids, torch.rand(tokens, shape.top_k, generator=g, device=device)))
    return made
