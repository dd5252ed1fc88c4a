"""vLLM with our experts gives the tokens of transformers with our experts, for families x formats, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import engine
import models

# Log-probabilities of equal computations in two engines, in fp32: their attention and norms round differently.
BOUND = 1e-5
Record = Callable[[str, object], None]
SAMPLE = {
    ("qwen3_moe", "ct-int4"),
    ("qwen3_moe", "bitsandbytes"),
    ("mixtral", "gptq"),
    ("gpt_oss", "mxfp4"),
    ("glm4_moe", "ct-nvfp4"),
    ("olmoe", "bf16"),
}
# vLLM's latent attention and transformers' differ by more than the bound. There vLLM's own experts are the reference.
LATENT = ("deepseek_v2", "deepseek_v3")
CELLS = sorted(
    {("qwen3_moe", kind) for kind in models.FORMATS}
    | {(family, kind) for family in models.FAMILIES for kind in ("bf16", "ct-int4", "ct-nvfp4")}
    | SAMPLE
)
# transformers' own experts of these cannot be replaced: they are the reference, for unquantised weights.
PLAIN = ("llama4_text",)
CELLS = [(family, kind) for family, kind in CELLS if family not in LATENT + PLAIN]


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> tuple[str, str]:
    if request.param not in SAMPLE and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.mark.parametrize("cell", CELLS, indirect=True, ids=lambda cell: "-".join(cell))
def test_tokens_and_log_probabilities(cell: tuple[str, str], folder: Path, record_property: Record) -> None:
    model = models.converted(*cell, folder)
    got = answers_of_ours(model)
    want = engine.reference(model)
    assert got.tokens == want.tokens
    record_property("distance", got.distance(want))
    assert got.distance(want) <= BOUND


def answers_of_ours(model: Path) -> engine.Answers:
    with engine.engine(model, {"mode": "require"}) as llm:
        assert all(decision.taken for decision in engine.takeover_of(llm).decisions.values())
        return engine.ask(llm)


@pytest.mark.parametrize("family", PLAIN)
def test_the_same_as_transformers_alone(
    family: str, folder: Path, request: pytest.FixtureRequest, record_property: Record
) -> None:
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.plain_model(family, folder)
    got, want = answers_of_ours(model), engine.reference_without_lancebill(model)
    assert got.tokens == want.tokens
    record_property("distance", got.distance(want))
    assert got.distance(want) <= BOUND


@pytest.mark.parametrize("family", LATENT)
def test_the_same_as_the_experts_of_vllm(
    family: str, folder: Path, request: pytest.FixtureRequest, record_property: Record
) -> None:
    if family != LATENT[-1] and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.plain_model(family, folder)
    answers = {}
    for mode in ("off", "require"):
        with engine.engine(model, {"mode": mode}) as llm:
            assert (engine.takeover_of(llm) is None) == (mode == "off")
            answers[mode] = engine.ask(llm)
    assert answers["require"].tokens == answers["off"].tokens
    record_property("distance", answers["require"].distance(answers["off"]))
    assert answers["require"].distance(answers["off"]) <= BOUND
