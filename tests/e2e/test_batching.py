"""Continuous batching of whole models: each answer is the one that `generate` gives alone."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

from lancebill import from_pretrained  # noqa: E402
from lancebill.serving import engine as engines  # noqa: E402
from lancebill.serving.choose_runner import runner  # noqa: E402
from lancebill.serving.engine import Answer, BatchEngine, End, Limits  # noqa: E402
from lancebill.serving.ragged import RaggedModel, SeparateModel  # noqa: E402
from lancebill.serving.recommended import recommended  # noqa: E402
from lancebill.serving.sampling import Sampling  # noqa: E402

WINDOW = {"sliding_window": 6}
MODELS: dict[str, tuple[dict[str, Any], type]] = {
    "qwen3_moe": ({"num_key_value_heads": 2}, RaggedModel),
    "mixtral": (WINDOW, RaggedModel),
    "gpt_oss": ({**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, RaggedModel),  # attention sinks
    "deepseek_v3": ({}, RaggedModel),  # keys and values of different sizes
    "deepseek_v4": ({}, SeparateModel),  # compressed caches
}
PROMPTS = [[5, 9, 1], list(range(2, 40)), [7], list(range(60, 85)), [3, 3, 3, 3, 8]]
LENGTHS = [12, 6, 15, 9, 1]


@pytest.mark.parametrize("family", MODELS)
def test_answers_in_a_batch_are_those_given_alone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more, expected_runner = MODELS[family]
    monkeypatch.setitem(tiny.FAMILIES, family, tiny.FAMILIES[family] | more)
    assert tiny.save_model(transformers, family, tmp_path)
    model = from_pretrained(tmp_path, dtype="float32").eval()
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False)[0, len(prompt) :].tolist()
        for prompt, most in zip(PROMPTS, LENGTHS)
    ]
    chosen = runner(model)
    assert type(chosen) is expected_runner
    for limit in ("LEAST_STEP_TOKENS", "MOST_STEP_TOKENS"):  # prompts take several steps, beside answers under way
        monkeypatch.setattr(engines, limit, 24)
    engine = BatchEngine(chosen, Limits(64))
    ended = [threading.Event() for _ in PROMPTS]
    answers = [
        Answer(prompt, most, Sampling(), lambda event, end=end: end.set() if isinstance(event, End) else None)
        for prompt, most, end in zip(PROMPTS, LENGTHS, ended)
    ]
    engine.submit(answers[:3])
    engine.start()
    ended[1].wait(30)
    engine.submit(answers[3:])
    assert all(end.wait(30) for end in ended) and engine.stop(10)
    assert [answer.tokens for answer in answers] == alone


def test_a_recommended_repetition_penalty_counts_prompt_and_answer(tmp_path: Path) -> None:
    """As transformers' own `generate` does."""
    assert tiny.save_model(transformers, "qwen3_moe", tmp_path)
    model = from_pretrained(tmp_path, dtype="float32").eval()

    def alone(prompt: list[int]) -> list[int]:
        given = torch.tensor([prompt])
        return list(model.generate(given, max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist())

    plain = [alone(prompt) for prompt in PROMPTS]
    model.generation_config.repetition_penalty = 1.5
    expected = [alone(prompt) for prompt in PROMPTS]
    engine = BatchEngine(runner(model), Limits(64))
    ended = [threading.Event() for _ in PROMPTS]
    answers = [
        Answer(prompt, 12, recommended(model), lambda event, end=end: end.set() if isinstance(event, End) else None)
        for prompt, end in zip(PROMPTS, ended)
    ]
    engine.submit(answers)
    engine.start()
    assert all(end.wait(30) for end in ended) and engine.stop(10)
    assert [answer.tokens for answer in answers] == expected != plain
