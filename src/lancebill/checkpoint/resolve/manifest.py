"""The plan of a load, checked whole before a byte is allocated.

From headers, config, naming row and format follows, for every layer, expert and projection, which
stored tensor holds which part of it. Everything that is missing, unexpected, twice there, of the
wrong shape or dtype is found here, all of it at once, each problem naming layer, expert,
projection and tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import NameForm, Naming, Sizes
from lancebill.checkpoint.resolve.resolve_layer import LayerBuilder, Owned
from lancebill.checkpoint.resolve.stored_layer import Projection as Projection
from lancebill.checkpoint.resolve.stored_layer import StoredLayer as StoredLayer
from lancebill.checkpoint.resolve.stored_layer import StoredPart as StoredPart
from lancebill.errors import CheckpointError, CheckpointProblems, DuplicateTensor, MissingTensor, UnexpectedTensor
from lancebill.formats import detect
from lancebill.formats.base import Format
from lancebill.formats.stored import Config, Stored


@dataclass
class Manifest:
    """All layers of a checkpoint and everything that is wrong with them."""

    config: Config
    format: Format
    naming: Naming
    sizes: Sizes
    tensors: Mapping[str, Stored]
    layers: dict[int, StoredLayer] = field(default_factory=dict)
    problems: list[CheckpointError] = field(default_factory=list)
    expert_tensors: frozenset[str] = frozenset()
    found: tuple[int, ...] = ()  # layers that have experts, looked at or not

    def __deepcopy__(self, memo: object) -> Manifest:
        """Nothing changes once it is built: copies of a layer share it."""
        return self

    def check(self, where: str) -> None:
        """Raise everything that is wrong, together."""
        if self.problems:
            raise CheckpointProblems(self.problems, where=where)


def build(
    config: Config,
    tensors: Mapping[str, Stored],
    naming: Naming | None = None,
    *,
    layers: Container[int] | None = None,
    experts: Container[int] | None = None,
) -> Manifest:
    """Read names and headers once; nothing is loaded. Problems are collected, not raised.

    With `layers` only those are looked at: a large model has a hundred thousand tensors in others. With `experts` only
    those are looked for: what a rank that was sent its own share can check.
    """
    row = naming or names.find(config.model)
    manifest = Manifest(config, detect(config), row, names.sizes(config.model), tensors)
    form, claims = _claims(row, tensors)
    manifest.problems.extend(_strangers(form, claims, tensors))
    manifest.found = tuple(sorted(claims))
    if layers is not None:  # a layer that keeps its manifest need not keep the others' headers
        others = _owned({index: claims.pop(index) for index in manifest.found if index not in layers})
        manifest.tensors = {name: stored for name, stored in tensors.items() if name not in others}
    manifest.expert_tensors = _owned(claims)
    if not manifest.found:
        manifest.problems.append(
            MissingTensor(
                "no tensor is spelled like an expert's",
                where=f"naming '{row.family}'",
                expected=" or ".join(f.home + next(iter(f.names.values())) for f in row.forms),
                got=f"{len(tensors)} other tensors",
            )
        )
    for index in sorted(claims):
        builder = LayerBuilder(config, manifest.format, form, index, claims[index], tensors)
        layer = builder.build(experts)
        manifest.problems.extend(builder.problems)
        if layer is not None:
            manifest.layers[index] = layer
    return manifest


_Claims = dict[int, dict[tuple[int | None, str], Owned]]


def _claims(row: Naming, tensors: Iterable[str]) -> tuple[NameForm, _Claims]:
    """The form most tensors follow, and what it claims: one pattern match for each name."""
    best: tuple[int, NameForm, _Claims] = (-1, row.forms[0], {})
    for form in row.forms:
        found: _Claims = defaultdict(dict)
        count = 0
        for name in tensors:
            claim = names.claim(form, name)
            if claim is None:
                continue
            count += 1
            owned = found[claim.layer].setdefault((claim.expert, claim.projection), Owned(claim.prefix))
            owned.names.setdefault(claim.suffix, name)
        if count > best[0]:
            best = count, form, dict(found)
    return best[1], best[2]


def _owned(claims: _Claims) -> frozenset[str]:
    """The tensors of all experts of these layers."""
    return frozenset(name for layer in claims.values() for module in layer.values() for name in module.names.values())


def _strangers(form: NameForm, claims: _Claims, tensors: Iterable[str]) -> Iterable[CheckpointError]:
    """Tensors in the experts' territory that no projection owns, or that are there twice."""
    owned = _owned(claims)
    for name in tensors:
        if name in owned:
            continue
        claim = names.claim(form, name)
        if claim is not None:
            yield DuplicateTensor("stored twice under two spellings", where=name)
        elif form.exclusive and form.territory.fullmatch(name):
            yield UnexpectedTensor("below the experts but no projection's", where=name)
