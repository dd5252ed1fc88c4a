"""The manifest: where each part of each expert is stored, checked before anything is allocated.

Headers, config, naming row and format determine which stored tensor holds which part of every layer, expert and
projection. Missing, unexpected and duplicate tensors, wrong shapes and wrong dtypes are all collected in one pass;
each error names layer, expert, projection and tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.expert_sizes import ExpertSizes
from lancebill.checkpoint.resolve.naming import NameForm, Naming
from lancebill.checkpoint.resolve.resolve_layer import LayerBuilder, ModuleTensors
from lancebill.checkpoint.resolve.stored_layer import StoredLayer
from lancebill.errors import (
    BadValue,
    CheckpointError,
    CheckpointProblems,
    DuplicateTensor,
    MissingTensor,
    UnexpectedTensor,
)
from lancebill.formats import detect
from lancebill.formats.base import Format
from lancebill.formats.stored import Config, Stored


@dataclass
class Manifest:
    """All layers of a checkpoint, and every problem found in them."""

    config: Config
    format: Format
    naming: Naming
    sizes: ExpertSizes
    tensors: Mapping[str, Stored]
    layers: dict[int, StoredLayer] = field(default_factory=dict)
    problems: list[CheckpointError] = field(default_factory=list)
    expert_tensors: frozenset[str] = frozenset()
    layer_indices: tuple[int, ...] = ()  # all layers with experts, resolved or not
    beside: tuple[Manifest, ...] = ()  # other mixtures of the same layers; `expert_tensors` covers all mixtures

    @property
    def mixtures(self) -> tuple[Manifest, ...]:
        return (self, *self.beside)

    @property
    def stored_layers(self) -> tuple[StoredLayer, ...]:
        """The layers of all mixtures."""
        return tuple(layer for one in self.mixtures for layer in one.layers.values())

    def __deepcopy__(self, memo: object) -> Manifest:
        """A manifest does not change after `build`, so copies of a layer share it."""
        return self

    def check(self, where: str, allowed: tuple[type[CheckpointError], ...] = ()) -> None:
        """Raise all problems but those of an allowed kind, as one error."""
        found = (problem for one in self.mixtures for problem in one.problems)
        problems = [problem for problem in found if not isinstance(problem, allowed)]
        if problems:
            raise CheckpointProblems(problems, where=where)


def build(
    config: Config,
    tensors: Mapping[str, Stored],
    naming: Naming | None = None,
    *,
    layers: Container[int] | None = None,
    experts: Container[int] | None = None,
) -> Manifest:
    """Resolve names and headers; loads nothing. Problems are collected, not raised.

    `layers` limits the work to these layers, `experts` to these experts, for a rank that was sent only its own.
    """
    row = names.find_family(config.model) if naming is None else naming.numbered(config.model)
    return together(LayerIndex(config, tensors, one).manifest(layers, experts) for one in row.mixtures)


def together(mixtures: Iterable[Manifest]) -> Manifest:
    """The manifest of the first mixture of a checkpoint's layers, with the others beside it."""
    first, *others = mixtures
    held = first.expert_tensors.union(*(other.expert_tensors for other in others))
    return replace(first, expert_tensors=held, beside=tuple(replace(one, expert_tensors=held) for one in others))


class LayerIndex:
    """The expert tensors of a checkpoint, sorted by layer.

    Parsing a hundred thousand names takes a second, so it is done once. Each layer is resolved when it is needed.
    """

    def __init__(
        self, config: Config, tensors: Mapping[str, Stored], naming: Naming | None = None, fmt: Format | None = None
    ) -> None:
        self.config, self.tensors = config, tensors
        self.naming = naming or names.find_family(config.model)
        self.sizes = self.naming.sizes(config.model)
        self.format = fmt or detect(config)
        candidates = _modules_by_layer(self.naming, tensors, self.sizes)
        fitting = (one for one in candidates if self._resolves(*one)) if len(candidates) > 1 else iter(candidates)
        self.form, self._modules = next(fitting, candidates[0])
        self._rivals = [form for form, modules in candidates if form is not self.form and modules]
        self.layers = tuple(sorted(self._modules))
        expert_tensors = _tensor_names(self._modules)
        self._others = {name: stored for name, stored in tensors.items() if name not in expert_tensors}
        self._problems = tuple(self._general_problems())

    def manifest(self, layers: Container[int] | None = None, experts: Container[int] | None = None) -> Manifest:
        """The manifest of all layers, or of these, with the headers of these layers and of all other modules.

        A loaded layer keeps its manifest, so it should not hold the headers of other layers.
        """
        chosen = {index: self._modules[index] for index in self.layers if layers is None or index in layers}
        expert_tensors = _tensor_names(chosen)
        held = self.tensors if layers is None else self._others | {name: self.tensors[name] for name in expert_tensors}
        manifest = Manifest(
            self.config,
            self.format,
            self.naming,
            self.sizes,
            held,
            problems=list(self._problems),
            expert_tensors=expert_tensors,
            layer_indices=self.layers,
        )
        for index, modules in chosen.items():
            builder = LayerBuilder(
                self.config, self.format, self.naming, self.form, index, modules, self.tensors, rivals=self._rivals
            )
            layer = builder.build(experts)
            manifest.problems.extend(builder.problems)
            if layer is not None:
                manifest.layers[index] = layer
        manifest.problems.extend(_too_few_experts(manifest))
        return manifest

    def _resolves(self, form: NameForm, modules: _Modules) -> bool:
        """Whether there are layers, and the first has no problem with this form."""
        if not modules:
            return False
        index = min(modules)
        builder = LayerBuilder(self.config, self.format, self.naming, form, index, modules[index], self.tensors)
        return builder.build(None) is not None and not builder.problems

    def _general_problems(self) -> Iterable[CheckpointError]:
        """Errors that belong to no layer."""
        yield from _stray_tensors(self.form, (name for name in self._others if not self.naming.router.claim(name)))
        if not self.layers:
            yield MissingTensor(
                "no tensor name matches an expert of this family",
                where=f"naming '{self.naming.family}'" + (f", {self.naming.mixture}" if self.naming.mixture else ""),
                expected=" or ".join(f.home + next(iter(f.names.values())) for f in self.naming.forms),
                got=f"{len(self.tensors)} other tensors",
            )


