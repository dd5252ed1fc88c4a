"""`experts_implementation="lancebill"`: our backends on the unquantised experts of any model.

The weights stay the model's parameters. A backend that wants them in another order gets a copy, made
once and again whenever they change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.routing_config import activation_for
from lancebill.errors import UnsupportedProblem
from lancebill.integrations.transformers.packed_experts import forward_only
from lancebill.layer.parts import LayerParts
from lancebill.layer.recipe import WIDE
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.layout import W2, W13, MatrixShape, Packed, PlainLayout, as_integer
from lancebill.moe.problem import Problem, parse_device
from lancebill.numbers.spec import DENSE_BF16, DENSE_F16, DENSE_F32, QuantSpec
from lancebill.numbers.weight import LogicalWeight

NAME = "lancebill"
_SPECS = {torch.bfloat16: DENSE_BF16, torch.float16: DENSE_F16, torch.float32: DENSE_F32}


def register() -> None:
    """Make the name known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of a module's own forward."""
    source = ModelExperts.of(module)
    layer = _layer(module, source, int(top_k_index.shape[-1]))
    return forward_only(layer, hidden_states, top_k_index, top_k_weights, *module.parameters(recurse=False))


@dataclass(frozen=True)
class ModelExperts:
    """A module's weights, under the names and in the orders transformers has."""

    up: Tensor  # [E, N, K], or [E, K, N] where transposed
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    gated: bool
    transposed: bool
    interleaved: bool
    config: object

    @classmethod
    def of(cls, module: nn.Module) -> ModelExperts:
        held, facts = dict(module.named_parameters(recurse=False)), vars(module)
        first = "gate_up_proj" if facts["has_gate"] else "up_proj"
        if facts.get("has_post_expert_norm") or facts.get("_is_expert_parallel"):
            what = "a norm behind each expert" if facts.get("has_post_expert_norm") else "expert parallelism"
            raise UnsupportedProblem(f"{what} inside transformers is not supported", where=type(module).__name__)
        return cls(
            held[first].detach(),
            held["down_proj"].detach(),
            held[f"{first}_bias"].detach() if facts["has_bias"] else None,
            held["down_proj_bias"].detach() if facts["has_bias"] else None,
            facts["has_gate"],
            facts["is_transposed"],
            facts["has_gate"] and not facts["is_concatenated"],
            facts["config"],
        )

    @property
    def stamp(self) -> tuple[object, ...]:
        """Changes whenever a weight does."""
        held = (self.up, self.down, self.up_bias, self.down_bias)
        return tuple((t.data_ptr(), t._version, t.device) for t in held if t is not None)

    @property
    def spec(self) -> QuantSpec:
        return _SPECS[self.up.dtype]

    def shapes(self) -> dict[str, MatrixShape]:
        def shape(name: str, tensor: Tensor, bias: Tensor | None) -> MatrixShape:
            n, k = tensor.shape[:0:-1] if self.transposed else tensor.shape[1:]
            return MatrixShape(name, n, k, self.spec, bias is not None)

        return {W13: shape(W13, self.up, self.up_bias), W2: shape(W2, self.down, self.down_bias)}

    def weights(self, expert: int) -> dict[str, LogicalWeight]:
        """One expert's matrices as [N, K], gates before ups."""

        def weight(tensor: Tensor, bias: Tensor | None, interleaved: bool) -> LogicalWeight:
            matrix = tensor[expert].t().contiguous() if self.transposed else tensor[expert]
            made = LogicalWeight(self.spec, matrix, bias=None if bias is None else bias[expert])
            return made.rows(torch.arange(made.n).view(-1, 2).t().reshape(-1)) if interleaved else made

        return {
            "w13": weight(self.up, self.up_bias, self.interleaved),
            "w2": weight(self.down, self.down_bias, False),
        }


@dataclass(frozen=True)
class _Made:
    stamp: tuple[object, ...]
    layer: RoutedExperts


_MADE: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()


def _layer(module: nn.Module, source: ModelExperts, top_k: int) -> RoutedExperts:
    made = _MADE.get(module)
    if made is None or made.stamp != (source.stamp, top_k):
        made = _MADE[module] = _Made((source.stamp, top_k), _make(source, top_k))
    return made.layer


def _make(source: ModelExperts, top_k: int) -> RoutedExperts:
    problem = pose(source, top_k)
    choice = oracle.select(problem, parse_device(str(source.up.device)))
    layout = choice.backend.layout(problem)
    plain = isinstance(layout, PlainLayout) and not source.transposed and not source.interleaved
    return RoutedExperts(LayerParts(choice, _shared(source) if plain else pack(choice, source.weights)))


def pose(source: ModelExperts, top_k: int) -> Problem:
    """What a module's experts compute, on its weights as they are."""
    model = source.config.to_dict()  # type: ignore[attr-defined]
    shapes, wide, experts = source.shapes(), WIDE[source.up.dtype], int(source.up.shape[0])
    activation = activation_for(model, names.find_family(model).family)
    if activation.gated != source.gated:
        raise UnsupportedProblem("the model's experts are not as its config says", got=f"gated: {source.gated}")
    return Problem(
        shapes["w13"],
        shapes["w2"],
        experts=experts,
        global_experts=experts,
        top_k=top_k,
        activation=activation,
        input=wide.spec.dtype,
        activations=wide,
    )


def _shared(source: ModelExperts) -> dict[str, Packed]:
    """The model's own memory, seen as the integers our layouts hold."""
    held: dict[str, Packed] = {"w13": {"codes": as_integer(source.up)}, "w2": {"codes": as_integer(source.down)}}
    for matrix, bias in (("w13", source.up_bias), ("w2", source.down_bias)):
        if bias is not None:
            held[matrix]["bias"] = as_integer(bias.float())
    return held


def pack(choice: oracle.Choice, weights: Callable[[int], dict[str, LogicalWeight]]) -> dict[str, Packed]:
    """Every expert's matrices in the layout of the chosen backend."""
    problem = choice.problem
    layout = choice.backend.layout(problem)
    packed = {
        matrix: layout.allocate(shape, problem.experts, choice.device.torch)
        for matrix, shape in problem.matrices.items()
    }
    for expert in range(problem.experts):
        for matrix, weight in weights(expert).items():
            layout.pack(problem.matrices[matrix], weight, {name: t[expert] for name, t in packed[matrix].items()})
    return packed
