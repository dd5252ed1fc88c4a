"""What lancebill takes of one vLLM model on this rank: decides layer by layer, then takes the layers' tensors.

vLLM builds a model layer by layer, loads it through the model's `load_weights`, and may load it again later (a refit).
The layers live here, outside vLLM's module tree: vLLM's reload moves every parameter in the tree to the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lancebill.backends.base import Reason, Speed
from lancebill.backends.oracle import AUTO, Choice
from lancebill.errors import (
    CheckpointError,
    CheckpointProblems,
    LancebillError,
    LaunchError,
    UnsupportedProblem,
    ranges,
)
from lancebill.formats.stored import Config, Stored
from lancebill.integrations.vllm.module_names import why_no_layer
from lancebill.integrations.vllm.other_weights import OtherWeights
from lancebill.integrations.vllm.settings import REQUIRE, Settings
from lancebill.layer.model_experts import ModelExperts
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.reserve import reserve
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.placement import Placement
from lancebill.moe.problem import INDEXED
from lancebill.numbers.torch_defaults import torch_defaults
from lancebill.split.host_threads import HostThreads


@dataclass(frozen=True)
class Decision:
    """Whether a layer is taken, and who computes it, or why not."""

    taken: bool
    text: str


@dataclass(frozen=True)
class Source:
    """A model's checkpoint as far as metadata goes; `headers` are None where there are no files."""

    path: str
    config: Config
    headers: dict[str, Stored] | None


