"""The models of the serving tables: an engine that loads them compiles none of our kernels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

from benchmarks.gpu import sources_of
from benchmarks.vllm import MODELS
from lancebill.backends.gpu import shipped
from lancebill.backends.oracle import select
from lancebill.checkpoint.read.config import config_of_model
from lancebill.jit.compile import KernelSource
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.moe.device import parse_device
from lancebill.moe.problem import Problem

HOPPER = "sm_90"
STEPS = (1, 2, 16, 48, 64, 300, 8192)  # tokens of captured steps and of prompts
NAMES = ("qwen3-v4-experts", "gpt-oss-120b", "qwen3-30b", "deepseek-v4-flash")


def kernels_of(planned: Iterable[tuple[Problem, int]]) -> dict[KernelSource, None]:
    """What packs these layers and computes them for these numbers of tokens."""
    device = parse_device(HOPPER)
    return dict.fromkeys(
        source
        for problem, count in planned
        for source in sources_of(select(problem, device).backend, problem, count, device)
    )


@cache
def in_the_wheel() -> frozenset[KernelSource]:
    planned = [(problem, tokens) for problem in shipped.problems() for tokens in shipped.TOKENS]
    return frozenset(kernels_of(planned))


@pytest.mark.parametrize("activations", [None, "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_engines_of_the_serving_tables_compile_nothing_of_ours(name: str, activations: str | None) -> None:
    options = LoadOptions(device=HOPPER, activations=activations)
    problem = Recipe.expected(config_of_model(MODELS[name]), 0, options).choice.problem
    needed = kernels_of([(problem, tokens) for tokens in STEPS])
    assert len(needed) > 5
    assert [source.label for source in needed if source not in in_the_wheel()] == []
