"""How a layer is made from a checkpoint: everything that is known from metadata, before a tensor is read.

manifest -> plan of this rank's share -> problem -> oracle -> layout -> buffers. Loading from files and pushing tensors
share this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lancebill.backends import oracle
from lancebill.checkpoint.load.input_scales import allocate_inputs, check_static
from lancebill.checkpoint.load.layer_plan import LayerPlan, plan_layer
from lancebill.checkpoint.resolve.expected_headers import expected_headers
from lancebill.checkpoint.resolve.manifest import LayerIndex, Manifest
from lancebill.checkpoint.resolve.naming import DOWN, GATE, Naming, find_family
from lancebill.checkpoint.resolve.stored_layer import StoredLayer
from lancebill.errors import MissingTensor, SpecError, ranges
from lancebill.formats.stored import Config, Stored
from lancebill.layer.check_split import CPU_KERNELS, check_host, check_split
from lancebill.layer.gpu_room import fitting
from lancebill.layer.report import LoadReport
from lancebill.layer.routing_and_activation import agreed_activation, agreed_routing, agreed_top_k
from lancebill.layer.rules import ActivationRules, WeightRules, activation_specs, weight_targets
from lancebill.moe.activation import Activation
from lancebill.moe.device import parse_device
from lancebill.moe.layout import W2, W13, Layout, Packed
from lancebill.moe.placement import Placement
from lancebill.moe.problem import FAST, Problem
from lancebill.moe.routing import Routing
from lancebill.numbers.loss import Loss
from lancebill.numbers.spec import ActivationSpec
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.numbers.torch_defaults import default_device
from lancebill.numbers.weight import FACTORS
from lancebill.split.moves import OFF
from lancebill.split.split import Split, parse_bytes, part_map

UNQUANTISED = {
    torch.bfloat16: ACTIVATIONS["bf16"],
    torch.float16: ACTIVATIONS["fp16"],
    torch.float32: ACTIVATIONS["fp32"],
}
_FIRST_OF = {W13: GATE, W2: DOWN}  # the projection that stands for all of a matrix


@dataclass(frozen=True)
class LoadOptions:
    """How a layer is to be loaded; the keyword arguments of `from_checkpoint`.

    `device` is torch's default device unless another is given.
    `top_k` and `activation` are what the engine computes with; they must be the checkpoint's.
    `progress` is called with the number of bytes packed since its last call.
    `gpu_experts` or `gpu_memory` (bytes, or a text such as "20GiB") limit the experts on `device`. The CPU computes the
    rest from host memory. `moves` "recency" keeps the most recently used experts on the device; host memory then holds
    all experts. `cpu_threads` is the number of threads that compute experts in host
    memory beside a GPU: one pool for the process, so the last layer that is loaded with a number decides for all.
    `mixture` is one of several that the layers have ("text" or "vision" of ERNIE-4.5-VL); by default the first.
    `router` False says that the engine routes: the layers cannot, and do not wait for the router's tensors.
    """

    device: str | torch.device = field(default_factory=default_device)
    placement: Placement = field(default_factory=Placement)
    backend: str = oracle.AUTO
    weights: WeightRules = None
    activations: ActivationRules = None
    dtype: torch.dtype = torch.bfloat16
    order: str = FAST
    naming: Naming | None = None
    routing: Routing | None = None
    top_k: int | None = None
    activation: Activation | str | None = None
    progress: Callable[[int], None] | None = None
    gpu_experts: int | None = None
    gpu_memory: int | str | None = None
    moves: str = OFF
    cpu_threads: int | None = None
    mixture: str | None = None
    router: bool = True

    def __post_init__(self) -> None:
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k is True or self.top_k < 1):
            raise SpecError("not a number of experts", where="top_k", expected="a whole number from 1", got=self.top_k)
        check_split(self.gpu_memory, self.gpu_experts, self.moves, self.cpu_threads, order=self.order)

    def family(self, model: Mapping[str, Any]) -> Naming:
        """The names of the experts in a checkpoint with this config.json."""
        return self.naming or find_family(model, mixture=self.mixture)

    def settled(self) -> LoadOptions:
        """The same for layers that are loaded later, perhaps by another thread: on what is torch's current GPU now."""
        return replace(self, device=parse_device(self.device).torch) if str(self.device) == "cuda" else self

    def whole(self) -> LoadOptions:
        """The same without a split."""
        return replace(self, gpu_memory=None, gpu_experts=None, moves=OFF, cpu_threads=None)

    def split(self, slots: int, expert_bytes: int) -> Split | None:
        """Where the experts of a layer are; None: all on the device."""
        if self.gpu_memory is not None:
            split = Split.by_bytes(slots, expert_bytes, parse_bytes(self.gpu_memory))
        else:
            split = Split.by_number(slots, slots if self.gpu_experts is None else self.gpu_experts)
        return split if split.host else None