class Takeover:
    """The routed experts of one model that lancebill computes."""

    def __init__(self, settings: Settings, source: Source, *, random: bool, copies: bool) -> None:
        """`random`: there will be no weights to load. `copies`: the loader reuses the memory of its tensors."""
        self.settings, self.source = settings, source
        self.random, self.copies = random, copies
        self.decisions: dict[int, Decision] = {}
        self.layers: dict[int, RoutedExperts] = {}
        self.unnumbered: dict[str, str] = {}  # modules left to vLLM as no layer that the checkpoint numbers, and why
        self._names = sorted(source.headers or ())
        self.others: OtherWeights | None = None  # set where vLLM's layers are plain and the checkpoint's are not
        self._maps: dict[int, Tensor] = {}  # expert maps, outside of vLLM's memory pool
        self._experts: ModelExperts | None = None
        self._reserved = False
        self._ignored: str | None = None  # a setting without an effect
        self._refused: dict[int, CheckpointError] = {}  # by layer, what cannot be refitted

    @property
    def taken(self) -> list[int]:
        """The layers that lancebill computes."""
        return [index for index, decision in self.decisions.items() if decision.taken]

    @property
    def holds_weights(self) -> bool:
        """Whether some weights are no parameters of vLLM's: experts, or dense layers that stay packed."""
        packed = self.others is not None and self.others.keep and bool(self.others.modules)
        return packed or bool(self.taken)

    def decide(self, index: int, options: LoadOptions, refusals: Iterable[Reason], form: str = INDEXED) -> Decision:
        """Whether to take layer `index`. A layer that must be taken and cannot be is an error.

        `form` is how vLLM will bring rows to the layer.
        """
        with torch_defaults():
            decision = self._decide(index, self._with_settings(options), tuple(refusals), form)
        why = self.settings.must_take(parse_device(options.device).kind)
        if why is not None and not decision.taken:
            raise UnsupportedProblem(decision.text, where=f"{self.source.path}, layer {index}", hint=why)
        self.decisions[index] = decision
        return decision

    def quantises(self, index: int) -> bool:
        """Whether it is said here or in the checkpoint how layer `index` is quantised, not only by vLLM's options."""
        return self.source.config.method is not None or self.settings.requantises(index)

    def leaves(self, name: str, device: str) -> bool:
        """Whether the experts in a module are no layer that the checkpoint numbers, and are left to vLLM therefore.

        An error if none on this device may be left.
        """
        what = why_no_layer(name, self.source.config.model, self._names)
        if what is None or not self.settings.takes_any:
            return False
        why = self.settings.must_take(device)
        if why is not None:
            raise UnsupportedProblem(what, where=f"{self.source.path}, {name}", hint=why)
        self.unnumbered[name] = what
        return True

    def experts(self) -> ModelExperts:
        if self._experts is None:
            raise LaunchError("no layer of this model was offered to lancebill", where=self.source.path)
        return self._experts

    def divert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Take the experts' tensors out of a stream; yields what vLLM loads itself."""
        for name, tensor in self._others(weights):
            claim = None if self._experts is None else self._experts.claim(name)
            if claim is None or claim.router is not None:
                yield name, tensor
            elif claim.layer not in self.decisions:
                if self.unnumbered:
                    yield name, tensor  # may belong to a layer that we left to vLLM
                continue  # else it belongs to another pipeline stage, or to a layer that this model lacks
            elif not self.decisions[claim.layer].taken:
                yield name, tensor
            else:
                self._push(claim.layer, name, tensor)

    def _push(self, index: int, name: str, tensor: Tensor) -> None:
        """In a refit, an error waits for the end: vLLM's own layers would be left half reloaded."""
        if index in self._refused:
            return
        try:
            with torch_defaults():
                self.experts().push(name, tensor.clone() if self.copies else tensor)
        except CheckpointError as error:
            if index not in self.layers:
                raise
            self._refused[index] = error

    def end_stream(self, *, more: bool) -> None:
        """After a stream: end the refit of every layer that is whole. The first load ends in `finish`.

        `more`: vLLM will say when its reload ends, and errors wait for that.
        """
        if self._refused and not more:
            self.end_reload()
        with torch_defaults():
            for index, layer in self.layers.items():
                if layer.settled and index not in self._refused:
                    layer.finish()
                    self._restore_map(index, layer)

    def end_reload(self) -> None:
        """Raise what was refused and what did not come. These refits are dropped: a later one may start anew."""
        problems: list[CheckpointError] = []
        for index, layer in self.layers.items():
            refused = self._refused.get(index)
            problems.extend(layer.missing() if refused is None else [refused])
        self.drop_refits()
        if problems:
            raise CheckpointProblems(problems, where=f"{self.source.path}: the reload is not complete")

    def drop_refits(self) -> None:
        """Forget the refits that did not end."""
        with torch_defaults():
            for index, layer in self.layers.items():
                if index in self._refused or not layer.settled:
                    layer.drop_refit()
        self._refused.clear()

    def takes(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is packed here: an expert's, or a quantised module's."""
        claim = None if self._experts is None else self._experts.claim(name)
        taken = claim is not None and claim.router is None and claim.layer in self.taken
        return taken or (self.others is not None and self.others.owns(name))

    def finish(self, index: int) -> RoutedExperts:
        """The layer, complete; raises naming what was not loaded."""
        with torch_defaults():
            if index not in self.layers:
                if self.random:
                    self._fill()
                self.layers[index] = self.experts().layer(index)
            layer = self.layers[index]
            if layer.expert_map is not None:
                self._maps.setdefault(index, layer.expert_map.to("cpu", copy=True))
            return layer

    def reserve(self, max_tokens: int) -> int:
        """One workspace for the captured calls of all layers, once the last of them is loaded; returns its bytes."""
        if self._reserved or any(index not in self.layers for index in self.taken):
            return 0
        self._reserved = True
        return reserve(nn.ModuleList(self.layers.values()), max_tokens)

    def hold(self, index: int, experts: tuple[int, ...]) -> None:
        """vLLM moved experts: `experts` are in the layer's slots now, for later pushes."""
        layer = self.layers[index]
        if layer.held_experts == experts:
            return
        if not layer.settled:
            raise LaunchError("vLLM moved experts of a layer that is being refitted", where=f"layer {index}")
        layer.hold(experts)

    def place(self, index: int, expert_map: Sequence[int]) -> None:
        """The number of ranks changed (elastic expert parallelism): `expert_map` has the slot of each physical id."""
        layer = self.layers[index]
        with torch_defaults():
            layer.rehome(layer.packed, layer.held_experts, expert_map)
            self._maps[index] = torch.tensor(expert_map, dtype=torch.int32, device="cpu")
        self._reserved = False

    def movable(self, index: int) -> list[Tensor]:
        """The bytes of each local expert, input scales included, for vLLM's load balancing: [E, -1] views.

        vLLM moves the experts of all layers through the buffers of one, so all layers must be packed alike.
        """
        layer, first = self.layers[index], next(iter(self.layers.values()))
        numbers = [other for other, decision in self.decisions.items() if not decision.taken]
        left = [f"layers {ranges(numbers)}"] * bool(numbers) + list(self.unnumbered)
        if left or layer.layout_signature() != first.layout_signature():
            raise UnsupportedProblem(
                "vLLM's load balancing needs all layers packed alike",
                where=f"layer {index}",
                got=f"{' and '.join(left)} are vLLM's" if left else "other tensors than the first layer's",
            )
        return [rows.view(torch.uint8) for rows in (*layer.expert_weights(), *layer.expert_inputs())]

    def summary(self) -> str:
        """Who computes what, as one line: layers with the same answer together."""
        groups: dict[str, list[int]] = {}
        for index, decision in sorted(self.decisions.items()):
            groups.setdefault(decision.text, []).append(index)
        numbered = [f"layers {ranges(layers)}: {text}" for text, layers in groups.items()]
        left = [f"{name}: vLLM ({why})" for name, why in self.unnumbered.items()]
        ignored = [] if self._ignored is None else [f"{self._ignored} is ignored: a CPU computes all experts"]
        return "; ".join([*numbered, *left, *ignored])

    def _restore_map(self, index: int, layer: RoutedExperts) -> None:
        """vLLM's sleep mode (level 2) drops the memory of everything that was allocated while loading."""
        if layer.moves is not None and layer.moves.restore():
            return
        if layer.expert_map is not None:
            layer.expert_map.copy_(self._maps[index])

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return weights if self.others is None else self.others.plain(weights)

    def _with_settings(self, options: LoadOptions) -> LoadOptions:
        s = self.settings
        changed = replace(
            options, backend=s.backend, weights=s.weights, activations=s.activations, order=s.order, router=False
        )
        limit = s.gpu_limit
        if limit is None:
            return changed
        if not may_split(options):
            self._ignored = limit
            return changed
        threads = s.cpu_threads or shared_threads(options.placement)
        return replace(changed, gpu_memory=s.gpu_memory, gpu_experts=s.gpu_experts, moves=s.moves, cpu_threads=threads)

    def _decide(self, index: int, options: LoadOptions, refusals: tuple[Reason, ...], form: str) -> Decision:
        if not self.settings.takes_any:
            return Decision(False, "vLLM (mode: off)")
        if not self.settings.names(index):
            return Decision(False, "vLLM (no rule names them)")
        if refusals:
            return Decision(False, "vLLM (" + "; ".join(map(str, refusals)) + ")")
        try:
            recipe = self._recipe(index, options)
        except LancebillError as error:
            return Decision(False, f"vLLM ({error.render()})")
        choice = recipe.choice
        if self.settings.backend == AUTO and choice.backend.speed is Speed.DEFINITION:
            return Decision(False, f"vLLM (no fast backend of lancebill)\n{choice.table()}")
        if self._is_slower(choice):
            name = choice.backend.name
            hint = f'"weights" quantises them, "backend": "{name}" takes them as they are'
            return Decision(False, f"vLLM (unquantised experts, in which {name} is slower than vLLM; {hint})")
        if recipe.host is not None and form != INDEXED:
            return Decision(False, f"vLLM (experts in host memory, and {form} dispatch)")
        unable = list(choice.backend.reasons(replace(choice.problem, dispatch=form), choice.device))
        if unable:
            return Decision(False, f"vLLM ({form} dispatch: " + "; ".join(map(str, unable)) + ")")
        return Decision(True, _described(recipe, choice))

    def _is_slower(self, choice: Choice) -> bool:
        """Whether vLLM computes this layer faster, where it may be left.

        It may not be able to in checkpoints with a section about quantisation, even if the experts are plain in them.
        """
        asked = self.settings.backend != AUTO or self.settings.mode == REQUIRE
        return not asked and self.source.config.method is None and not choice.beats_plain

    def _recipe(self, index: int, options: LoadOptions) -> Recipe:
        if self._experts is None:
            self._experts = ModelExperts(self.source.config, tensors=self.source.headers, options=options)
        elif self._experts.options != options:
            raise UnsupportedProblem("layers of one model are configured differently", where=f"layer {index}")
        if self.source.headers is not None:
            return self._experts.recipe(index)
        return Recipe.expected(self._experts.config, index, options)

    def _fill(self) -> None:
        """Random weights for all taken layers."""
        known, taken = self.experts(), self.taken
        self._experts = ModelExperts(known.config, tensors=known.tensors, layers=taken, options=known.options)
        self.layers.update(self._experts.fill_random())


class Diverted:
    """Marks vLLM's model classes that hand expert tensors to us."""

    lancebill_takeover: Takeover | None = None


def takeover_of(model: object) -> Takeover | None:
    """What lancebill took of a model of vLLM's."""
    return model.lancebill_takeover if isinstance(model, Diverted) else None


def may_split(options: LoadOptions) -> bool:
    """Whether experts may be in two places: a CPU has the memory of all."""
    return parse_device(options.device).kind != "cpu"


def shared_threads(placement: Placement) -> int | None:
    """The threads of a rank that shares the CPU with others: each has a pool of its own. None: it is alone."""
    ranks = min(placement.tp_size * placement.ep_size, max(1, torch.cuda.device_count()))
    return None if ranks == 1 else max(1, HostThreads.choose().count // ranks)


def _described(recipe: Recipe, choice: Choice) -> str:
    problem, host = choice.problem, recipe.host
    ours = f"lancebill's {choice.backend.name} ({problem.w13.spec} x {problem.activations})"
    if host is None:
        return ours
    left = host.choice.problem.experts
    return f"{ours}, {problem.experts} experts, and {host.choice.backend.name}, {left} experts in host memory"
