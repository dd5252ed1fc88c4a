"""`ModelExperts`: the routed experts of all layers of a model, for engines that own the files or the model.

experts = ModelExperts(config, tensors=headers, device="cuda")
for name, tensor in stream:
    if not experts.push(name, tensor):
        ...  # the engine's own
layers = experts.finish()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import LayerIndex, Manifest
from lancebill.checkpoint.resolve.missing_layers import missing_between
from lancebill.checkpoint.resolve.naming import Claim
from lancebill.errors import CheckpointError, CheckpointProblems, LaunchError, MissingTensor, SpecError, ranges
from lancebill.formats.stored import Config, Stored
from lancebill.layer.gpu_room import check_room
from lancebill.layer.parts import pull
from lancebill.layer.push import LOOKAHEAD, PushedLayer
from lancebill.layer.random_layer import random_parts
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.split.split import parse_bytes, share_budget


class ModelExperts:
    """All layers of routed experts of one model on this rank. Headers are read once for all of them.

    A layer exists when it is complete: `layer` and `finish` return complete layers only. Until then tensors are pushed
    into it, and each expert is packed as soon as its last tensor comes. Later pushes refit the layers in place.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | Config,
        *,
        tensors: Mapping[str, Stored] | None = None,
        layers: Collection[int] | None = None,
        options: LoadOptions | None = None,
        **changes: Any,
    ) -> None:
        """`config` is the model's config.json; `tensors` are names and headers of the checkpoint, if known.

        `layers`: layers of this rank. Tensors of other layers are claimed and dropped. By default all layers in the
        headers or in the pushed names. Other arguments are the fields of `LoadOptions`;
        `gpu_memory` is for the experts of all layers together.
        """
        self.config = config if isinstance(config, Config) else config_of_model(config)
        self.options = replace(options or LoadOptions(), **changes).settled()
        self.naming = self.options.family(self.config.model)
        self.tensors = tensors
        if tensors is None and self.options.gpu_memory is not None:
            what = "how many experts fit into gpu_memory is not known without the headers"
            raise SpecError(what, hint="give tensors=, or gpu_experts= for each layer")
        self._wanted = None if layers is None else frozenset(layers)
        self._checkpoint: Checkpoint | None = None
        self._coming: dict[int, PushedLayer[RoutedExperts]] = {}
        self._made: dict[int, RoutedExperts] = {}
        self._recipes: dict[int, Recipe] = {}  # of layers that are not made yet
        self._others, self._gates = set[int](), set[int]()  # layers of other tensors, and of gates among them

    @classmethod
    def from_checkpoint(
        cls, path: str | Path | Checkpoint, *, layers: Collection[int] | None = None, **options: Any
    ) -> ModelExperts:
        """The experts of a checkpoint on disk: `layer` reads a layer when it is first asked for, `finish` reads all."""
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        experts = cls(checkpoint.config, tensors=checkpoint.headers, layers=layers, **options)
        experts._checkpoint = checkpoint
        return experts

    @cached_property
    def index(self) -> LayerIndex | None:
        """The checkpoint's expert tensors by layer; None if its headers are not known."""
        return None if self.tensors is None else LayerIndex(self.config, self.tensors, self.naming)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of this rank, as far as they are known."""
        if self._wanted is not None:
            return tuple(sorted(self._wanted))
        return tuple(sorted({*self._coming, *self._made})) if self.index is None else self.index.layers

    def manifest(self) -> Manifest:
        """All layers resolved and checked at once; raises every problem of the checkpoint."""
        manifest = self._known_index("all layers").manifest()
        manifest.check(self._where)
        return manifest

    def recipe(self, layer: int) -> Recipe:
        """What the headers decide about a layer: its problem, the chosen backend, its bytes. Reads no tensor."""
        if layer not in self._recipes:
            index = self._known_index(f"layer {layer}")
            self._recipes[layer] = Recipe.resolve(index, layer, self._options_of(layer), where=self._where)
        return self._recipes[layer]

    def _options_of(self, layer: int) -> LoadOptions:
        """The options of one layer: its share of the memory as a number of experts."""
        if self.options.gpu_memory is None:
            return self.options
        return replace(self.options, gpu_memory=None, gpu_experts=self._gpu_experts.get(layer, 0))

    @cached_property
    def _gpu_experts(self) -> dict[int, int]:
        """How many experts of each layer are on the device, where `gpu_memory` limits all layers together."""
        assert self.options.gpu_memory is not None
        index, whole = self._known_index("all layers"), self.options.whole()
        recipes = [Recipe.resolve(index, layer, whole, where=self._where) for layer in self.layers]
        counts = [len(recipe.plan.experts) for recipe in recipes]
        sizes = [(count, recipe.bytes // count) for count, recipe in zip(counts, recipes)]
        held = share_budget(parse_bytes(self.options.gpu_memory), sizes)
        if recipes:
            check_room(sum(number * each for number, (_, each) in zip(held, sizes)), recipes[0].choice.device)
        return dict(zip(self.layers, held))

    @cached_property
    def bytes(self) -> int:
        """Bytes of the packed weights of all layers on this rank: the total of all calls of `progress`."""
        return sum(self.recipe(layer).bytes for layer in self.layers)

    def fill_random(self, seed: int = 0) -> dict[int, RoutedExperts]:
        """Make the layers that do not exist yet with random weights; which layers have experts must be known.

        They can be refitted with tensors that have the headers that were given or that the config suggests.
        """
        if not self.layers:
            raise SpecError("which layers have experts is not known", hint="give layers=, or headers as tensors=")
        begun = [index for index, coming in self._coming.items() if coming.begun]
        if begun:  # their tensors would be lost
            what, hint = "tensors were pushed into these layers", "finish them, or fill_random first and push then"
            raise LaunchError(what, where=f"layers {ranges(begun)}", hint=hint)
        self._coming.clear()
        for index in [index for index in self.layers if index not in self._made]:
            recipe = Recipe.expected(self.config, index, self.options) if self.index is None else self.recipe(index)
            self._made[index] = RoutedExperts(random_parts(recipe, seed))
        return dict(self._made)

    def claim(self, name: str) -> Claim | None:
        """What the tensor with this name is: an expert's, the router's, or (None) neither."""
        return self.naming.claim(name)

    def push(self, name: str, tensor: Tensor) -> Claim | None:
        """Take the tensor if it is claimed. It may be on any device and is held until its expert is packed.

        The router's tensors are noted, but an engine that routes itself needs them too: see `Claim.router`.
        """
        claim = self.claim(name)
        if claim is None and self._infers:
            self._note(name)
        if claim is None or (self._wanted is not None and claim.layer not in self._wanted):
            return claim
        if claim.layer in self._made:
            self._made[claim.layer].push(claim, name, tensor)
            return claim
        coming = self._pushed(claim.layer)
        coming.push(claim, name, tensor)
        if coming.waits:
            self._resume_waiting()
        return claim

    def divert(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Take the experts' tensors out of a stream, and yield all others, the router's among them, as they come."""
        for name, tensor in pairs:
            claim = self.push(name, tensor)
            if claim is None or claim.router is not None:
                yield name, tensor

    @property
    def settled(self) -> bool:
        """Whether every layer is complete and no refit is in progress."""
        made = all(layer.settled for layer in self._made.values()) and not any(self._absent())
        return made and all(index in self._made or self._is_packed(index) for index in self.layers)

    def layer(self, layer: int) -> RoutedExperts:
        """The complete layer. It is read from the files if there are any; else raises naming what was not pushed."""
        if layer not in self._made:
            if self._checkpoint is not None and layer not in self._coming:
                self._made[layer] = RoutedExperts(pull(self.recipe(layer), self._checkpoint.read))
            else:
                self._made[layer] = self._pushed(layer).finish()
                del self._coming[layer]
            self._recipes.pop(layer, None)
        return self._made[layer]

    def finish(self) -> dict[int, RoutedExperts]:
        """All layers, complete; ends a load or a refit. Raises one error that names everything that is missing."""
        problems: list[CheckpointError] = []
        for index in self.layers:
            try:
                self.layer(index).finish()
            except CheckpointProblems as error:
                problems.extend(error.problems)  # type: ignore[arg-type]
            except CheckpointError as error:
                problems.append(error)
        problems.extend(self._absent())
        if problems:
            raise CheckpointProblems(problems, where=self._where)
        return dict(self._made)

    @property
    def _infers(self) -> bool:
        """Whether only the pushed names show which layers there are."""
        return self._wanted is None and self.index is None

    def _note(self, name: str) -> None:
        """A tensor that is not claimed still shows which layers there are."""
        layer, gate = self.naming.layer_of(name), self.naming.router.gate_layer(name)
        self._others |= set() if layer is None else {layer}
        self._gates |= set() if gate is None else {gate}

    def _absent(self) -> Iterator[CheckpointError]:
        """Layers without any pushed tensor, if `layers=` was not given."""
        if not self._infers:
            return
        if not self.layers:
            yield MissingTensor("no tensor of an expert was pushed", where=self._where)
        yield from missing_between(self.config.model, self.naming, self.layers, self._others, self._gates)

    def _known_index(self, where: str) -> LayerIndex:
        if self.index is None:
            raise MissingTensor("the headers of the checkpoint are not known", where=where, hint="give tensors=")
        return self.index

    def _resume_waiting(self) -> None:
        waiting = [layer for layer in self._coming.values() if layer.waits]
        if len(waiting) >= LOOKAHEAD:
            for layer in waiting:
                layer.resume()

    def _is_packed(self, layer: int) -> bool:
        return layer in self._coming and self._coming[layer].settled

    def _pushed(self, layer: int) -> PushedLayer[RoutedExperts]:
        """The layer in the making."""
        if layer not in self._coming:
            source = self.config if self.index is None else self.recipe(layer)
            self._coming[layer] = PushedLayer(RoutedExperts, source, layer, replace(self.options, naming=self.naming))
        return self._coming[layer]

    @property
    def _where(self) -> str:
        return self.config.source if self._checkpoint is None else str(self._checkpoint.path)
