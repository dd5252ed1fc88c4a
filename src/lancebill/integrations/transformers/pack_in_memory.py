"""Experts of a model that is in memory already: quantised and packed where they stand.

    model = AutoModelForCausalLM.from_pretrained(..., device_map="cuda")
    pack_experts(model, weights="mxfp4")

For models that come from elsewhere than a checkpoint (trained, merged, random); a checkpoint on disk is
better read by `from_pretrained`, which never holds the dense experts.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lancebill.backends import oracle
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.routing_config import routing_for
from lancebill.integrations.transformers.experts_interface import ModelExperts, pack, pose
from lancebill.integrations.transformers.packed_experts import PackedExperts, places
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.layer.rules import ActivationRules, WeightRules, activation_specs, weight_targets
from lancebill.moe.problem import parse_device
from lancebill.numbers.codec import requantize
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, stack


def pack_experts(
    model: nn.Module, *, weights: WeightRules, activations: ActivationRules = None, backend: str = oracle.AUTO
) -> None:
    """Replace every module of experts by a packed one; `weights` and `activations` as in `from_pretrained`.

    The dense parameters of a layer are let go when its packed ones exist.
    """
    for name, index, module in list(places(model)):
        place = PackedExperts(index)
        place.experts = _packed(ModelExperts.of(module), index, weights, activations, backend)
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).register_module(leaf, place)


def _packed(
    source: ModelExperts, index: int, weights: WeightRules, activations: ActivationRules, backend: str
) -> RoutedExperts:
    targets, said = weight_targets(weights, index), activation_specs(activations, index)
    model = source.config.to_dict()  # type: ignore[attr-defined]
    problem = pose(source, routing_for(model, names.find_family(model).family, index).top_k)
    assert problem.w2 is not None
    halves = 2 if source.gated else 1
    first = targets.get("w13", problem.w13.spec)
    problem = replace(
        problem,
        w13=replace(problem.w13, spec=first.stacked(problem.w13.n // 2) if source.gated else first),
        w2=replace(problem.w2, spec=targets.get("w2", problem.w2.spec)),
        activations=said.get("w13") or problem.activations,
        activations_w2=said.get("w2") or problem.activations,
    )
    choice = oracle.select(problem, parse_device(str(source.up.device)), backend)

    def quantised(expert: int) -> dict[str, LogicalWeight]:
        dense = source.weights(expert)
        return {
            "w13": _quantised(dense["w13"], targets.get("w13"), halves),
            "w2": _quantised(dense["w2"], targets.get("w2"), 1),
        }

    return RoutedExperts(LayerParts(choice, pack(choice, quantised)))


def _quantised(weight: LogicalWeight, target: QuantSpec | None, parts: int) -> LogicalWeight:
    """Under `target`, gate and up each by itself, as a checkpoint would hold them."""
    if target is None:
        return weight
    rows = weight.n // parts
    cut = [requantize(weight.cut((i * rows, (i + 1) * rows), (0, weight.k)), target)[0] for i in range(parts)]
    return stack(cut) if parts > 1 else cut[0]
