"""The demo's table: perplexity and speed of each weight and activation format."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lancebill.demo.text import TEXT
from lancebill.errors import UnsupportedProblem

WEIGHTS = ("bf16", "mxfp4", "nvfp4", "int4-g32", "int4-g64", "fp8-channel")
ACTIVATIONS = ("bf16", "int8")
WINDOW, TOKENS = 512, 8  # tokens for perplexity and tokens to generate; few, because a dozen variants are measured
PROMPT = "The sea was calm that morning, and"


@dataclass(frozen=True)
class VariantRow:
    """One variant and its measurements."""

    weights: str
    activations: str
    backend: str
    megabytes: float  # of the experts
    perplexity: float
    stderr: float
    tokens_per_second: float


def variants() -> list[tuple[str, str]]:
    """(weights, activations); unquantised weights are only paired with unquantised activations."""
    return [(w, a) for w in WEIGHTS for a in ACTIVATIONS if w != "bf16" or a == "bf16"]


def measured_rows(model: Path, cache: Path, progress: Callable[[int], None] = lambda _: None) -> list[VariantRow]:
    """The rows from the cache if this machine has measured them before; otherwise measure them."""
    key = _machine()
    cached = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    if cached.get("machine") == key:
        return [VariantRow(**row) for row in cached["rows"]]
    rows = []
    for row in _measure(model):
        rows.append(row)
        progress(1)
    cache.write_text(
        json.dumps({"machine": key, "rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8"
    )
    return rows


def _machine() -> dict[str, Any]:
    """The key of the cache: everything the measurements depend on."""
    from lancebill.backends import oracle
    from lancebill.backends.registry import registry

    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": [version("lancebill"), torch.__version__],
        "backends": [oracle.AUTO, *registry()],
        "measured": [len(TEXT), WINDOW, TOKENS],
        "variants": [list(pair) for pair in variants()],
    }


def _measure(path: Path) -> Iterator[VariantRow]:
    """Keep one model in memory and reload its experts for each weight format."""
    from lancebill.evaluate.perplexity import perplexity
    from lancebill.integrations.transformers.loaders import load_tokenizer
    from lancebill.integrations.transformers.packed_experts import packed_experts, set_activations
    from lancebill.integrations.transformers.pretrained import from_pretrained, reload_experts
    from lancebill.integrations.transformers.streaming import generate_streamed

    tokenizer = load_tokenizer(path)
    text = tokenizer(TEXT, return_tensors="pt").input_ids[0][:WINDOW]
    prompt = dict(tokenizer(PROMPT, return_tensors="pt"))
    model = from_pretrained(path, dtype=torch.float32)
    loaded = WEIGHTS[0]  # as stored
    for weights, activations in variants():
        spec = None if weights == "bf16" else weights
        try:
            if weights != loaded:
                reload_experts(model, weights=spec)
            set_activations(model, activations, torch.float32)
        except UnsupportedProblem:  # these activations need another backend, with another weight layout
            reload_experts(model, weights=spec, activations=activations)
        loaded = weights
        layers = [place.experts for _, place in packed_experts(model) if place.experts is not None]
        size = sum(t.nbytes for layer in layers for t in layer.parameters())
        measured = perplexity(model, text, window=WINDOW, stride=WINDOW)
        reply = generate_streamed(model, tokenizer, prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        backend = layers[0].choice.backend.name
        yield VariantRow(
            weights, activations, backend, size / 1e6, measured.value, measured.stderr, reply.tokens_per_second
        )
