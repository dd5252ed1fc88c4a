"""A layer that does not exist yet, for engines that own the files: it takes tensors, and `finish` makes the layer.

Tensors come in any order, for one expert or for all, of this rank or not, from any device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Generic, TypeVar

from torch import Tensor

from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.manifest import LayerIndex, Manifest
from lancebill.checkpoint.resolve.naming import DOWN, GATE, Claim, NameForm, Naming
from lancebill.checkpoint.resolve.router_check import needed_roles
from lancebill.errors import DuplicateTensor, LancebillError, LaunchError, MissingTensor
from lancebill.formats import detect
from lancebill.formats.stored import Config, Stored
from lancebill.layer.arrivals import Arrivals
from lancebill.layer.check_tensors import check_stored
from lancebill.layer.collect import (
    ExpertCollector,
    check_expert,
    forget_refused,
    header_of,
    raise_missing,
    raise_together,
)
from lancebill.layer.parts import LayerParts, assemble
from lancebill.layer.recipe import LoadOptions, Recipe

# Without headers, a complete expert may still lack an optional tensor that is to come. So the first waits for a second
# (with stacked tensors: a layer for another layer), which shows what all of them have.
LOOKAHEAD = 2


class _Planned:
    """A layer whose headers are known: buffers are allocated, experts are packed as they become complete."""

    def __init__(self, recipe: Recipe, arrivals: Arrivals) -> None:
        self.packed = recipe.allocate()
        self.collector = ExpertCollector(recipe, recipe.plan.experts, arrivals)
        self.layout = recipe.layout
        self.host = None if recipe.host is None else _Planned(recipe.host, arrivals)  # experts in host memory

    waits = False

    @property
    def recipe(self) -> Recipe:
        return self.collector.recipe

    @property
    def settled(self) -> bool:
        return self.collector.settled and (self.host is None or self.host.settled)

    def push(self, claim: Claim, name: str, tensor: Tensor) -> _Planned:
        with ExitStack() as after:  # also after an error: it may be about other experts of the batch
            if self.host is not None:
                after.callback(forget_refused, self.collector, self.host.collector)
                after.callback(self.host.push, claim, name, tensor)
            self.collector.push(claim, name, tensor, self.packed, self.layout)
        return self

    def resume(self) -> _Planned:
        return self

    def planned(self) -> _Planned:
        return self

    def missing(self) -> list[MissingTensor]:
        return [*self.collector.missing(), *([] if self.host is None else self.host.missing())]

    def finish(self, router: Mapping[str, Tensor]) -> LayerParts:
        host = None if self.host is None else self.host.finish({})
        report = self.collector.finish(self.packed, self.layout)
        return assemble(self.recipe, self.packed, router, report, host)


class _Unplanned:
    """A layer whose headers are not known. It is planned from the tensors of its first complete experts, which are then
    pushed into the next stage.

    An expert counts as complete if it has everything that its format requires, and every optional tensor that any
    other expert has shown.
    """

    def __init__(self, config: Config, naming: Naming, index: int, options: LoadOptions, arrivals: Arrivals) -> None:
        self.config, self.naming, self.index, self.options = config, naming, index, options
        self.arrivals = arrivals
        self.format = detect(config)
        self.tensors: dict[str, tuple[Claim, Tensor]] = {}
        self.headers: dict[str, Stored] = {}
        self.suffixes: dict[tuple[int | None, str], set[str]] = defaultdict(set)  # by expert and stored projection
        self.all_suffixes: dict[bool, set[str]] = defaultdict(set)  # over all experts, of down and of gate and up
        self.ready: set[int | None] = set()
        self.count = naming.sizes(config.model).experts
        self.local = None if self.count is None else frozenset(options.placement.experts(self.count))

    def push(self, claim: Claim, name: str, tensor: Tensor) -> _Planned | _Unplanned:
        if name in self.headers:
            raise DuplicateTensor("this tensor was pushed before", where=name)
        check_expert(claim, name, self.count)
        self.headers[name] = header_of(name, tensor)
        form, parsed = self._parse(name)
        self.suffixes[claim.expert, parsed.projection].add(parsed.suffix)
        self.all_suffixes[parsed.projection == DOWN].add(parsed.suffix)
        if claim.expert is not None and self.local is not None and claim.expert not in self.local:
            return self
        self.tensors[name] = claim, tensor
        self.arrivals.note(tensor)
        if self.local is None or not self._is_complete(form, claim.expert):
            return self
        self.ready = {expert for expert in (*self.ready, claim.expert) if self._has_every_suffix(form, expert)}
        enough = claim.expert is not None and len(self.ready) >= min(LOOKAHEAD, len(self.local))
        return self._plan() if enough else self

    @property
    def waits(self) -> bool:
        return None in self.ready

    def resume(self) -> _Planned:
        return self._plan()

    def planned(self) -> _Planned:
        """No more tensors will come; raises naming whatever is missing."""
        manifest = LayerIndex(self.config, self.headers, self.naming, self.format).manifest(experts=self.local)
        manifest.check(where=f"layer {self.index}")
        return _Planned(Recipe.make(manifest, self.index, self.options, partial=True), self.arrivals)

    def _parse(self, name: str) -> tuple[NameForm, names.ParsedName]:
        return next((f, p) for f in self.naming.forms if (p := names.parse_name(f, name)) is not None)

    def _is_complete(self, form: NameForm, expert: int | None) -> bool:
        """Whether this expert (None: all experts, stacked) has every tensor that seems to exist."""
        if not self._has_every_suffix(form, expert):
            return False
        manifest = self._manifest(expert)
        layer = manifest.layers.get(self.index)
        if manifest.problems or layer is None:
            return False
        return not self.naming.biased or all("bias" in layer.sample(name).sources for name in (GATE, DOWN))

    def _has_every_suffix(self, form: NameForm, expert: int | None) -> bool:
        """Whether its projections have every suffix seen so far; gate and up have the same."""
        return all(self.suffixes.get((expert, name)) == self.all_suffixes[name == DOWN] for name in form.names)

    def _manifest(self, expert: int | None) -> Manifest:
        headers = {name: self.headers[name] for name, (claim, _) in self.tensors.items() if claim.expert == expert}
        chosen = self.local if expert is None else {expert}
        return LayerIndex(self.config, headers, self.naming, self.format).manifest(experts=chosen)

    def _plan(self) -> _Planned:
        manifest = self._manifest(next(iter(self.ready)))
        return _Planned(Recipe.make(manifest, self.index, self.options, partial=True), self.arrivals)


def missing_router(recipe: Recipe, pushed: Collection[str]) -> list[MissingTensor]:
    """What a layer that routes still needs of its router: what the checkpoint has, or what the config says it has."""
    routing, manifest, index = recipe.routing, recipe.manifest, recipe.plan.layer.index
    if routing is None:
        return []
    naming = manifest.naming
    if recipe.partial:
        roles = naming.router.roles
        needed = {role: " or ".join(roles.get(role, ())) for role in needed_roles(naming, routing)}
    else:
        needed = {role: name for name, role in naming.router.names(index).items() if name in manifest.tensors}
    return [
        MissingTensor(
            f"the router's {role} was never pushed",
            where=f"{naming.where(index)}, router",
            expected=name.format(layer=index),
            hint="router=False if the engine routes",
        )
        for role, name in needed.items()
        if role not in pushed
    ]


Made = TypeVar("Made")


class PushedLayer(Generic[Made]):
    """A layer in the making. An expert is packed, and its tensors released, as soon as the last of them comes.

    `source` is a resolved `Recipe`, or a config: then headers are not known, and the layer is planned from the tensors.
    Tensors are held, not copied, until their expert is packed: do not overwrite them before.
    """

    def __init__(
        self, make: Callable[[LayerParts], Made], source: Recipe | Config, index: int, options: LoadOptions
    ) -> None:
        self._make, self._router = make, dict[str, Tensor]()
        self._made: Made | None = None
        self._arrivals = Arrivals()
        self.begun = False  # whether a tensor was pushed
        self._stage: _Planned | _Unplanned
        self.index = index
        if isinstance(source, Recipe):
            self._naming = source.manifest.naming
            self._stage = _Planned(source, self._arrivals)
        else:
            self._naming = options.family(source.model)
            self._stage = _Unplanned(source, self._naming, index, options, self._arrivals)

    @property
    def settled(self) -> bool:
        """Whether every expert is packed and the router's tensors have come, so that `finish` succeeds."""
        stage = self._stage
        return isinstance(stage, _Planned) and stage.settled and not missing_router(stage.recipe, self._router)

    def claim(self, name: str) -> Claim | None:
        """What the tensor with this name is to this layer; None if it is another's."""
        claim = self._naming.claim(name)
        return claim if claim is not None and claim.layer == self.index else None

    def push(self, claim: Claim, name: str, tensor: Tensor) -> None:
        """Take a tensor that `claim` says is this layer's."""
        if self._made is not None:
            raise LaunchError("this layer is finished", where=name, hint="refit it with its own load_weights()")
        if claim.router is None:
            self._go_on(self._stage.push(claim, name, tensor))
        else:
            check_stored(name, tensor)
            self._arrivals.note(tensor)
            self._router[claim.router] = self._naming.router.own(name, tensor)
        self.begun = True

    @property
    def waits(self) -> bool:
        """Whether the layer seems complete but waits for `resume`: only another layer can show that it is."""
        return self._stage.waits

    def resume(self) -> None:
        """Pack what waits."""
        self._go_on(self._stage.resume())

    def _go_on(self, stage: _Planned | _Unplanned) -> None:
        """Make this the stage, with the tensors of the one before. Those that are refused may be pushed again."""
        before, self._stage = self._stage, stage
        if stage is before:
            return
        errors = []
        for name, (claim, tensor) in before.tensors.items() if isinstance(before, _Unplanned) else ():
            try:
                stage.push(claim, name, tensor)
            except LancebillError as error:
                errors.append(error)
        raise_together(errors, self.index)

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Push checkpoint tensors in any order; returns the names of the experts' tensors.

        The router's bias, correction bias and table are noted too, but are not in the set: the engine may need them.
        """
        return push_claimed(self.claim, self.push, pairs)

    def finish(self) -> Made:
        """The layer; raises naming whatever never came, which may still be pushed."""
        if self._made is None:
            planned = self._stage.planned()
            self._go_on(planned)
            missing = [*planned.missing(), *missing_router(planned.recipe, self._router)]
            raise_missing(missing, self.index)
            self._arrivals.wait(self._router.values())
            self._made = self._make(planned.finish(self._router))
        return self._made


def push_claimed(
    claim_of: Callable[[str], Claim | None],
    push: Callable[[Claim, str, Tensor], None],
    pairs: Iterable[tuple[str, Tensor]],
) -> set[str]:
    """Push the pairs that are claimed; returns the names of those that are experts'."""
    taken = set()
    for name, tensor in pairs:
        claim = claim_of(name)
        if claim is not None:
            push(claim, name, tensor)
            if claim.router is None:
                taken.add(name)
    return taken
