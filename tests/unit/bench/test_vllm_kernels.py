"""The models of the serving tables: an engine that loads them compiles none of our kernels."""

from __future__ import annotations

import sys
from functools import cache

import pytest
from project import ROOT

from lancebill.backends.gpu import shipped
from lancebill.checkpoint.read.config import config_of_model
from lancebill.jit.compile import KernelSource
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.moe.device import parse_device

sys.path.insert(0, str(ROOT / "benchmarks" / "old"))

from gpu_kernels import kernels_of
from vllm_models import MODELS

HOPPER = "sm_90"
STEPS = (1, 2, 16, 48, 64, 300, 8192)  # tokens of captured steps and of prompts
NAMES = ("qwen3-v4-experts", "gpt-oss-120b", "qwen3-30b", "deepseek-v4-flash")


@cache
def in_the_wheel() -> frozenset[KernelSource]:
    planned = [(problem, tokens) for problem in shipped.problems() for tokens in shipped.TOKENS]
    return frozenset(kernels_of(planned, parse_device(HOPPER)))


@pytest.mark.parametrize("activations", [None, "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_engines_of_the_serving_tables_compile_nothing_of_ours(name: str, activations: str | None) -> None:
    options = LoadOptions(device=HOPPER, activations=activations)
    problem = Recipe.expected(config_of_model(MODELS[name]), 0, options).choice.problem
    needed = kernels_of([(problem, tokens) for tokens in STEPS], parse_device(HOPPER))
    assert len(needed) > 5
    assert [source.label for source in needed if source not in in_the_wheel()] == []
