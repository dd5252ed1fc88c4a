"""Layers from a checkpoint's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lancebill.backends import oracle
from lancebill.checkpoint.load.input_scales import FACTORS, allocate_inputs, product_inputs
from lancebill.checkpoint.load.load_experts import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.other_modules import find_module
from lancebill.formats import detect
from lancebill.layer.push import Pusher
from lancebill.layer.recipe import LoadOptions, Recipe, wide_inputs
from lancebill.layer.routed_experts import QuantizedLinear, RoutedExperts
from lancebill.layer.rules import activation_specs, weight_targets
from lancebill.moe.layout import W13, MatrixShape
from lancebill.moe.problem import Problem
from lancebill.numbers.codec import requantize
from lancebill.numbers.spec import QuantSpec


def from_checkpoint(path: str | Path | Checkpoint, layer: int, **options: Any) -> RoutedExperts:
    """The routed experts of `layer`, with the router's bias, correction bias and hash table.

    Options: device, placement, backend, weights, activations, dtype (of the inputs), order, naming,
    routing, progress. `weights` and `activations` take a spec, a spec for each matrix, or rules by
    layer; activations="checkpoint" follows what the checkpoint declares.
    """
    wanted = LoadOptions(**options)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    manifest = manifests.build(checkpoint.config, checkpoint.headers, wanted.naming, layers=(layer,))
    manifest.check(where=str(checkpoint.path))
    recipe = Recipe.make(manifest, layer, wanted)
    made = recipe.pull(checkpoint.read)
    made.pusher = Pusher(made, checkpoint.config, layer, wanted, recipe)
    return made


def linear_from_checkpoint(
    path: str | Path | Checkpoint,
    module: str,
    *,
    device: str = "cpu",
    backend: str = oracle.AUTO,
    weights: str | QuantSpec | None = None,
    activations: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedLinear:
    """Any linear module of a checkpoint, by its name, through the same backends."""
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    found = find_module(checkpoint.config, checkpoint.headers, checkpoint.read, module)
    weight = load_projection(checkpoint.read, found)
    target = weight_targets(weights, 0).get("w13")
    if target is not None:
        weight, _ = requantize(weight, target)
    shape = MatrixShape(W13, weight.n, weight.k, weight.spec, weight.bias is not None, weight.perm is not None)
    wide = wide_inputs(dtype)
    spec = activation_specs(activations, 0).get("w13", wide)
    if spec is None:
        spec = detect(checkpoint.config).activations(checkpoint.config, found.as_module(checkpoint.headers)) or wide
    problem = Problem(
        shape,
        None,
        experts=1,
        global_experts=1,
        top_k=1,
        input=wide.spec.dtype,
        activations=spec,
        pre_scale=FACTORS in found.sources,
    )
    choice = oracle.select(problem, device, backend)
    layout = choice.backend.layout(problem)
    inputs = allocate_inputs(found.sources, spec, shape.k, 1, choice.device.torch, module)
    packed = {**layout.allocate(shape, 1, choice.device.torch), **inputs}
    rows = {name: t[0] for name, t in packed.items()}
    layout.pack(shape, weight, rows)
    product_inputs([weight.inputs]).write(rows)
    linear = QuantizedLinear()
    linear.adopt(choice, {"w13": packed})
    return linear
