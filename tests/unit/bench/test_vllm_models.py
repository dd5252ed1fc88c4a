"""What vLLM's load test needs of the models that benchmarks serve."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import vllm
from benchmarks.models import write_tokenizer
from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.resolve.expected_headers import expected_headers
from lancebill.checkpoint.resolve.naming import find_family


@pytest.mark.parametrize("first", [0, 990, 1500])
def test_text_is_as_long_as_its_ids_and_within_the_bound_of_vllm(tmp_path: Path, first: int) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, 2048, [])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = list(range(first, first + 512))
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    # vLLM answers 400 to a text above this, before it makes tokens of it
    assert len(text) <= len(ids) * max(map(len, tokenizer.get_vocab()))


def test_stacked_experts_have_the_names_and_bytes_that_the_config_suggests() -> None:
    config = config_of_model(vllm.MODELS["tiny-qwen3"])
    expected = expected_headers(config, find_family(config.model), 1)
    made = {name: math.prod(shape) for name, _, shape in vllm.stacked_experts(dict(config.model), 1)}
    assert made == {name: math.prod(stored.shape) for name, stored in expected.items()}
