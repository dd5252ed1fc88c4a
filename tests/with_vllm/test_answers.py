"""vLLM with our experts gives the tokens of transformers with our experts, for all families x formats, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import engine
import kinds
import models

from lancebill.errors import CannotEncode
from lancebill.formats import registry

# Log-probabilities of equal computations in two engines, in fp32: their attention and norms round differently.
BOUND = 1e-5
# One cell of Gemma 4 (BitNet) is 1.03e-5 from transformers on an x86 CPU, the other 24 are within the bound.
BOUNDS = {"gemma4_text": 2e-5}
Record = Callable[[str, object], None]
SAMPLE = {
    ("qwen3_moe", "ct-int4"),
    ("qwen3_moe", "bitsandbytes"),
    ("mixtral", "gptq"),
    ("gpt_oss", "mxfp4"),
    ("glm4_moe", "ct-nvfp4"),
    ("olmoe", "bf16"),
    ("deepseek_v3", "bf16"),
}
# transformers' own experts of these cannot be replaced: they are the reference, with dequantised weights.
OWN_EXPERTS = ("llama4_text",)
# Outside the experts vLLM and transformers differ by more than the bound, with and without lancebill. There vLLM's own
# experts are the reference, with dequantised weights.
OTHER_MODELS = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe")
# Families that are judged in another way, or whose layer of experts is that of another one: three kinds are enough.
FEW = (*OWN_EXPERTS, *OTHER_MODELS, "granitemoeshared", "granitemoehybrid", "granitemoe_swa")
FEW_KINDS = ("bf16", "ct-int4", "ct-nvfp4")
# Cells that no checkpoint can have, and why.
WITHOUT_CELL = dict.fromkeys(
    (("dbrx", "mxfp4"), ("dbrx", "mlx")), "these formats stack experts, and Dbrx has no names for stacked matrices"
)
# Formats without a column in the matrix, and why.
WITHOUT_KIND = {
    "gguf": "whole models of two architectures are read from it: test_gguf",
    "deepseek_v4": "only DeepSeek-V4 is stored in it, whose attention needs AMX in vLLM's CPU build",
}


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> tuple[str, str]:
    if request.param not in SAMPLE and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    chosen: tuple[str, str] = request.param
    return chosen


CELLS = [(family, kind) for family in models.FAMILIES for kind in (FEW_KINDS if family in FEW else kinds.KINDS)]
CELLS = [cell for cell in CELLS if cell not in WITHOUT_CELL]


@pytest.mark.parametrize("cell", CELLS, indirect=True, ids=lambda cell: "-".join(cell))
def test_tokens_and_log_probabilities(cell: tuple[str, str], folder: Path, record_property: Record) -> None:
    family, kind = cell
    model = models.converted(family, kind, folder)
    with engine.engine(model, {"mode": "require"}) as llm:
        assert all(decision.taken for decision in engine.takeover_of(llm).decisions.values())
        got = engine.ask(llm)
    want = reference(family, kind, folder)
    record_property("distance", got.distance(want))
    assert got.tokens == want.tokens
    assert got.distance(want) <= BOUNDS.get(family, BOUND)


def reference(family: str, kind: str, folder: Path) -> engine.Answers:
    if family in OWN_EXPERTS:
        return engine.reference_without_lancebill(models.dequantised(family, kind, folder))
    if family not in OTHER_MODELS:
        return engine.reference(models.converted(family, kind, folder))
    with engine.engine(models.dequantised(family, kind, folder), {"mode": "off"}) as llm:
        assert engine.takeover_of(llm) is None
        return engine.ask(llm)


@pytest.mark.parametrize("cell", WITHOUT_CELL, ids=lambda cell: "-".join(cell))
def test_a_cell_that_cannot_be(cell: tuple[str, str], folder: Path) -> None:
    with pytest.raises(CannotEncode, match="cannot name stacked tensors"):
        models.converted(*cell, folder)


def test_every_format_has_a_kind() -> None:
    written = {kinds.target_of(kind).format.name for kind in kinds.KINDS}
    assert written | set(WITHOUT_KIND) == set(registry()) and not written & set(WITHOUT_KIND)
