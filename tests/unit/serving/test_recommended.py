"""What a checkpoint recommends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lancebill.errors import SpecError  # noqa: E402
from lancebill.serving.recommended import not_used, recommended  # noqa: E402
from lancebill.serving.sampling import Sampling  # noqa: E402


def model(**settings: Any) -> Any:
    return SimpleNamespace(generation_config=transformers.GenerationConfig(**settings))


def test_what_is_used() -> None:
    assert recommended(model()) == Sampling()
    assert recommended(model(repetition_penalty=1.1)) == Sampling(repetition_penalty=1.1)
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert recommended(model(**given)) == Sampling(0.6, 0.9, 20, 0.1, repetition_penalty=1.05)
    with pytest.raises(SpecError, match="repetition_penalty: not a positive number"):
        recommended(SimpleNamespace(generation_config=SimpleNamespace(repetition_penalty=-1.0, do_sample=False)))


def test_what_is_not_used_is_said() -> None:
    neutral = {"min_p": 0.0, "typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "eos_token_id": 3}
    assert not_used(model()) == not_used(model(**neutral, do_sample=True, temperature=0.5, top_k=5)) == ""
    line = not_used(model(do_sample=True, typical_p=0.5, no_repeat_ngram_size=3, bad_words_ids=[[5]], max_new_tokens=9))
    assert line.startswith("not used of generation_config: typical_p=0.5, no_repeat_ngram_size=3, bad_words_ids=[[5]]")
    assert line.endswith("max_new_tokens=9")
