"""`experts_implementation="lancebill"`: runs the unquantised experts of any model on our backends.

The weights remain the model's parameters. A backend that needs another layout gets a packed copy, which is made
again whenever the parameters change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.checkpoint.load.slice_sizes import SLICE_BYTES
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.routing_config import activation_for
from lancebill.errors import UnsupportedProblem
from lancebill.integrations.transformers.packed_experts import has_post_expert_norm, uses_interface
from lancebill.layer.no_gradient import without_gradient
from lancebill.layer.parts import LayerParts
from lancebill.layer.recipe import UNQUANTISED
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.layout import W2, W13, MatrixShape, Packed, PlainLayout, as_integer
from lancebill.moe.problem import Problem
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, stack_experts

NAME = "lancebill"


def register() -> None:
    """Register the implementation under its name with transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Called by transformers instead of the module's own forward."""
    source = ModuleExperts.of(module)
    layer = _cached_layer(module, source, int(top_k_index.shape[-1]))
    out = layer(hidden_states, top_k_index, top_k_weights)
    return without_gradient(out, *module.parameters(recurse=False))


@dataclass(frozen=True)
class ModuleExperts:
    """The weights of a transformers experts module, and how transformers lays them out."""

    up: Tensor  # [E, N, K], or [E, K, N] where transposed
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    gated: bool
    transposed: bool
    interleaved: bool
    config: object

    @classmethod
    def of(cls, module: nn.Module) -> ModuleExperts:
        if not uses_interface(module):
            raise UnsupportedProblem(
                "these experts do not use transformers' experts interface", where=type(module).__name__
            )
        experts: Any = module  # its attributes are set by transformers' decorator, not declared by its class
        parameters = dict(module.named_parameters(recurse=False))
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        normed = has_post_expert_norm(module)
        if normed or getattr(module, "_is_expert_parallel", False):
            what = "a norm after each expert" if normed else "expert parallelism"
            raise UnsupportedProblem(f"{what} inside transformers is not supported", where=type(module).__name__)
        return cls(
            parameters[up].detach(),
            parameters["down_proj"].detach(),
            parameters[f"{up}_bias"].detach() if experts.has_bias else None,
            parameters["down_proj_bias"].detach() if experts.has_bias else None,
            experts.has_gate,
            experts.is_transposed,
            experts.has_gate and not experts.is_concatenated,
            experts.config,
        )

    @property
    def stamp(self) -> tuple[object, ...]:
        """Identifies the current contents of the weights without reading them.

        A new tensor has another address or device. torch increments `_version` at every in-place write.
        """
        tensors = (self.up, self.down, self.up_bias, self.down_bias)
        return tuple((t.data_ptr(), t._version, t.device) for t in tensors if t is not None)

    @property
    def spec(self) -> QuantSpec:
        return UNQUANTISED[self.up.dtype].spec

    def shapes(self) -> dict[str, MatrixShape]:
        def shape(name: str, tensor: Tensor, bias: Tensor | None) -> MatrixShape:
            n, k = tensor.shape[:0:-1] if self.transposed else tensor.shape[1:]
            return MatrixShape(name, n, k, self.spec, bias is not None)

        return {W13: shape(W13, self.up, self.up_bias), W2: shape(W2, self.down, self.down_bias)}

    def weights(self, expert: int) -> dict[str, LogicalWeight]:
        """One expert's matrices as [N, K], with all gate rows before the up rows."""

        def weight(tensor: Tensor, bias: Tensor | None, interleaved: bool) -> LogicalWeight:
            matrix = tensor[expert].t().contiguous() if self.transposed else tensor[expert]
            stored = LogicalWeight(self.spec, matrix, bias=None if bias is None else bias[expert])
            if not interleaved:
                return stored
            return stored.rows(torch.arange(stored.n, device=matrix.device).view(-1, 2).t().reshape(-1))

        return {
            W13: weight(self.up, self.up_bias, self.interleaved),
            W2: weight(self.down, self.down_bias, False),
        }


@dataclass(frozen=True)
class _CachedLayer:
    """A layer, and the state of the module it was made from: the stamp of its weights, and top_k."""

    made_from: tuple[object, ...]
    layer: RoutedExperts


# One layer for each module of the model. The keys are weak, so that an entry goes away with its module. The layer is
# not stored on the module: there it would be a submodule, and appear in the model's parameters and state dict.
_LAYERS: WeakKeyDictionary[nn.Module, _CachedLayer] = WeakKeyDictionary()


def _cached_layer(module: nn.Module, source: ModuleExperts, top_k: int) -> RoutedExperts:
    """The module's layer. Runs on every forward: packs again only if a weight or top_k changed since the last call."""
    state = (source.stamp, top_k)
    cached = _LAYERS.get(module)
    if cached is None or cached.made_from != state:
        cached = _LAYERS[module] = _CachedLayer(state, _make_layer(source, top_k))
    return cached.layer


def _make_layer(source: ModuleExperts, top_k: int) -> RoutedExperts:
    problem = problem_of(source, top_k, None)
    choice = oracle.select(problem, parse_device(str(source.up.device)))
    layout = choice.backend.layout(problem)
    plain = isinstance(layout, PlainLayout) and not source.transposed and not source.interleaved
    return RoutedExperts(LayerParts(choice, _without_copy(source) if plain else pack_matrices(choice, source.weights)))


def problem_of(source: ModuleExperts, top_k: int, layer: int | None) -> Problem:
    """The problem that a module's experts compute with their unquantised weights; `layer` is None if not known."""
    model = source.config.to_dict()  # type: ignore[attr-defined]
    shapes, wide, experts = source.shapes(), UNQUANTISED[source.up.dtype], int(source.up.shape[0])
    activation = activation_for(model, names.find_family(model).family, layer)
    if activation.gated != source.gated:
        raise UnsupportedProblem("the model's experts contradict its config", got=f"gated: {source.gated}")
    return Problem(
        shapes[W13],
        shapes[W2],
        experts=experts,
        global_experts=experts,
        top_k=top_k,
        activation=activation,
        input=wide.spec.dtype,
        activations=wide,
    )


def _without_copy(source: ModuleExperts) -> dict[str, Packed]:
    """Views of the model's own weights, as the integer tensors that our layouts use. Only biases may be copied."""
    views: dict[str, Packed] = {W13: {"codes": as_integer(source.up)}, W2: {"codes": as_integer(source.down)}}
    for matrix, bias in ((W13, source.up_bias), (W2, source.down_bias)):
        if bias is not None:
            views[matrix]["bias"] = as_integer(bias.float())
    return views


def pack_matrices(choice: oracle.Choice, weights: Callable[[int], dict[str, LogicalWeight]]) -> dict[str, Packed]:
    """All experts' matrices in the layout of the chosen backend; `weights` gives the matrices of one expert."""
    problem = choice.problem
    layout = choice.backend.layout(problem)
    packed = {
        matrix: layout.allocate(shape, problem.experts, choice.device.torch)
        for matrix, shape in problem.matrices.items()
    }
    codes = sum(shape.n * shape.k for shape in problem.matrices.values())
    step = max(1, SLICE_BYTES[choice.device.torch.type] // codes)
    for first in range(0, problem.experts, step):
        together = slice(first, min(first + step, problem.experts))
        experts = [weights(expert) for expert in range(together.start, together.stop)]
        for matrix, shape in problem.matrices.items():
            rows = {name: tensor[together] for name, tensor in packed[matrix].items()}
            layout.pack(shape, stack_experts([expert[matrix] for expert in experts]), rows)
    return packed
