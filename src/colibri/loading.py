"""Layers from a checkpoint's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from colibri import oracle
from colibri.checkpoint import manifest as manifests
from colibri.checkpoint.files import Checkpoint
from colibri.checkpoint.load import load_projection
from colibri.checkpoint.others import find_module
from colibri.codec import requantize
from colibri.errors import MissingTensor
from colibri.layer import QuantizedLinear, RoutedExperts
from colibri.layout import MatrixShape, as_integer
from colibri.problem import Problem, parse_device
from colibri.push import Pusher
from colibri.quant import QuantSpec
from colibri.recipe import WIDE, Options, Recipe
from colibri.rules import activation_specs, weight_targets


def from_checkpoint(path: str | Path | Checkpoint, layer: int, **options: Any) -> RoutedExperts:
    """The routed experts of `layer`, with the router's bias, correction bias and hash table.

    Options: device, placement, backend, weights, activations, dtype (of the inputs), order, naming,
    routing, progress. `weights` and `activations` take a spec, a spec for each matrix, or rules by
    layer; activations="checkpoint" follows what the checkpoint declares.
    """
    wanted = Options(**options)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    headers = {name: info.stored for name, info in checkpoint.tensors.items()}
    manifest = manifests.build(checkpoint.config, headers, wanted.naming)
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
    headers = {name: info.stored for name, info in checkpoint.tensors.items()}
    weight = load_projection(checkpoint.read, find_module(checkpoint.config, headers, checkpoint.read, module))
    target = weight_targets(weights, 0).get("w13")
    if target is not None:
        weight, _ = requantize(weight, target)
    shape = MatrixShape(weight.n, weight.k, weight.spec, weight.bias is not None, weight.perm is not None)
    wide = WIDE[dtype]
    spec = activation_specs(activations, 0).get("w13") or wide
    problem = Problem(shape, None, experts=1, global_experts=1, top_k=1, input=wide.spec.dtype, activations=spec)
    choice = oracle.select(problem, parse_device(device), backend)
    layout = choice.backend.layout(problem)
    packed = layout.allocate(shape, 1, choice.device.torch)
    layout.pack(shape, weight, {name: t[0] for name, t in packed.items()})
    if spec.static:
        scale = weight.inputs.get("input_scale")
        if scale is None:
            raise MissingTensor(f"{spec} activations need an input scale", where=module)
        packed["input_scale"] = as_integer(scale.float().reshape(1)).to(choice.device.torch)
    linear = QuantizedLinear()
    linear.adopt(choice, {"w13": packed})
    return linear
