"""Everything a layer is made of, as one value: loaders fill it in, the layer is built from it once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lancebill.backends.oracle import Choice
from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.staging import TensorSource
from lancebill.checkpoint.read.slices import Reader
from lancebill.layer.gpu_room import fitting
from lancebill.layer.recipe import Losses, Recipe
from lancebill.layer.report import LoadReport
from lancebill.moe.layout import Packed
from lancebill.moe.routing import Routing
from lancebill.split.host_calls import use_host_threads
from lancebill.split.host_threads import HostThreads
from lancebill.split.moves import OFF


@dataclass(frozen=True)
class LayerParts:
    """Weights in the layout of the chosen backend, and what is known of routing and of where they came from."""

    choice: Choice
    packed: Mapping[str, Packed]
    routing: Routing | None = None
    expert_map: Tensor | None = None  # slot of every global expert, -1 on other ranks; None: all are local, in order
    router: Mapping[str, Tensor] = field(default_factory=dict)  # by role: bias, correction, table
    report: LoadReport | None = None
    recipe: Recipe | None = None  # how tensors of the checkpoint become `packed`: needed to refit the layer
    host: LayerParts | None = None  # the experts in host memory, where the layer is split
    moves: str = OFF  # whether experts move between the two: then host memory has all of them


def pull(recipe: Recipe, read: Reader, *, source: TensorSource = TensorSource.FILES) -> LayerParts:
    """Load every local expert, with the router's tensors. `source`: where the tensors are that `read` returns."""
    host = None if recipe.host is None else pull(recipe.host, read)
    start, losses, packed = time.perf_counter(), Losses(), recipe.allocate()
    layout = recipe.layout
    manifest, index = recipe.manifest, recipe.plan.layer.index
    with fitting(f"layer {index}", recipe.plan.bytes(layout), recipe.choice.device.torch):
        load_layer(read, recipe.plan, layout, out=packed, losses=losses.add, progress=recipe.advance, source=source)
    roles, own = manifest.naming.router.names(index), manifest.naming.router.own
    router = {role: own(name, read(name, ())) for name, role in roles.items() if name in manifest.tensors}
    report = recipe.report(packed, time.perf_counter() - start, losses.held, layout.notes())
    return assemble(recipe, packed, router, report, host)


def assemble(
    recipe: Recipe,
    packed: Mapping[str, Packed],
    router: Mapping[str, Tensor],
    report: LoadReport | None,
    host: LayerParts | None = None,
) -> LayerParts:
    """Packed weights of a recipe with all that follows from its metadata.

    The layer keeps the recipe without `progress`: a progress bar cannot be copied or pickled.
    """
    if host is not None and recipe.options.cpu_threads is not None:
        use_host_threads(HostThreads.choose(recipe.options.cpu_threads))
    device, places = recipe.choice.device.torch, recipe.expert_map
    if report is not None and host is not None:
        report = replace(report, host=host.report)
    expert_map = None if places is None else torch.tensor(places, dtype=torch.int32, device=device)
    return LayerParts(
        recipe.choice,
        packed,
        recipe.routing,
        expert_map,
        {role: tensor.to(device) for role, tensor in router.items()},
        report,
        replace(recipe, options=replace(recipe.options, progress=None), host=None),
        host,
        OFF if host is None else recipe.options.moves,
    )
