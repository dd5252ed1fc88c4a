"""Plans of the Ampere backend: tiles and decode chunks for a problem, a number of tokens and a card. Pure functions."""

from __future__ import annotations

import math
from dataclasses import replace

from lancebill.backends.ampere import tiles
from lancebill.backends.ampere.tuning import policy as tune
from lancebill.backends.gpu.cards import Card, nearest_card
from lancebill.backends.gpu.chunks import cut
from lancebill.backends.gpu.kernels.weight_form import E4M3
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.plan import GemmPlan, GpuPlan, form_notes, gemm_plan, may_decode, scratch
from lancebill.backends.gpu.roofline import Efficiency, activated_experts, estimate_us
from lancebill.backends.gpu.target import compile_target
from lancebill.backends.gpu.tiles import Rule, Tile, bucket, power_of_two, reachable
from lancebill.backends.gpu.workspace import pieces
from lancebill.moe.device import Device
from lancebill.moe.problem import Problem

EMULATED = "fp8 inputs have run on an H200 only, which emulates mma.sync of fp8: their speed is not known"
_REACHED = Efficiency(memory=0.8, tensor=0.55, call_us=12)


def make_plan(
    problem: Problem, tokens: int, device: Device, tried: Rule | None = None, decode: bool | None = None
) -> GpuPlan:
    """The plan for a batch on a device. `tried` and `decode` override the tuning data."""
    tokens, layout, card = bucket(max(tokens, 1)), FragmentLayout(problem), nearest_card(device)
    processors = device.processors or card.processors
    gemms = [gemm_plan(layout, name) for name in problem.matrices]
    fp8 = any(gemm.form.activations == E4M3 for gemm in gemms)
    plan = GpuPlan(problem, tokens, 0.0, arch=compile_target(device.arch, fp8=fp8), graphed=tune.graphed(tokens))
    slots = plan.expected_slots
    # An expert has at most one row of a token. Tiles are padded to a power of two: smaller ones would save nothing.
    rule = reachable(tried or tune.rule(slots / problem.experts), power_of_two(tokens))
    if decode is None:
        decode = not any(gemm.byte_inputs for gemm in gemms) and tune.decodes(plan.slots) and may_decode(plan, layout)
    if decode:
        gemms = [_decoding(plan, gemm, card, processors) for gemm in gemms]
    else:
        gemms = [_grouped(plan, gemm, name, rule, card, processors) for gemm, name in zip(gemms, problem.matrices)]
    plan = replace(
        plan,
        estimate_us=estimate_us(layout, slots, card, _REACHED),
        notes=(
            "one tile per slot" if decode else f"token tiles {rule.tiles}",
            *form_notes([gemm.form for gemm in gemms]),
            *_pipelines(dict(zip(problem.matrices, gemms))),
            f"estimated for {card.name}",
            *(EMULATED for gemm in gemms[:1] if gemm.form.activations == E4M3),
        ),
        rule=rule,
        w13=gemms[0],
        w2=gemms[1] if problem.w2 is not None else None,
        decode=decode,
    )
    return replace(plan, workspace_bytes=pieces(scratch(plan))[1])


def _grouped(plan: GpuPlan, gemm: GemmPlan, name: str, rule: Rule, card: Card, processors: int) -> GemmPlan:
    """The GEMM with the tile sizes of each launch.

    With few experts there are few tiles. They take two units only if that leaves enough tiles for all SMs, and no more
    blocks share an SM's memory than it gets tiles.
    """
    problem, slots = plan.problem, plan.expected_slots
    each = gemm.units * max(activated_experts(problem, slots), slots / max(rule.sizes)) / processors
    paired = gemm.units % 2 == 0 and each / 2 >= tiles.PAIRED_BLOCKS
    gated, room, most = problem.is_gated(name), card.shared, math.ceil(each)
    made = tuple(tiles.tile(gemm.form, sizes, gated, gemm.slices, room, paired, most) for sizes in rule.launches)
    return replace(gemm, tiles=made)


def _decoding(plan: GpuPlan, gemm: GemmPlan, card: Card, processors: int) -> GemmPlan:
    """The GEMM with one tile per slot."""
    slots, tile = plan.expected_slots, tiles.decode_tile(gemm.form, gemm.slices, card.shared)
    stages, resident = -(-gemm.slices // tile.slices), tile.blocks * processors
    chunks = cut(slots * gemm.units, stages, resident, known=slots == plan.slots)
    return replace(gemm, each=chunks.stages, shares=chunks.shares, pieces=chunks.pieces, tiles=(tile,))


def _pipelines(gemms: dict[str, GemmPlan]) -> tuple[str, ...]:
    """The largest tile's pipeline of each GEMM, or that of all of them."""
    largest = {name: max(gemm.tiles, key=lambda tile: tile.sizes) for name, gemm in gemms.items()}
    texts = {name: _pipeline(tile) for name, tile in largest.items()}
    if len(set(texts.values())) == 1:
        return tuple(set(texts.values()))
    return tuple(f"{name}: {text}" for name, text in texts.items())


def _pipeline(tile: Tile) -> str:
    slices = "1 slice" if tile.slices == 1 else f"{tile.slices} slices"
    return f"{tile.stages} stages of {slices}, {tile.blocks} blocks per SM"