class Losses:
    """The error of requantising so far, by matrix."""

    def __init__(self) -> None:
        self.held: dict[str, Loss] = {}

    def add(self, matrix: str, loss: Loss) -> None:
        self.held[matrix] = self.held.get(matrix, Loss()).merge(loss)


@dataclass(frozen=True)
class Recipe:
    """What to load, how to cut it, which backend computes it."""

    manifest: Manifest
    plan: LayerPlan
    choice: oracle.Choice
    options: LoadOptions
    declared: dict[str, ActivationSpec]  # activations that the checkpoint declares, by matrix
    partial: bool = False  # made from a few experts; more headers follow
    slots: tuple[int, ...] | None = None  # the rank's slots that this recipe fills; None: all
    host: Recipe | None = None  # for experts in host memory, if the layer is split

    @classmethod
    def make(cls, manifest: Manifest, index: int, options: LoadOptions, *, partial: bool = False) -> Recipe:
        plan, declared, problem = plan_problem(manifest, index, options)
        choice = oracle.select(problem, options.device, options.backend)
        whole = cls(manifest, plan, choice, options, declared, partial)
        split = options.split(len(plan.experts), whole.bytes // len(plan.experts))
        if split is None:
            return whole
        held = split.host if options.moves == OFF else tuple(range(len(plan.experts)))
        beside = oracle.AUTO
        if choice.device.kind != "cpu":
            check_host(problem, f"layer {index}")
            beside = CPU_KERNELS
        host = whole._part(held, replace(options, device="cpu", backend=beside, moves=OFF))
        return replace(whole._part(split.device, options), host=host)

    def _part(self, slots: tuple[int, ...], options: LoadOptions) -> Recipe:
        """The recipe of some of the slots, or of none."""
        problem = replace(self.choice.problem, experts=len(slots))
        choice = oracle.select(problem, options.device, options.backend)
        plan = replace(self.plan, experts=tuple(self.plan.experts[slot] for slot in slots))
        return replace(self, plan=plan, choice=choice, options=options, slots=slots)

    @classmethod
    def resolve(cls, index: LayerIndex, layer: int, options: LoadOptions, *, where: str) -> Recipe:
        """The recipe of one layer of a checkpoint; raises everything that is wrong with the layer."""
        manifest = index.manifest(layers=(layer,))
        manifest.check(where)
        return cls.make(manifest, layer, options)

    @classmethod
    def expected(
        cls, config: Config, layer: int, options: LoadOptions, tensors: Mapping[str, Stored] | None = None
    ) -> Recipe:
        """The recipe of a checkpoint that does not exist: with these headers, or with those the config suggests."""
        naming = options.family(config.model)
        headers = expected_headers(config, naming, layer) if tensors is None else tensors
        return cls.resolve(LayerIndex(config, headers, naming), layer, options, where=config.source)

    @property
    def routing(self) -> Routing | None:
        """How the layer routes; None if it does not."""
        if not self.options.router:
            return None
        return agreed_routing(self.manifest, self.plan.layer.index, self.options.routing, self.options.top_k)

    @property
    def layout(self) -> Layout:
        return self.choice.backend.layout(self.choice.problem)

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights of all local experts, those in host memory too."""
        return self.plan.bytes(self.layout) + (0 if self.host is None else self.host.bytes)

    @property
    def expert_map(self) -> tuple[int, ...] | None:
        """The slot of every physical id, or -1 if it is not in this part; None: all are, in order."""
        placement = self.options.placement
        if placement.ep_size == 1 and not placement.redundant and self.slots is None:
            return None
        slots = placement.expert_map(self.plan.layer.experts)
        return slots if self.slots is None else part_map(slots, self.slots)

    def allocate(self) -> dict[str, Packed]:
        """Buffers for all local experts, with those for stored input scales."""
        problem, device, count = self.choice.problem, self.choice.device.torch, len(self.plan.experts)
        layout = self.layout
        packed = {}
        for matrix, shape in problem.matrices.items():
            roles = self.plan.layer.sample(_FIRST_OF[matrix]).sources
            where = f"layer {self.plan.layer.index}, {matrix}"
            inputs = allocate_inputs(roles, problem.inputs_of(matrix), shape.k, count, device, where)
            with fitting(where, count * layout.bytes(shape), device):
                packed[matrix] = {**layout.allocate(shape, count, device), **inputs}
        return packed

    def advance(self, experts: int) -> None:
        """Tell the caller that this many experts were packed."""
        if self.options.progress is not None:
            self.options.progress(experts * self.plan.bytes(self.layout) // len(self.plan.experts))

    def report(
        self, packed: Mapping[str, Packed], seconds: float, losses: dict[str, Loss], notes: tuple[str, ...]
    ) -> LoadReport:
        layer, problem = self.plan.layer, self.choice.problem
        stored = {matrix: layer.spec(name) for matrix, name in _FIRST_OF.items()}
        return LoadReport(
            self.manifest.format.name,
            self.manifest.naming.family,
            layer.index,
            {matrix: str(spec) for matrix, spec in stored.items()},
            {matrix: str(self.plan.requantize.get(matrix, spec)) for matrix, spec in stored.items()},
            {matrix: str(problem.inputs_of(matrix)) for matrix in stored},
            {matrix: self._declared_name(matrix) for matrix in stored},
            len(self.plan.experts),
            sum(t.numel() * t.element_size() for tensors in packed.values() for t in tensors.values()),
            seconds,
            self.choice,
            losses,
            tuple(self.manifest.format.unknown_keys(self.manifest.config)),
            notes,
            moves=self.slots is not None and self.options.moves != OFF,
            mixture=layer.mixture,
        )

    def _declared_name(self, matrix: str) -> str:
        """What the checkpoint declares. Inputs that nobody quantises are as declared, whatever their dtype."""
        declared, used = self.declared[matrix], self.choice.problem.inputs_of(matrix)
        if declared.spec.quantized:
            return str(declared)
        return "none" if used.spec.quantized else str(used)


def unquantised_inputs(dtype: torch.dtype) -> ActivationSpec:
    """Unquantised inputs of this dtype."""
    if dtype not in UNQUANTISED:
        raise SpecError("no kernel takes inputs of this dtype", expected=" or ".join(map(str, UNQUANTISED)), got=dtype)
    return UNQUANTISED[dtype]


def plan_problem(
    manifest: Manifest, index: int, options: LoadOptions
) -> tuple[LayerPlan, dict[str, ActivationSpec], Problem]:
    """This rank's share of a layer, the activations its checkpoint declares, and the problem for the oracle."""
    if index not in manifest.layers:
        legal = ranges(manifest.layer_indices) or "no layer"
        raise MissingTensor(f"layer {index!r} has no routed experts", expected=legal)
    layer = manifest.layers[index]
    targets = weight_targets(options.weights, index)
    plan = plan_layer(layer, options.placement, uneven=manifest.naming.uneven, requantize=targets)
    declared = _declared_activations(manifest, layer, options)
    return plan, declared, _problem(manifest, plan, options, declared)


def _problem(
    manifest: Manifest, plan: LayerPlan, options: LoadOptions, declared: Mapping[str, ActivationSpec]
) -> Problem:
    """What this rank computes."""
    index = plan.layer.index
    requested = activation_specs(options.activations, index)
    wide = unquantised_inputs(options.dtype)
    chosen = {m: (requested[m] or declared[m]) if m in requested else wide for m in _FIRST_OF}
    routing = agreed_routing(manifest, index, options.routing, options.top_k)
    projections = {matrix: plan.layer.sample(name) for matrix, name in _FIRST_OF.items()}
    for matrix, projection in projections.items():
        check_static(projection.sources, chosen[matrix], f"layer {index}, {matrix}")
    return Problem(
        plan.w13,
        plan.w2,
        experts=len(plan.experts),
        global_experts=plan.layer.experts + options.placement.redundant,
        top_k=agreed_top_k(routing, options.top_k or manifest.sizes.top_k, index),
        activation=agreed_activation(manifest, index, options.activation),
        input=wide.spec.dtype,
        activations=chosen[W13],
        activations_w2=chosen[W2],
        weight_on_input=routing is not None and routing.weight_on_input,
        pre_scale=any(FACTORS in p.sources for p in projections.values()),
        order=options.order,
    )


def _declared_activations(manifest: Manifest, layer: StoredLayer, options: LoadOptions) -> dict[str, ActivationSpec]:
    """How the checkpoint says the input of each GEMM is quantised."""
    declared = {}
    for matrix, name in _FIRST_OF.items():
        module = layer.sample(name).as_module(manifest.tensors)
        declared[matrix] = manifest.format.activations(manifest.config, module) or unquantised_inputs(options.dtype)
    return declared
