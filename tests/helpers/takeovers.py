"""What the vLLM plugin takes of a small checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from lancebill.integrations.vllm.settings import Settings, parse_settings
from lancebill.integrations.vllm.takeover import Source, Takeover
from lancebill.layer.recipe import LoadOptions
from lancebill.testing.checkpoints import Generated


def settings(**section: Any) -> Settings:
    return parse_settings({"lancebill": section})


OPTIONS = LoadOptions(top_k=2, activation="silu")


def take(made: Generated, chosen: Settings, layers: int = 2, **flags: bool) -> Takeover:
    source = Source("model", made.config, made.headers)
    takeover = Takeover(chosen, source, **{"random": False, "copies": False, **flags})
    for layer in range(layers):
        takeover.decide(layer, OPTIONS, ())
    return takeover


def stream(made: Generated, *more: str) -> list[tuple[str, torch.Tensor]]:
    return [*made.tensors.items(), *((name, torch.zeros(1)) for name in more)]


def source_of(made: Generated) -> Source:
    return Source("model", made.config, made.headers)
