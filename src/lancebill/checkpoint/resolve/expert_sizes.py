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


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the routed experts; None where the config does not state one."""

    experts: int | None
    hidden: int | None
    intermediate: int | None
    top_k: int | None
    layers: int | None


def expert_sizes(model: Mapping[str, Any]) -> ExpertSizes:
    """The sizes of the experts, under any of the keys that families use for them."""
    return ExpertSizes(
        experts=_lookup(
            model, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", most=MAX_EXPERTS
        ),
        hidden=_lookup(model, "hidden_size", "d_model"),
        intermediate=_lookup(
            model, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"
        ),
        top_k=_lookup(
            model, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token", most=MAX_EXPERTS
        ),
        layers=_lookup(model, "num_hidden_layers", "n_layers"),
    )


def config_sections(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config itself, and its nested sections for the text model and the experts."""
    nested = [model.get(key) for key in ("text_config", "ffn_config")]
    return [model, *(part for part in nested if isinstance(part, Mapping))]


def _lookup(model: Mapping[str, Any], *keys: str, most: int = MAX_SIZE) -> int | None:
    """The first of these keys that is set; null and 0 count as absent, as dense models write them."""
    for section in config_sections(model):
        for key in keys:
            value = section.get(key)
            if value is None or (type(value) is int and value == 0):
                continue
            if type(value) is not int or not 0 < value <= most:
                raise BadValue(
                    f"'{key}' is not a valid size",
                    where="the model's config",
                    expected=f"a whole number from 1 to {most}",
                    got=quoted(value),
                )
            return value
    return None
