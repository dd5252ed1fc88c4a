"""A layer with random weights, for engines that start without a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from lancebill.checkpoint.load.expert_weights import slot_rows
from lancebill.checkpoint.load.input_scales import PRE_SCALE, SCALE
from lancebill.checkpoint.load.slice_sizes import slices_of, step_for
from lancebill.layer.parts import LayerParts, assemble
from lancebill.layer.recipe import Recipe
from lancebill.moe.layout import W2, MatrixShape, Packed, as_integer
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.weight import LogicalWeight, stack_experts

LARGEST_INPUT = 4.0  # in standard deviations: statically quantised inputs are clamped there


def random_parts(recipe: Recipe, seed: int) -> LayerParts:
    """Random weights in the layout of the chosen backend, made on its device.

    An expert's weights depend on the seed, the layer and the expert, so every rank that holds it has the same.
    """
    host = None if recipe.host is None else random_parts(recipe.host, seed)
    start, packed, layout = time.perf_counter(), recipe.allocate(), recipe.layout
    experts, device = recipe.plan.experts, recipe.choice.device.torch
    for slots in slices_of(range(len(experts)), step_for(recipe.plan, device)):
        rows = slot_rows(packed, slice(slots[0], slots[-1] + 1))
        for number, (matrix, shape) in enumerate(recipe.choice.problem.matrices.items()):
            weights = [_random_matrix(recipe, shape, seed, experts[slot], number) for slot in slots]
            layout.pack(shape, stack_experts(weights), rows[matrix])
        recipe.advance(len(slots))
    _fill_inputs(recipe, packed)
    report = recipe.report(packed, time.perf_counter() - start, {}, layout.notes())
    return assemble(recipe, packed, _random_router(recipe, seed), report, host)


def _random_matrix(recipe: Recipe, shape: MatrixShape, seed: int, expert: int, number: int) -> LogicalWeight:
    plan, generator = recipe.plan, torch.Generator(recipe.choice.device.torch)
    generator.manual_seed(_mixed(seed, plan.layer.index, expert, number, plan.placement.tp_rank))
    bias = shape.bias and not (shape.name == W2 and plan.placement.tp_rank)  # the sum over ranks must add it once
    return random_weight(shape.spec, shape.n, shape.k, generator, bias=bias, act_order=shape.act_order)


def _mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % (1 << 63)
    return mixed


def _fill_inputs(recipe: Recipe, packed: Mapping[str, Packed]) -> None:
    """Input scales for inputs of variance one."""
    problem = recipe.choice.problem
    for matrix in problem.matrices:
        scale = LARGEST_INPUT / problem.inputs_of(matrix).spec.dtype.max
        for name, value in ((SCALE, scale), (PRE_SCALE, 1.0)):
            if name in packed[matrix]:
                buffer = packed[matrix][name]
                buffer.copy_(as_integer(torch.full(buffer.shape, value, dtype=torch.float32, device=buffer.device)))


def _random_router(recipe: Recipe, seed: int) -> dict[str, Tensor]:
    """What the routing needs besides logits: no correction, no bias, scales of 1, and a random table."""
    routing, layer, device = recipe.routing, recipe.plan.layer, recipe.choice.device.torch
    if routing is None:
        return {}
    roles = recipe.manifest.naming.router.roles
    used = {"bias", "correction"} if routing.correction else {"bias"}
    columns = layer.experts + routing.zero_experts
    router = {role: torch.zeros(columns, dtype=torch.float32, device=device) for role in roles if role in used}
    if routing.expert_scale:
        router["scale"] = torch.ones(layer.experts, dtype=torch.float32, device=device)
    vocabulary = recipe.manifest.config.model.get("vocab_size")
    if routing.hashed and isinstance(vocabulary, int):
        generator = torch.Generator(device).manual_seed(_mixed(seed, layer.index))
        first = torch.randint(layer.experts, (vocabulary, 1), generator=generator, dtype=torch.int32, device=device)
        router["table"] = (first + torch.arange(routing.top_k, dtype=torch.int32, device=device)) % layer.experts
    return router
