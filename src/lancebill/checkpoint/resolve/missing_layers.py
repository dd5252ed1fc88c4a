"""Find layers that a whole checkpoint or a stream of tensors lacks, and layers that the config does not have.

A manifest describes the layers it finds: a rank or a stage of a pipeline has only some of them. `verify`, `inspect` and
`from_pretrained` look at whole checkpoints, so for them a layer without tensors is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lancebill.checkpoint.resolve.expert_sizes import config_sections
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.naming import Naming
from lancebill.errors import CheckpointError, MissingTensor, UnexpectedTensor, ranges

# Config keys that make later layers dense. The values below leave every layer sparse.
_UNEVEN = (
    "decoder_sparse_step", "mlp_only_layers", "mlp_layer_types", "interleave_moe_layer_step", "is_moe_layer",
    "moe_layers", "moe_layers_enum", "moe_layer_freq", "moe_layer_frequency", "moe_layer_interval",
    "moe_every_n_layers", "expert_layer_period", "hybrid_override_pattern", "layers_block_type",
)  # fmt: skip
_EVEN: tuple[object, ...] = (None, 0, 1, "", [])


def missing_layers(manifest: Manifest) -> Iterator[CheckpointError]:
    """An error for every gap in the layers, for layers beyond them, and for a layer with a router but without experts.

    The gaps follow from the layers that exist, so a huge number of layers in the config costs nothing.
    """
    present = {index for name in manifest.tensors if (index := manifest.naming.layer_of(name)) is not None}
    count = manifest.sizes.layers
    if count is not None:
        for where in _gaps({index for index in present if index < count}, 0, count):
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


def missing_between(
    model: Mapping[str, Any], naming: Naming, experts: Collection[int], others: Collection[int], gates: Collection[int]
) -> Iterator[CheckpointError]:
    """Errors for layers without experts in a stream that had experts, other tensors and gates of these layers.

    The stages of a pipeline have some layers each, without gaps. What is before the first layer and after the last is
    not missed.
    """
    count = naming.sizes(model).layers
    found = {index for index in experts if count is None or index < count}
    uneven = any(section.get(key) not in _EVEN for section in config_sections(model) for key in _UNEVEN)
    if found and (others or not uneven):  # of a stream of experts alone, only the config tells which layers have any
        first, last = min(found), max(found)
        for where in _gaps(found | {index for index in others if first < index < last}, first, last):
            yield MissingTensor("no tensor was pushed", where=where, hint="give layers= if they have no experts")
    for index in sorted(set(gates) - set(experts)):
        yield MissingTensor("a router was pushed but no experts", where=naming.where(index))


def _gaps(present: Collection[int], start: int, count: int) -> Iterator[str]:
    """Every run of numbers from `start` to before `count` that are not present."""
    for index in (*sorted(present), count):
        if index > start:
            yield f"layer {start}" if index == start + 1 else f"layers {start} to {index - 1}"
        start = index + 1
