"""Quantises and packs the experts of a model that is already in memory.

    model = AutoModelForCausalLM.from_pretrained(..., device_map="cuda")
    pack_experts(model, weights="mxfp4")

For models that do not come from a checkpoint (just trained, merged, random). A checkpoint on disk is better loaded by
`from_pretrained`, which never holds the dense experts in memory.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import GenerationMixin

from lancebill.backends import oracle
from lancebill.checkpoint.resolve.expert_sizes import experts_per_token
from lancebill.errors import UnsupportedFormat
from lancebill.integrations.transformers.experts_interface import ModuleExperts, pack_matrices, problem_of
from lancebill.integrations.transformers.graphed_generation import use_graphs
from lancebill.integrations.transformers.packed_experts import PackedExperts, expert_modules
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.layer.rules import ActivationRules, WeightRules, activation_specs, weight_targets
from lancebill.moe.device import parse_device
from lancebill.moe.layout import W2, W13
from lancebill.numbers.codec import requantize
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, stack


def pack_experts(
    model: nn.Module, *, weights: WeightRules, activations: ActivationRules = None, backend: str = oracle.AUTO
) -> None:
    """Replace every experts module by a packed one; `weights` and `activations` as in `from_pretrained`.

    The dense parameters of each layer are freed once it is packed. On a GPU the model then generates with CUDA graphs.
    """
    for name, index, module in list(expert_modules(model)):
        place = PackedExperts(index)
        place.experts = _packed(ModuleExperts.of(module), index, weights, activations, backend)
        model.set_submodule(name, place)
    if isinstance(model, GenerationMixin):
        use_graphs(model)


def _packed(
    source: ModuleExperts, index: int, weights: WeightRules, activations: ActivationRules, backend: str
) -> RoutedExperts:
    targets, chosen = weight_targets(weights, index), activation_specs(activations, index)
    model = source.config.to_dict()  # type: ignore[attr-defined]
    top_k = experts_per_token(model)
    if top_k is None:
        raise UnsupportedFormat("the model's config does not state how many experts a token is routed to")
    problem = problem_of(source, top_k, index)
    assert problem.w2 is not None
    halves = 2 if source.gated else 1
    spec13 = targets.get(W13, problem.w13.spec)
    problem = replace(
        problem,
        w13=replace(problem.w13, spec=spec13.stacked(problem.w13.n // 2) if source.gated else spec13),
        w2=replace(problem.w2, spec=targets.get(W2, problem.w2.spec)),
        activations=chosen.get(W13) or problem.activations,
        activations_w2=chosen.get(W2) or problem.activations,
    )
    choice = oracle.select(problem, parse_device(str(source.up.device)), backend)

    def quantised(expert: int) -> dict[str, LogicalWeight]:
        dense = source.weights(expert)
        return {
            W13: _quantised(dense[W13], targets.get(W13), halves),
            W2: _quantised(dense[W2], targets.get(W2), 1),
        }

    return RoutedExperts(LayerParts(choice, pack_matrices(choice, quantised)))


def _quantised(weight: LogicalWeight, target: QuantSpec | None, parts: int) -> LogicalWeight:
    """Quantised to `target`. Gate and up are quantised separately, as in a checkpoint that stores them separately."""
    if target is None:
        return weight
    rows = weight.n // parts
    halves = [requantize(weight.cut((i * rows, (i + 1) * rows), (0, weight.k)), target)[0] for i in range(parts)]
    return stack(halves) if parts > 1 else halves[0]
