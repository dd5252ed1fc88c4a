"""The experts of a whole checkpoint whose layers may have several mixtures: `ModelExperts` for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.layer.model_experts import ModelExperts
from lancebill.layer.recipe import LoadOptions
from lancebill.split.split import parse_bytes

Mixtures = dict[str | None, ModelExperts]  # by name; None if layers have one mixture only


def mixtures_of(checkpoint: Checkpoint, options: LoadOptions) -> Mixtures:
    """The experts of every mixture; they share `gpu_memory` by their size."""
    names = [row.mixture for row in options.family(checkpoint.config.model).mixtures]
    if len(names) == 1 or options.gpu_memory is None:
        return _each(checkpoint, [(name, options) for name in names])
    whole = _each(checkpoint, [(name, options.whole()) for name in names])
    total, memory = sum(experts.bytes for experts in whole.values()), parse_bytes(options.gpu_memory)
    shares = [(name, replace(options, gpu_memory=memory * whole[name].bytes // total)) for name in names]
    return _each(checkpoint, shares)


def _each(checkpoint: Checkpoint, options: Iterable[tuple[str | None, LoadOptions]]) -> Mixtures:
    return {
        name: ModelExperts.from_checkpoint(checkpoint, options=replace(chosen, mixture=name))
        for name, chosen in options
    }
