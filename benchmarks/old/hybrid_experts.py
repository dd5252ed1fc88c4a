"""The experts of a layer in host memory and on the GPU, made once, and the split layers of benchmarks made of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from lancebill.backends.oracle import select
from lancebill.bench.peer import Peer
from lancebill.bench.peers import PEERS
from lancebill.bench.run import PEER_ERRORS
from lancebill.bench.workload import Weights
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.model_shapes import parse_shape
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.split.copy_lane import pin_in_place
from lancebill.split.moves import OFF
from lancebill.split.split import Split, part_map

CPU = torch.device("cpu")
DISTINCT = 8  # experts with different numbers; each has memory of its own


class Experts:
    """The experts of one shape and spec, in the layouts of both parts."""

    def __init__(self, shape: str, spec: str, device: str) -> None:
        self.shape, self.device = parse_shape(shape), device
        self.problem = self.shape.problem(parse_spec(spec), ACTIVATIONS["bf16"])
        self.weights = Weights(self.problem, torch.device(device), distinct=DISTINCT)
        self.choices = {where: select(self.problem, where) for where in dict.fromkeys((device, "cpu"))}
        self._layers: dict[int, RoutedExperts] = {}

    @cached_property
    def on_device(self) -> dict[str, Packed]:
        return self.weights.packed(self.choices[self.device].backend.layout(self.problem))

    @cached_property
    def in_host(self) -> dict[str, Packed]:
        """The pages are locked: a layer of some of them could not lock its own."""
        layout: Layout = self.choices["cpu"].backend.layout(self.problem)
        made: dict[str, Packed] = {}
        for matrix, shape in self.problem.matrices.items():
            made[matrix] = layout.allocate(shape, self.problem.experts, CPU)
            for expert in range(self.weights.distinct):
                row = {name: tensor[expert] for name, tensor in made[matrix].items()}
                layout.pack(shape, self.weights.logical(matrix, expert).to(CPU), row)
            for tensor in made[matrix].values():
                for expert in range(self.weights.distinct, self.problem.experts):
                    tensor[expert] = tensor[expert % self.weights.distinct]
                if self.device == "cuda":
                    pin_in_place(tensor)
        return made

    def layer(self, share: int) -> RoutedExperts:
        """A layer with `share` percent of its experts on the GPU. Layers share their memory."""
        if share not in self._layers:
            split = Split.by_number(self.shape.experts, self.shape.experts * share // 100)
            own = self._part(self.device, self.on_device, split.device)
            host = self._part("cpu", self.in_host, split.host) if split.host else None
            self._layers[share] = RoutedExperts(replace(own, host=host))
        return self._layers[share]

    def moving(self, share: int, moves: str) -> RoutedExperts:
        """A layer whose experts move, so that its part on the GPU has memory of its own."""
        split = Split.by_number(self.shape.experts, self.shape.experts * share // 100)
        own = self._part(self.device, self.on_device, split.device)
        copied = {m: {name: tensor.clone() for name, tensor in held.items()} for m, held in own.packed.items()}
        in_host = split.host if moves == OFF else tuple(range(self.shape.experts))
        host = self._part("cpu", self.in_host, in_host)
        return RoutedExperts(replace(own, packed=copied, host=host, moves=moves))

    def peer(self, name: str) -> Peer | str:
        """Another library's layer of the same experts, all on the CPU, or why there is none. None of them clamps."""
        try:
            return PEERS[name](replace(self.problem, activation=Activation()), self.weights)
        except PEER_ERRORS as error:
            return str(error)

    def _part(self, where: str, held: dict[str, Packed], slots: tuple[int, ...]) -> LayerParts:
        rows = slice(slots[0], slots[-1] + 1) if slots else slice(0)
        packed = {matrix: {name: tensor[rows] for name, tensor in each.items()} for matrix, each in held.items()}
        places = torch.tensor(part_map(range(self.shape.experts), slots), dtype=torch.int32, device=where)
        choice = replace(self.choices[where], problem=replace(self.problem, experts=len(slots)))
        return LayerParts(choice, packed, expert_map=places)
