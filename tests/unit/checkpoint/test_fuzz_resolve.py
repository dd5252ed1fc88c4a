"""Mutated configs and headers of every format, resolved as `verify` does: only our own errors, and none takes long.

`nox -s fuzz` runs many more rounds.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from test_corrupt_fuzz import NUMBERS, mutated

from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.missing_layers import missing_layers
from lancebill.checkpoint.resolve.routing_config import activation_for, routing_for
from lancebill.errors import LancebillError
from lancebill.formats import registry
from lancebill.formats.stored import TORCH_DTYPES, Stored
from lancebill.testing.checkpoints import Generated, generate, small_size

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "60"))  # for each format
MOST_SECONDS = 5


def _small(fmt: str) -> Generated:
    example = next(iter(registry()[fmt].examples()))
    row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    return generate(example, row, row.forms[0], small_size(example))


def _document(made: Generated) -> dict[str, Any]:
    quant = {"quant_method": made.config.method, **made.config.quant} if made.config.method else None
    document: dict[str, Any] = json.loads(json.dumps({**made.config.model, "quantization_config": quant}))
    return document


def _mutated_headers(headers: Mapping[str, Stored], rng: random.Random) -> dict[str, Stored]:
    """The headers with one tensor renamed, reshaped, of another dtype, or left out."""
    name = rng.choice(list(headers))
    changed = {other: stored for other, stored in headers.items() if other != name}
    action, stored = rng.random(), headers[name]
    if action < 0.4:
        number = rng.choice((*map(str, NUMBERS), "00", "-1", "\u0660", "x"))
        changed[re.sub(r"\d+", lambda m: number if rng.random() < 0.5 else m[0], name)] = stored
    elif action < 0.7:
        shape = list(stored.shape) or [1]
        shape[rng.randrange(len(shape))] = rng.choice(NUMBERS)
        changed[name] = Stored(stored.dtype, tuple(shape[: rng.randint(0, 4)]))
    elif action < 0.9:
        changed[name] = Stored(rng.choice(list(TORCH_DTYPES)), stored.shape)
    return changed


def _resolve(document: Any, headers: Mapping[str, Stored]) -> None:
    config = config_of_model(document)
    manifest = manifests.build(config, headers)
    for problem in (*manifest.problems, *missing_layers(manifest)):
        str(problem).encode("utf-8")
    manifest.format.unknown_keys(config)
    for layer in manifest.layers:
        routing_for(config.model, manifest.naming.family, layer)
        activation_for(config.model, manifest.naming.family)


@pytest.mark.parametrize("fmt", registry())
def test_mutations_raise_only_our_errors(fmt: str) -> None:
    made, rng = _small(fmt), random.Random(f"{fmt} {ROUNDS}")
    for _ in range(ROUNDS):
        document, headers = _document(made), dict(made.headers)
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.5:
                headers = _mutated_headers(headers, rng)
            else:
                document = mutated(document, rng)
        if not isinstance(document, dict) or not headers:
            continue
        started = time.process_time()
        try:
            _resolve(document, headers)
        except LancebillError as error:
            str(error).encode("utf-8")
        assert time.process_time() - started < MOST_SECONDS, (document, headers)
