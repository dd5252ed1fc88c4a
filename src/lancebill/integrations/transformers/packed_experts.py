"""The module that replaces a transformers model's experts.

Every model that uses transformers' experts interface does its own routing and calls its experts with (hidden states,
expert ids, weights), so one class works for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.checkpoint.resolve.naming import find_family, layer_name
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.layer.recipe import UNQUANTISED
from lancebill.layer.report import LoadReport
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.layer.rules import ActivationRules, activation_specs
from lancebill.moe.layout import W2, W13

# Attributes that transformers' `use_experts_implementation` decorator sets on every experts module.
_DECORATOR_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Experts modules without the decorator (DBRX, LongCat, Step) are called in the same way.
_ROUTED_ARGUMENTS = {"hidden_states", "top_k_index", "top_k_weights"}


class PackedExperts(nn.Module):
    """Replaces a model's experts module; `experts` is None until its weights are loaded."""

    def __init__(self, index: int, mixture: str | None = None) -> None:
        """`mixture` is the name of the layer's mixture, where it has several."""
        super().__init__()
        self.index, self.mixture = index, mixture
        self.experts: RoutedExperts | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = self._loaded()
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = (tensor.reshape(-1, top_k_index.shape[-1]) for tensor in (top_k_index, top_k_weights))
        if experts.routing is not None and experts.routing.zero_experts:
            is_zero = ids >= experts.problem.global_experts
            kept = experts(rows, ids.masked_fill(is_zero, -1), weights.masked_fill(is_zero, 0))
            out = kept + (rows * weights.masked_fill(~is_zero, 0).sum(-1, keepdim=True)).to(kept.dtype)
        else:
            out = experts(rows, ids, weights)
        return out.view(hidden_states.shape)

    def _loaded(self) -> RoutedExperts:
        if self.experts is None:
            raise LaunchError("the experts are not loaded yet", where=layer_name(self.index, self.mixture))
        return self.experts

    @property
    def report(self) -> LoadReport | None:
        """The report of loading this layer."""
        return None if self.experts is None else self.experts.report


class PackedSortedExperts(PackedExperts):
    """For experts that are called with all rows for each of them, one expert after the other (Llama-4).

    The model has multiplied the rows by the routing weights: those of other experts are 0, and are left out.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        experts = self._loaded().problem.global_experts
        ids = torch.arange(experts, device=hidden_states.device).repeat_interleave(hidden_states.shape[0] // experts)
        ids = ids.masked_fill(~hidden_states.any(dim=-1), -1)
        return super().forward(hidden_states, ids[:, None], torch.ones_like(ids[:, None], dtype=torch.float32))


def uses_interface(module: nn.Module) -> bool:
    """Whether this is an experts module of transformers' experts interface."""
    return all(isinstance(getattr(module, name, None), bool) for name in _DECORATOR_ATTRIBUTES)


def takes_routed_rows(module: nn.Module) -> bool:
    """Whether this module is called with rows, expert ids and weights, as in transformers' experts interface."""
    return uses_interface(module) or set(signature(module.forward).parameters) >= _ROUTED_ARGUMENTS


def _takes_rows(module: nn.Module) -> bool:
    return takes_routed_rows(module) or takes_sorted_rows(module)


def takes_sorted_rows(module: nn.Module) -> bool:
    """Whether this module has the stacked matrices of all experts and takes only rows sorted by expert."""
    stacked = [parameter.ndim == 3 for parameter in module.parameters(recurse=False)]
    return len(stacked) > 1 and all(stacked) and [*signature(module.forward).parameters] == ["hidden_states"]


def has_post_expert_norm(module: nn.Module) -> bool:
    """Whether an experts module applies a norm after each expert. Older transformers lack the attribute."""
    return bool(getattr(module, "has_post_expert_norm", False))


def expert_modules(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """All experts modules with their names and layer indices; raises if no module can be replaced."""
    modules = [(name, module) for name, module in model.named_modules() if _takes_rows(module)]
    if not modules:
        raise UnsupportedProblem(
            "this model has no experts, or does not use transformers' experts interface, so they cannot be replaced",
            where=type(model).__name__,
            hint="`RoutedExperts.from_checkpoint` loads experts layer by layer; load a dense model with transformers",
        )
    for name, module in modules:
        if has_post_expert_norm(module):
            raise UnsupportedProblem("experts with a norm after each expert are not supported", where=name)
        yield name, _layer_index(name), module


def replace_experts(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Replace the experts modules of the family of `config` by empty `PackedExperts`.

    Experts of other parts of a model (an encoder of images, a talker) are left to transformers. It initialises some
    experts from the module around them: it must not look for them there any more.
    """
    modules = list(expert_modules(model))
    naming = find_family(config)
    found = [
        (name, PackedSortedExperts if takes_sorted_rows(module) else PackedExperts, index, row.mixture)
        for name, index, module in modules
        for row in naming.mixtures
        if row.has_experts_in(name)
    ]
    if not found:
        what = f"the experts of this model are not where {naming.family} has them"
        raise UnsupportedProblem(what, where=modules[0][0], expected=" or ".join(form.home for form in naming.forms))
    for name, kind, index, mixture in found:
        parent, _, leaf = name.rpartition(".")
        block: Any = model.get_submodule(parent)
        block.register_module(leaf, kind(index, mixture))
        block._is_hf_initialized = True
    _forget_ties(model)


def _forget_ties(model: Any) -> None:
    """Two parts of a model may share experts (DiffusionGemma): transformers has no weights of theirs to tie now."""
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {name: to for name, to in model.all_tied_weights_keys.items() if name in left}


def packed_experts(model: nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    """All `PackedExperts` in `model`, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            yield name, module


def set_activations(model: nn.Module, activations: ActivationRules, dtype: torch.dtype) -> None:
    """Change the activations that the experts compute with; the packed weights do not change."""
    for name, place in packed_experts(model):
        layer = place.experts
        if layer is None:
            raise LaunchError("the experts are not loaded yet", where=name)
        if layer.is_split:
            what = "activations of a layer with experts in host memory cannot be changed"
            raise UnsupportedProblem(what, where=name, hint="load the model again")
        chosen = activation_specs(activations, place.index)
        before = layer.choice
        problem = replace(
            before.problem,
            activations=chosen.get(W13) or UNQUANTISED[dtype],
            activations_w2=chosen.get(W2) or UNQUANTISED[dtype],
        )
        choice = oracle.select(problem, before.device, before.requested)
        if choice.backend.layout(problem) != before.backend.layout(before.problem):
            raise UnsupportedProblem(
                "these activations need the weights in another layout", hint="load the model again"
            )
        layer.adopt(choice, layer.packed)


def _layer_index(name: str) -> int:
    """The layer a module belongs to: the only number in its dotted name."""
    numbers = [word for word in name.split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise UnsupportedProblem("cannot tell the layer of these experts", where=name, expected="one number in it")
    return int(numbers[0])
