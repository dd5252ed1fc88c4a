"""The demo's table: what each way to hold the experts costs in quality, and how fast it speaks."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lancebill.demo.text import TEXT
from lancebill.errors import UnsupportedProblem

WEIGHTS = ("bf16", "mxfp4", "nvfp4", "int4-g32", "int4-g64", "fp8-channel")
ACTIVATIONS = ("bf16", "int8")
WINDOW, TOKENS = 512, 8  # of the text, in one window; and spoken: few, since a dozen variants take their turn
PROMPT = "The sea was calm that morning, and"


@dataclass(frozen=True)
class VariantRow:
    """One variant: weights, activations, and what was measured."""

    weights: str
    activations: str
    backend: str
    megabytes: float  # of the experts
    perplexity: float
    stderr: float
    tokens_per_second: float


def variants() -> list[tuple[str, str]]:
    """Weights and activations; unquantised weights with unquantised activations only."""
    return [(w, a) for w in WEIGHTS for a in ACTIVATIONS if w != "bf16" or a == "bf16"]


def rows(model: Path, cache: Path, progress: Callable[[int], None] = lambda _: None) -> list[VariantRow]:
    """Measured now, or taken from the cache where this machine has measured them before."""
    key = _machine()
    known = json.loads(cache.read_text()) if cache.exists() else {}
    if known.get("machine") == key:
        return [VariantRow(**row) for row in known["rows"]]
    found = []
    for row in _measure(model):
        found.append(row)
        progress(1)
    cache.write_text(json.dumps({"machine": key, "rows": [asdict(row) for row in found]}, indent=2) + "\n")
    return found


def _machine() -> dict[str, Any]:
    """What figures depend on: another of these, and they are measured again."""
    from lancebill.backends import oracle
    from lancebill.backends.registry import registry

    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backends": [oracle.AUTO, *registry()],
        "measured": [len(TEXT), WINDOW, TOKENS],
        "variants": [list(pair) for pair in variants()],
    }


def _measure(path: Path) -> Iterator[VariantRow]:
    """One model in memory; its experts are loaded anew for each kind of weights."""
    from transformers import AutoTokenizer

    from lancebill.evaluate.perplexity import perplexity
    from lancebill.integrations.transformers.packed_experts import packed_experts, set_activations
    from lancebill.integrations.transformers.pretrained import from_pretrained, refill
    from lancebill.integrations.transformers.streaming import speak

    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer(TEXT, return_tensors="pt").input_ids[0][:WINDOW]
    prompt = dict(tokenizer(PROMPT, return_tensors="pt"))
    model = from_pretrained(path, dtype=torch.float32)
    held = WEIGHTS[0]  # as they are stored
    for weights, activations in variants():
        spec = None if weights == "bf16" else weights
        try:
            if weights != held:
                refill(model, weights=spec)
            set_activations(model, activations, torch.float32)
        except UnsupportedProblem:  # a backend that wants the weights in another order for these
            refill(model, weights=spec, activations=activations)
        held = weights
        layers = [place.experts for _, place in packed_experts(model) if place.experts is not None]
        size = sum(t.nbytes for layer in layers for t in layer.parameters())
        found = perplexity(model, text, window=WINDOW, stride=WINDOW)
        said = speak(model, tokenizer, prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        backend = layers[0].choice.backend.name
        yield VariantRow(weights, activations, backend, size / 1e6, found.value, found.stderr, said.tokens_per_second)
