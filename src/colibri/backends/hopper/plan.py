"""A problem and a number of tokens to a plan: tiles, launches, scratch memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from colibri.backends.base import Plan
from colibri.backends.hopper.layout import HopperLayout
from colibri.backends.hopper.workspace import pieces
from colibri.kernels.forms import E4M3, ROWS, Form
from colibri.layout import MatrixShape
from colibri.problem import FAST, Problem
from colibri.tune import hopper as tune
from colibri.tune.hopper import Rule, Tile

SMALL = 1024  # up to here one launch dispatches
_CHUNK = {False: 256, True: 1024}  # slots a program counts, by whether there are many
_READ_RATE, _TENSOR_RATE = 4.3e6, {False: 6.5e8, True: 1.2e9}  # bytes and flops in a microsecond


@dataclass(frozen=True)
class Product:
    """One matrix in kernel terms."""

    form: Form
    units: int
    slices: int
    scale_blocks: int
    tiles: tuple[Tile, ...]
    split: int = 1  # of K, when decoding


@dataclass(frozen=True)
class HopperPlan(Plan):
    """What `run` launches. `tokens` is the bucket: the plan serves every smaller batch of it too."""

    rule: Rule | None = None
    w13: Product | None = None
    w2: Product | None = None
    decode: bool = False  # a tile is a slot

    @property
    def slots(self) -> int:
        return self.tokens * self.problem.top_k


def make_plan(problem: Problem, tokens: int) -> HopperPlan:
    tokens = tune.bucket(max(tokens, 1))
    layout = HopperLayout(problem)
    assert problem.w2 is not None
    first, second = layout.form(problem.w13), layout.form(problem.w2)
    slots = tokens * problem.top_k
    rule = tune.rule(first.activations, slots, problem.experts)
    decode = tune.decodes(first.activations, slots) and problem.order == FAST and not problem.w13.act_order
    sizes = () if decode else rule.sizes
    plan = HopperPlan(
        problem,
        tokens,
        _estimate(problem, layout, slots),
        0,
        ("a tile for each slot" if decode else f"token tiles {'+'.join(map(str, sizes))}", first.name, second.name),
        rule,
        _product(layout, problem.w13, first, sizes, slots),
        _product(layout, problem.w2, second, sizes, slots),
        decode,
    )
    return replace(plan, workspace_bytes=pieces(scratch(plan))[1])


def _product(layout: HopperLayout, shape: MatrixShape, form: Form, sizes: tuple[int, ...], slots: int) -> Product:
    """Tiles for each size; none: a tile for each slot."""
    n, k = layout.padded(shape)
    units, slices = n // ROWS, k // form.slice_columns
    blocks = k // form.block_columns if form.block_columns else 1
    if not sizes:
        return Product(form, units, slices, blocks, (tune.decode_tile(form),), tune.split(slots, units))
    return Product(form, units, slices, blocks, tuple(tune.tile(form, size, layout.gated(shape)) for size in sizes))


def scratch(plan: HopperPlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every intermediate tensor."""
    problem, slots = plan.problem, plan.slots
    assert plan.w13 is not None and plan.w2 is not None and plan.rule is not None
    wide = problem.input.storage
    element = {True: torch.float8_e4m3fn, False: wide}
    narrow, narrow2 = plan.w13.form.activations == E4M3, plan.w2.form.activations == E4M3
    experts = experts_padded(problem)
    held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x": ((slots, problem.hidden), element[narrow]),
        "x_scales": ((slots,), torch.float32),
        "h": ((slots, problem.intermediate), wide),
        "y": ((slots, problem.w2.n if problem.w2 else 0), wide),
        "slots": ((slots,), torch.int32),
        "places": ((slots,), torch.int32),
        "tiles": ((list_capacity(plan) + 3 * experts, 4), torch.int32),
        "counts": ((16,), torch.int32),
        "counted": ((chunks(plan, slots), experts), torch.int32),
    }
    if plan.decode:
        for name, product in (("parts13", plan.w13), ("parts2", plan.w2)):
            held[name] = (slots * product.split, product.units * ROWS), torch.float32
    if narrow2:
        held["h8"] = (slots, problem.intermediate), torch.float8_e4m3fn
        held["h_scales"] = (slots,), torch.float32
    return held


def experts_padded(problem: Problem) -> int:
    """A power of two, and at least one for each of a block's 256 threads: Triton's scan traps on fewer."""
    return max(256, 1 << (problem.experts - 1).bit_length())


def list_capacity(plan: HopperPlan) -> int:
    """The most tiles of the first class: full ones, and one more for every expert."""
    assert plan.rule is not None
    return -(-plan.slots // plan.rule.sizes[0]) + experts_padded(plan.problem)


def chunk(plan: HopperPlan) -> int:
    return _CHUNK[plan.tokens > 4 * SMALL]


def chunks(plan: HopperPlan, slots: int) -> int:
    return -(-slots // chunk(plan))


def _estimate(problem: Problem, layout: HopperLayout, slots: int) -> float:
    """The floor: activated weights over the read rate, or flops over the tensor rate; and some launches."""
    activated = problem.experts * (1 - (1 - 1 / problem.experts) ** slots)
    loaded = activated * sum(layout.bytes(shape) for shape in problem.matrices.values())
    flops = 2 * slots * sum(shape.n * shape.k for shape in problem.matrices.values())
    narrow = layout.form(problem.w13).activations == E4M3
    return max(loaded / _READ_RATE, flops / _TENSOR_RATE[narrow]) + 10
