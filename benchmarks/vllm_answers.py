"""Compares what engines with the same weights answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_models import CHECKPOINTS

# Log-probabilities of given tokens may differ by this much between 16-bit kernels, which round and add in other orders,
# and by this much with fp8 activations. A greedy token may differ where the first two are closer than the bound.
BOUNDS = {"bf16": 0.25, "fp8": 1.0}


def compared(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every engine of a model against the first one with 16-bit activations that is not ours."""
    made = []
    for model in dict.fromkeys(engine["model"] for engine in engines):
        known = [engine for engine in engines if engine["model"] == model and "answers" in engine]
        references = [one for one in known if one["activations"] == "bf16" and not one["backend"].startswith("ours")]
        if model in CHECKPOINTS and references:
            made += [_compare(references[0], one) for one in known if one is not references[0]]
    return made


def _compare(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    first, second = reference["answers"], other["answers"]
    away = [
        abs(a - b)
        for mine, theirs in zip(first["prompt_logprobs"], second["prompt_logprobs"], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    bound = BOUNDS[other["activations"]]
    forks = list(_forks(first, second))
    return {
        "model": reference["model"],
        "reference": reference["backend"],
        "backend": other["backend"],
        "bound": bound,
        "largest": max(away),
        "mean": round(sum(away) / len(away), 6),
        "positions": len(away),
        "within_bound": max(away) <= bound,
        "same_answers": len(first["tokens"]) - len(forks),
        "answers": len(first["tokens"]),
        "margins_where_answers_part": forks,
        "tokens_equal_where_not_tied": all(margin <= bound for margin in forks),
    }


def _forks(first: dict[str, Any], second: dict[str, Any]) -> Iterator[float]:
    """The reference's margin at the first token that differs, of each answer that differs."""
    for mine, theirs, margins in zip(first["tokens"], second["tokens"], first["margins"], strict=True):
        differing = [at for at, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
        if differing:
            yield margins[differing[0]]
