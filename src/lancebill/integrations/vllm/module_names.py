"""Which layer of a checkpoint a module of vLLM is, by its name. Needs no vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import UnsupportedFormat

UNNUMBERED = "the name of these experts does not hold exactly one number, that of their layer"
DRAFT = "experts beside the model's layers, such as those that draft tokens (MTP)"
# Words in the names of blocks that draft, where vLLM does not call them as the checkpoint does.
DRAFT_WORDS = ("transformer_block", "draft_model")
DRAFT_START = "mtp"


def layer_index(module: str) -> int | None:
    """The layer that a module belongs to: the only number in its dotted name."""
    numbers = [int(word) for word in module.split(".") if word.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


def why_no_layer(module: str, model: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Why the experts in a module are not those of the layer with the number in its name; None if they are.

    `model` is config.json, `names` are the sorted names of all tensors, as far as they are known. Blocks that predict
    further tokens have numbers of their own in some families: `mtp.layers.0` is not layer 0.
    """
    index = layer_index(module)
    if index is None:
        return UNNUMBERED
    try:
        family = find_family(model)
    except UnsupportedFormat:
        return None  # reported when the layer is asked for
    claims = [family.claim(name) for name in _below(module, names)]
    if claims:  # vLLM calls the module as the checkpoint does
        return None if any(claim is not None and claim.layer == index for claim in claims) else DRAFT
    drafts = any(word.startswith(DRAFT_START) or word in DRAFT_WORDS for word in module.split("."))
    return DRAFT if drafts and index < (family.sizes(model).layers or 0) else None


def _below(module: str, names: Sequence[str]) -> Sequence[str]:
    return names[bisect_left(names, f"{module}.") : bisect_left(names, f"{module}/")]  # "/" follows "."
