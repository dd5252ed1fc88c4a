"""Compares what engines with the same weights answered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from vllm_models import MODELS, has_equal_weights

# In a model of one layer all backends route alike, and what is left are the roundings of one layer and of the logits,
# which are bf16. In deeper models a rounding may select other experts, with random weights more often than with trained
# ones, and a token's log-probability then changes by up to one, also between two of vLLM's own backends (a first bound,
# 0.25 for the largest difference, held for no pair of them): there the mean is bounded, for six layers. Roundings of
# further layers add up as independent ones do, by the root of their number: of 24 layers, Marlin's and Triton's means
# are 2.1 times as far apart as of six.
LARGEST = {"bf16": 0.125, "fp8": 0.5}
MEAN, MEAN_LAYERS = {"bf16": 0.125, "fp8": 0.5}, 6


def compared(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every engine of a model against the first one with 16-bit activations, which is ours only if all are."""
    made = []
    for model in dict.fromkeys(engine["model"] for engine in engines):
        known = [engine for engine in engines if engine["model"] == model and "answers" in engine]
        references = [one for one in known if one["activations"] == "bf16"]
        references.sort(key=lambda one: str(one["backend"]).startswith("ours"))
        if has_equal_weights(model) and references:
            made += [_compare(references[0], one) for one in known if one is not references[0]]
    return made


def _compare(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    first, second = reference["answers"], other["answers"]
    away = [
        abs(a - b)
        for mine, theirs in zip(first["prompt_logprobs"], second["prompt_logprobs"], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    layers = MODELS[reference["model"]]["num_hidden_layers"]
    shallow = layers == 1
    bound = LARGEST[other["activations"]] if shallow else _mean_bound(layers, other["activations"])
    largest, mean = max(away), sum(away) / len(away)
    forks = list(_forks(first, second))
    return {
        "model": reference["model"],
        "reference": reference["backend"],
        "backend": other["backend"],
        "bound": bound,
        "bounded": "largest" if shallow else "mean",
        "largest": round(largest, 5),
        "mean": round(mean, 5),
        "positions": len(away),
        "within_bound": (largest if shallow else mean) <= bound,
        "same_answers": len(first["tokens"]) - len(forks),
        "answers": len(first["tokens"]),
        "margins_where_answers_part": forks,
        # both tokens may have moved by the bound
        "tokens_equal_where_not_tied": all(margin <= 2 * bound for margin in forks),
    }


def _mean_bound(layers: int, activations: str) -> float:
    return round(MEAN[activations] * math.sqrt(max(1.0, layers / MEAN_LAYERS)), 4)


def _forks(first: dict[str, Any], second: dict[str, Any]) -> Iterator[float]:
    """The reference's margin at the first token that differs, of each answer that differs."""
    for mine, theirs, margins in zip(first["tokens"], second["tokens"], first["margins"], strict=True):
        differing = [at for at, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
        if differing:
            yield margins[differing[0]]
