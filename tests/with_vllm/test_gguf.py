"""`.gguf` files in vLLM: the experts are lancebill's, everything else is dequantised."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("gguf")

import engine
import models
import torch
import transformers
from tiny_gguf import write

from lancebill.errors import UnsupportedProblem

ARCHITECTURES = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe"}


def gguf_model(architecture: str, folder: Path) -> Path:
    """A tiny model as a file, alone in a folder. The writer rounds the model's tensors to what it writes."""
    place = folder / architecture
    place.mkdir(exist_ok=True)
    source = models.plain_model(ARCHITECTURES[architecture], folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    write(model, architecture, place / "model.gguf")
    return place / "model.gguf"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_is_a_model(architecture: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if architecture != "qwen3moe" and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    file = gguf_model(architecture, folder)
    with engine.engine(file, {"mode": "require"}, skip_tokenizer_init=False) as llm:
        assert "int8" in engine.takeover_of(llm).summary()
        assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("abcd")) == "abcd"
        got = engine.ask(llm)
    want = engine.reference(file)
    assert got.tokens == want.tokens and got.distance(want) <= 1e-5


def test_a_folder_with_a_file(folder: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    file = gguf_model("qwen3moe", folder)
    with engine.engine(file.parent, {"mode": "require"}) as llm:
        assert engine.ask(llm).tokens == engine.reference(file).tokens
    with pytest.raises(UnsupportedProblem, match="vLLM cannot read the experts"), engine.engine(file, {"mode": "off"}):
        pass
