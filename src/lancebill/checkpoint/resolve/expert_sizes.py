"""The sizes of the routed experts as the config states them.

Configs are untrusted: a size is a whole number within the limits below, or an error. Without the limits, a count of
10^9 experts would be a loop of 10^9 steps long before it is compared with the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.errors import BadValue

MAX_EXPERTS = 1 << 14  # of a layer; the most that was ever published is 2,048
MAX_SIZE = 1 << 31  # of any other number
MAX_DEPTH = 4  # of nested sections
LAYER_COUNTS = ("num_hidden_layers", "n_layers", "num_layers")
# Sections of a config that describe the model with the experts: the text model of a multimodal one, DBRX's experts.
SECTIONS = ("text_config", "thinker_config", "language_config", "llm_config", "ffn_config")


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the routed experts; None where the config does not state one."""

    experts: int | None
    hidden: int | None
    intermediate: int | None
    top_k: int | None
    layers: int | None
    zero_experts: int = 0  # experts without weights, numbered after the others
    further_layers: int = 0  # layers after the others that predict further tokens


def expert_sizes(model: Mapping[str, Any], entry: int | None = None) -> ExpertSizes:
    """The sizes of the experts, under any of the keys that families use for them.

    `entry` is set for a mixture beside others: a list has a value for each of them, and this is its place there.
    """
    return ExpertSizes(
        experts=_lookup(
            model, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", most=MAX_EXPERTS,
            entry=entry,
        ),
        hidden=_lookup(model, "moe_latent_size", "routed_expert_hidden_size", "hidden_size", "d_model"),
        intermediate=_lookup(
            model, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size",
            entry=entry,
        ),
        top_k=experts_per_token(model, entry),
        layers=_layer_count(model),
        zero_experts=_lookup(model, "zero_expert_num", most=MAX_EXPERTS) or 0,
        further_layers=_lookup(
            model, "num_nextn_predict_layers", "num_mtp_modules", "mtp_num_layers", "mtp_num_hidden_layers",
            "num_mtp_layers",
        ) or 0,
    )  # fmt: skip


def experts_per_token(model: Mapping[str, Any], entry: int | None = None) -> int | None:
    """To how many experts a token is routed."""
    return _lookup(
        model, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts",
        "experts_per_token", most=MAX_EXPERTS, entry=entry,
    )  # fmt: skip


def _layer_count(model: Mapping[str, Any]) -> int | None:
    """The number of layers: the smallest count of the innermost section that has one.

    LongCat-Flash as transformers saves it has two `num_hidden_layers` for each of its `num_layers`, one a cache.
    """
    for section in config_sections(model):
        counts = [count for key in LAYER_COUNTS if (count := _lookup({key: section.get(key)}, key))]
        if counts:
            return min(counts)
    return None


def config_sections(model: Mapping[str, Any], depth: int = MAX_DEPTH) -> list[Mapping[str, Any]]:
    """The config and its nested sections for the text model and the experts, the innermost first."""
    nested = [part for key in SECTIONS if depth and isinstance(part := model.get(key), Mapping)]
    return [*(section for part in nested for section in config_sections(part, depth - 1)), model]


def _lookup(model: Mapping[str, Any], *keys: str, most: int = MAX_SIZE, entry: int | None = None) -> int | None:
    """The first of these keys that is set; null and 0 count as absent, as dense models write them.

    A list has a value for each mixture if `entry` is set. Else it has one for each layer, 0 for dense ones (and perhaps
    more, for layers that predict further tokens): the size that all other layers have, None if they differ.
    """
    for section in config_sections(model):
        layers = next((section[key] for key in LAYER_COUNTS if key in section), None)
        for key in keys:
            value = section.get(key)
            values: list[Any] = [value]
            if isinstance(value, list) and entry is not None:
                values = value[entry : entry + 1]
            elif isinstance(value, list) and type(layers) is int and 0 < layers <= len(value):
                values = value
            if all(each is None or (type(each) is int and each == 0) for each in values):
                continue
            if any(type(each) is not int or not 0 <= each <= most for each in values):
                raise BadValue(
                    f"'{key}' is not a valid size",
                    where="the model's config",
                    expected=f"a whole number from 1 to {most}, or one for each layer",
                    got=quoted(value),
                )
            sizes = set(values) - {0}
            return int(sizes.pop()) if len(sizes) == 1 else None
    return None
