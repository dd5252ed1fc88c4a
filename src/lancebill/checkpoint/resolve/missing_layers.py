"""Find layers that a whole checkpoint lacks, and layers that its config does not have.

A manifest describes the layers it finds: a rank or a stage of a pipeline has only some of them. `verify`, `inspect` and
`from_pretrained` look at whole checkpoints, so for them a layer without tensors is an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.errors import CheckpointError, MissingTensor, UnexpectedTensor, ranges


def missing_layers(manifest: Manifest) -> Iterator[CheckpointError]:
    """An error for every gap in the layers, for layers beyond them, and for a layer with a router but without experts.

    The gaps follow from the layers that exist, so a huge number of layers in the config costs nothing.
    """
    present = {index for name in manifest.tensors if (index := manifest.naming.layer_of(name)) is not None}
    count = manifest.sizes.layers
    if count is not None:
        for first, last in _gaps(sorted(index for index in present if index < count), count):
            where = f"layer {first}" if first == last else f"layers {first} to {last}"
            yield MissingTensor("there are no tensors at all", where=where, expected=f"{count} layers")
        beyond = [index for index in present if index >= count + manifest.sizes.further_layers]
        if beyond:
            yield UnexpectedTensor(
                "the config has no such layers",
                where=f"layers {ranges(beyond)}",
                expected=f"{count} layers, and {manifest.sizes.further_layers} that predict further tokens",
                hint="an engine builds as many layers as the config says and drops or misplaces the others",
            )
    for one in manifest.mixtures:
        routed = {index for name in one.tensors if (index := one.naming.router.gate_layer(name)) is not None}
        for index in sorted(routed - set(one.layer_indices)):
            yield MissingTensor("the layer has a router but no experts", where=one.naming.where(index))


def _gaps(present: list[int], count: int) -> Iterator[tuple[int, int]]:
    """(first, last) of every run of numbers below `count` that is not in the sorted list."""
    start = 0
    for index in (*present, count):
        if index > start:
            yield start, index - 1
        start = index + 1
