"""How a layer is made from a checkpoint, whether its tensors are pulled from files or pushed.

manifest -> plan of the rank's share -> problem -> oracle -> layout -> experts packed one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colibri import oracle
from colibri.checkpoint.load import LayerPlan, Reader, load_inputs, load_layer, plan_layer
from colibri.checkpoint.manifest import Layer, Manifest
from colibri.checkpoint.naming import DOWN, GATE, UP, Naming
from colibri.checkpoint.placement import Placement
from colibri.checkpoint.routing_config import activation_for, routing_for
from colibri.codec import Loss
from colibri.errors import BadValue, MissingTensor
from colibri.formats.base import Module
from colibri.grammar import ACTIVATIONS
from colibri.layer import RoutedExperts
from colibri.layout import Packed, as_integer
from colibri.problem import FAST, Problem, parse_device
from colibri.quant import ActivationSpec
from colibri.report import LoadReport
from colibri.routing import Routing
from colibri.rules import ActivationRules, WeightRules, activation_specs, weight_targets

WIDE = {torch.bfloat16: ACTIVATIONS["bf16"], torch.float16: ACTIVATIONS["fp16"], torch.float32: ACTIVATIONS["fp32"]}


@dataclass(frozen=True)
class Options:
    """How a layer is to be loaded; the keyword arguments of `from_checkpoint`."""

    device: str = "cpu"
    placement: Placement = field(default_factory=Placement)
    backend: str = oracle.AUTO
    weights: WeightRules = None
    activations: ActivationRules = None
    dtype: torch.dtype = torch.bfloat16
    order: str = FAST
    naming: Naming | None = None
    routing: Routing | None = None
    progress: Callable[[int], None] | None = None


@dataclass
class Recipe:
    """Everything about a layer's load that is known from metadata."""

    manifest: Manifest
    plan: LayerPlan
    choice: oracle.Choice
    options: Options
    declared: dict[str, ActivationSpec]

    @classmethod
    def make(cls, manifest: Manifest, index: int, options: Options) -> Recipe:
        if index not in manifest.layers:
            legal = ", ".join(map(str, sorted(manifest.layers))) or "none"
            raise MissingTensor(f"layer {index} has no routed experts", expected=f"one of {legal}")
        layer = manifest.layers[index]
        targets = weight_targets(options.weights, index)
        plan = plan_layer(layer, options.placement, uneven=manifest.naming.uneven, requantize=targets)
        declared = _declared_activations(manifest, layer, options)
        problem = _problem(manifest, plan, options, declared)
        choice = oracle.select(problem, parse_device(options.device), options.backend)
        return cls(manifest, plan, choice, options, declared)

    def allocate(self) -> dict[str, Packed]:
        layout, device = self.choice.backend.layout(self.choice.problem), self.choice.device.torch
        count = len(self.plan.experts)
        shapes = self.choice.problem.matrices.items()
        return {matrix: layout.allocate(shape, count, device) for matrix, shape in shapes}

    def pull(self, read: Reader) -> RoutedExperts:
        """Load every local expert and make the layer."""
        start = time.perf_counter()
        losses: dict[str, Loss] = {}

        def note(matrix: str, loss: Loss) -> None:
            losses[matrix] = losses.get(matrix, Loss()).merge(loss)

        layout = self.choice.backend.layout(self.choice.problem)
        packed = self.allocate()
        load_layer(read, self.plan, layout, out=packed, losses=note, progress=self.options.progress)
        self.add_inputs(read, packed)
        layer = RoutedExperts()
        self.fill(layer, packed, read)
        layer.report = self.report(packed, time.perf_counter() - start, losses)
        return layer

    def add_inputs(self, read: Reader, packed: dict[str, Packed]) -> None:
        """Static input scales and pre-scales, one for each local expert."""
        specs = {"w13": self.choice.problem.activations, "w2": self.choice.problem.second_activations}
        inputs = load_inputs(read, self.plan.layer)
        device = self.choice.device.torch
        for matrix, spec in specs.items():
            held = [_expert_inputs(inputs, expert, matrix) for expert in self.plan.experts]
            scales = [h.scale for h in held if h.scale is not None]
            if spec.spec.quantized and len(scales) == len(held):
                packed[matrix]["input_scale"] = as_integer(torch.stack(scales)).to(device)
            elif spec.static:
                raise MissingTensor(
                    f"{spec} activations need an input scale for every expert",
                    where=f"layer {self.plan.layer.index}, {matrix}",
                    hint="use dynamic activations, for example fp8",
                )
            factors = [h.pre_scale for h in held if h.pre_scale is not None]
            if factors:
                stacked = torch.stack(factors)
                stacked = stacked[:, self.plan.cut.start : self.plan.cut.stop] if matrix == "w2" else stacked
                packed[matrix]["pre_scale"] = as_integer(stacked.contiguous()).to(device)

    def fill(self, layer: RoutedExperts, packed: dict[str, Packed], read: Reader | None) -> None:
        """Give `layer` its weights, and what it needs to route."""
        source, device, placement = self.plan.layer, self.choice.device.torch, self.options.placement
        layer.adopt(self.choice, packed)
        layer.enable_compile()
        layer.routing = self.options.routing or routing_for(
            self.manifest.config.model, self.manifest.naming.family, source.index
        )
        if placement.ep_size > 1 or placement.redundant:
            slots = placement.expert_map(source.experts)
            layer.expert_map = torch.tensor(slots, dtype=torch.int32, device=device)
        if read is not None:
            for name, role in self.manifest.naming.router.names(source.index).items():
                if name in self.manifest.tensors:
                    layer.take_router(role, read(name, ()).to(device))

    def report(self, packed: Mapping[str, Packed], seconds: float, losses: dict[str, Loss]) -> LoadReport:
        layer, problem = self.plan.layer, self.choice.problem
        assert problem.w2 is not None
        return LoadReport(
            self.manifest.format.name,
            self.manifest.naming.family,
            layer.index,
            {"w13": str(layer.spec(GATE)), "w2": str(layer.spec(DOWN))},
            {
                "w13": str(self.plan.requantize.get("w13", layer.spec(GATE))),
                "w2": str(self.plan.requantize.get("w2", layer.spec(DOWN))),
            },
            {"w13": str(problem.activations), "w2": str(problem.second_activations)},
            {matrix: str(spec) for matrix, spec in self.declared.items()},
            len(self.plan.experts),
            sum(t.numel() * t.element_size() for tensors in packed.values() for t in tensors.values()),
            seconds,
            self.choice,
            losses,
        )


