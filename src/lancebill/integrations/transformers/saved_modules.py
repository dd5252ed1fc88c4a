"""What a checkpoint must store of a model that was requantised while it was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.other_modules import OtherModule, find_module
from lancebill.checkpoint.write.rest import RestModule
from lancebill.checkpoint.write.target import ALIASES, Target, choose_target
from lancebill.errors import CannotEncode, MissingTensor
from lancebill.integrations.transformers.packed_rest import RestReport
from lancebill.numbers.codec import recasts


def is_stored_as(checkpoint: Checkpoint, format: str) -> bool:
    """Whether this is the format of the checkpoint itself."""
    return manifests.build(checkpoint.config, checkpoint.headers).format.name == ALIASES.get(format, format)


def target_as_stored(checkpoint: Checkpoint, format: str | None) -> Target:
    """The target for experts that keep their stored numbers, in another format or beside modules that do not."""
    manifest = manifests.build(checkpoint.config, checkpoint.headers)
    schemes = {p.scheme for layer in manifest.layers.values() for p in layer.projections.values()}
    specs = {scheme.spec for scheme in schemes}
    if len(specs) != 1 or any(scheme.act_order for scheme in schemes):
        got = "experts with an act-order" if len(specs) == 1 else f"experts of {len(specs)} specs"
        raise CannotEncode("experts with such numbers can only be saved as they are stored", got=got)
    spec = specs.pop()
    target = choose_target(spec, format)
    if not recasts(spec, target.spec):
        raise CannotEncode("this format would round the experts", where=target.format.name, got=spec)
    return target


def rest_modules(model: Any, checkpoint: Checkpoint, rest: RestReport, dtype: torch.dtype) -> Iterator[RestModule]:
    """The packed modules outside the experts, each with its tensors in the checkpoint."""
    for name, spec in rest.specs.items():
        found = _find(checkpoint, name)
        tied = _tied_to(model, name) if found is None else None
        if tied is not None:
            source = _find(checkpoint, tied)
            found = None if source is None else replace(source, module=name)
        if found is not None:
            yield RestModule(found, spec, dtype, tied is not None)
        elif name in rest.requantized:
            raise CannotEncode("the checkpoint has another name for this module, which was requantised", where=name)


def _find(checkpoint: Checkpoint, name: str) -> OtherModule | None:
    try:
        return find_module(checkpoint.config, checkpoint.headers, checkpoint.read, name)
    except MissingTensor:
        return None


def _tied_to(model: Any, name: str) -> str | None:
    """The embedding, if the module is an output matrix that the checkpoint stores only there."""
    modules = dict(model.named_modules())
    if name not in modules or modules[name] is not model.get_output_embeddings():
        return None
    return next(other for other, module in modules.items() if module is model.get_input_embeddings())