def _too_few_experts(manifest: Manifest) -> Iterable[CheckpointError]:
    """An error if a token is routed to more experts than the smallest layer has."""
    top_k = manifest.sizes.top_k
    smallest = min(manifest.layers.values(), key=lambda layer: layer.experts, default=None)
    if top_k is not None and smallest is not None and top_k > smallest.experts:
        yield BadValue(
            "a token is routed to more experts than there are",
            where=smallest.where,
            expected=f"at most {smallest.experts} experts for each token",
            got=top_k,
        )


_Modules = dict[int, dict[tuple[int | None, str], ModuleTensors]]  # by layer, then by (expert, projection)


def _modules_by_layer(
    row: Naming, tensors: Mapping[str, Stored], sizes: ExpertSizes
) -> list[tuple[NameForm, _Modules]]:
    """The forms that match most tensor names, each with the expert modules it finds, the likeliest first.

    Forms may differ only in the orientation of stacked matrices. Shapes tell them apart, unless the format itself
    stores some matrices as [K, N].
    """
    found = [(form, *_modules_of(form, tensors)) for form in row.forms]
    most = max(count for _, count, _ in found)
    best = [(form, modules) for form, count, modules in found if count == most]
    return sorted(best, key=lambda one: not _is_oriented(one[0], one[1], tensors, sizes))


def _modules_of(form: NameForm, tensors: Iterable[str]) -> tuple[int, _Modules]:
    """The number of tensor names that match a form, and the expert modules they belong to."""
    modules: _Modules = defaultdict(dict)
    count = 0
    for name in tensors:
        parsed = names.parse_name(form, name)
        if parsed is None:
            continue
        count += 1
        key = parsed.expert, parsed.projection
        module = modules[parsed.layer].setdefault(key, ModuleTensors(parsed.prefix))
        module.names.setdefault(parsed.suffix, name)
    return count, dict(modules)


def _is_oriented(form: NameForm, modules: _Modules, tensors: Mapping[str, Stored], sizes: ExpertSizes) -> bool:
    """Whether all stacked matrices have the orientation of the form, [N, K] or [K, N]."""
    if not form.stacked or sizes.hidden is None or sizes.intermediate is None:
        return True
    for (_, stored), module in next(iter(modules.values()), {}).items():
        rows = sizes.intermediate * (2 if stored == names.GATE_UP else 1)
        shape = (sizes.hidden, sizes.intermediate) if stored == names.DOWN else (rows, sizes.hidden)
        other = shape if stored in form.transposed else shape[::-1]
        if shape != shape[::-1] and any(tensors[name].shape[1:] == other for name in module.names.values()):
            return False
    return True


def _tensor_names(modules: _Modules) -> frozenset[str]:
    """The names of all expert tensors of these layers."""
    return frozenset(name for layer in modules.values() for module in layer.values() for name in module.names.values())


def _stray_tensors(form: NameForm, others: Iterable[str]) -> Iterable[CheckpointError]:
    """Errors for tensors below the experts that belong to no projection or are duplicates."""
    for name in others:
        if names.parse_name(form, name) is not None:
            yield DuplicateTensor("the same part is stored under two names", where=name)
        elif form.exclusive and form.below_home.fullmatch(name) and not form.pattern.fullmatch(name):
            yield UnexpectedTensor("below the experts, but not a projection", where=name)