def _problem(manifest: Manifest, plan: LayerPlan, options: Options, declared: Mapping[str, ActivationSpec]) -> Problem:
    """What this rank has to compute."""
    said = activation_specs(options.activations, plan.layer.index)
    wide = WIDE[options.dtype]
    chosen = {m: (said[m] or declared[m]) if m in said else wide for m in ("w13", "w2")}
    routing = options.routing or _routing(manifest, plan.layer.index)
    roles = plan.layer.sample(GATE).sources
    return Problem(
        plan.w13,
        plan.w2,
        experts=len(plan.experts),
        global_experts=plan.layer.experts + options.placement.redundant,
        top_k=routing.top_k,
        activation=activation_for(manifest.config.model, manifest.naming.family),
        input=wide.spec.dtype,
        activations=chosen["w13"],
        activations_w2=chosen["w2"],
        weight_on_input=routing.weight_on_input,
        pre_scale="pre_quant_scale" in roles,
        order=options.order,
    )


def _routing(manifest: Manifest, layer: int) -> Routing:
    return routing_for(manifest.config.model, manifest.naming.family, layer)


def _declared_activations(manifest: Manifest, layer: Layer, options: Options) -> dict[str, ActivationSpec]:
    """What the checkpoint asks each product's input to be."""
    declared = {}
    for matrix, name in (("w13", GATE), ("w2", DOWN)):
        module = layer.sample(name).module
        declared[matrix] = manifest.format.activations(manifest.config, Module(module)) or WIDE[options.dtype]
    return declared


@dataclass(frozen=True)
class _ExpertInputs:
    scale: Tensor | None
    pre_scale: Tensor | None


def _expert_inputs(inputs: Mapping[tuple[int, str], Mapping[str, Tensor]], expert: int, matrix: str) -> _ExpertInputs:
    """What one product's input is multiplied by and divided by.

    Gate and up share an input: the larger of their scales serves both, and their pre-scales must be
    one vector. `input_global_scale` is stored as the reciprocal of what multiplies.
    """
    scales, factors = [], []
    for name in (GATE, UP) if matrix == "w13" else (DOWN,):
        held = inputs.get((expert, name), {})
        if "input_scale" in held:
            scales.append(held["input_scale"].float().reshape(()))
        elif "input_global_scale" in held:
            scales.append(1 / held["input_global_scale"].float().reshape(()))
        if "pre_quant_scale" in held:
            factors.append(held["pre_quant_scale"].float().reshape(-1))
    if any(not torch.equal(factor, factors[0]) for factor in factors):
        raise BadValue("gate and up have different pre-quantisation scales", where=f"expert {expert}")
    return _ExpertInputs(torch.stack(scales).amax() if scales else None, factors[0] if factors else None)
