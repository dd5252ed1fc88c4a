"""Our experts in the place of theirs: a module with the call of transformers' experts interface.

Whichever model uses the interface calls its experts with (hidden states, expert ids, weights) and
routes by its own code, so this one class serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.layer.recipe import WIDE
from lancebill.layer.report import LoadReport
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.layer.rules import ActivationRules, activation_specs

# What the decorator of the interface writes on every module: how we know one.
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class PackedExperts(nn.Module):
    """Stands where a model's experts stood; empty until its weights are loaded."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.experts: RoutedExperts | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.experts is None:
            raise LaunchError("the experts are not loaded yet", where=f"layer {self.index}")
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        k = top_k_index.shape[-1]
        out = forward_only(self.experts, rows, top_k_index.reshape(-1, k), top_k_weights.reshape(-1, k))
        return out.view(hidden_states.shape)

    @property
    def report(self) -> LoadReport | None:
        """What loading this layer did."""
        return None if self.experts is None else self.experts.report


def forward_only(layer: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor, *others: Tensor) -> Tensor:
    """`layer` on these rows. Models are called with gradients recorded as a matter of course; only asking for one
    that would go through the experts, or to `others`, their weights, is an error."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weights, *others)):
        return _ForwardOnly.apply(layer, x, ids, weights, *others)  # type: ignore[no-any-return,no-untyped-call]
    return _compute(layer, x, ids, weights)


def _compute(layer: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A model's router gives 64-bit ids and weights of its own type; with those of the kernels calls are short."""
    out: Tensor = layer(x, topk_ids=ids.to(torch.int32), topk_weights=weights.to(torch.float32))
    return out


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor, *others: Tensor) -> Tensor:
        return _compute(layer, x, ids, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise LaunchError("experts of lancebill compute forwards only: they have no gradient", hint="torch.no_grad()")


def uses_interface(module: nn.Module) -> bool:
    """Whether this is a module of experts that transformers lets others compute."""
    held = vars(module)
    return all(isinstance(held.get(mark), bool) for mark in _MARKS)


def places(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """Every module of experts with its name and its layer; an error where a model has none we can replace."""
    found = [(name, module) for name, module in model.named_modules() if uses_interface(module)]
    if not found:
        raise UnsupportedProblem(
            "this model has no experts, or does not use transformers' experts interface, so they cannot be replaced",
            where=type(model).__name__,
            hint="`RoutedExperts.from_checkpoint` gives experts layer by layer; a dense model runs as it is",
        )
    for name, module in found:
        if vars(module).get("has_post_expert_norm"):
            raise UnsupportedProblem("experts with a norm behind them are not supported", where=name)
        yield name, _layer_of(name), module


def swap(model: nn.Module) -> None:
    """Put an empty `PackedExperts` in the place of every module of experts."""
    for name, index, _ in list(places(model)):
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).register_module(leaf, PackedExperts(index))


def packed_experts(model: nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    """Every module of ours in `model`, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            yield name, module


def set_activations(model: nn.Module, activations: ActivationRules, dtype: torch.dtype) -> None:
    """Compute with other activations from now on; the packed weights stay as they are."""
    for name, place in packed_experts(model):
        layer = place.experts
        if layer is None:
            raise LaunchError("the experts are not loaded yet", where=name)
        said = activation_specs(activations, place.index)
        before = layer.choice
        problem = replace(
            before.problem,
            activations=said.get("w13") or WIDE[dtype],
            activations_w2=said.get("w2") or WIDE[dtype],
        )
        choice = oracle.select(problem, before.device, before.requested)
        if choice.backend.layout(problem) != before.backend.layout(before.problem):
            raise UnsupportedProblem(
                "these activations want the weights in another layout", hint="load the model again"
            )
        layer.adopt(choice, layer.packed)


def _layer_of(name: str) -> int:
    """The layer a module belongs to: the place in the list of layers its name goes through."""
    numbers = [word for word in name.split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise UnsupportedProblem("cannot tell the layer of these experts", where=name, expected="one list of layers")
    return int(numbers[0])
