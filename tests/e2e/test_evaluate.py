"""Perplexity, exact match and paired tests, compared with direct sums and with enumeration of all outcomes."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.errors import MalformedFile, SpecError
from lancebill.evaluate import questions as q
from lancebill.evaluate.paired import bootstrap, mcnemar
from lancebill.evaluate.perplexity import batches, perplexity, windows
from lancebill.evaluate.run import EvalResult, Variant


class Bigram:
    """A model whose next token depends only on the previous one, so every window gives the same losses."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int) -> None:
        self.table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.longest = 0

    def __call__(self, ids: Tensor, logits_to_keep: int = 0) -> Any:
        self.longest = max(self.longest, ids.shape[1])
        logits = self.table[ids]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


@pytest.mark.parametrize(
    ("length", "window", "stride"), [(2, 2, 1), (50, 8, 8), (50, 8, 3), (7, 100, 50), (33, 16, 16)]
)
def test_every_token_is_scored_once(length: int, window: int, stride: int) -> None:
    scored = [t for begin, end, first in windows(length, window, stride) for t in range(first, end)]
    assert scored == list(range(1, length))
    assert all(end - begin <= window and begin < first for begin, end, first in windows(length, window, stride))
    tokens = torch.randint(0, 11, (length,), generator=torch.Generator().manual_seed(1))
    model = Bigram(11)
    found = perplexity(model, tokens, window=window, stride=stride)
    chances = model.table.double().softmax(-1)
    want = math.exp(-sum(math.log(chances[a, b]) for a, b in itertools.pairwise(tokens.tolist())) / (length - 1))
    assert found.value == pytest.approx(want, rel=1e-5)
    assert model.longest <= window


@pytest.mark.parametrize(("length", "window", "stride"), [(50, 8, 8), (50, 8, 3), (7, 100, 50), (33, 16, 16)])
def test_batched_windows_give_the_same_losses(length: int, window: int, stride: int) -> None:
    tokens = torch.randint(0, 11, (length,), generator=torch.Generator().manual_seed(1))
    alone = perplexity(Bigram(11), tokens, window=window, stride=stride)
    for size in (2, 3, 100):
        assert torch.equal(
            perplexity(Bigram(11), tokens, window=window, stride=stride, batch=size).losses, alone.losses
        )
        together = list(batches(windows(length, window, stride), size))
        assert [span for spans in together for span in spans] == list(windows(length, window, stride))
        assert all(len(spans) <= size for spans in together)
        assert all(len({(end - begin, end - first) for begin, end, first in spans}) == 1 for spans in together)
    assert max(map(len, batches(windows(50, 8, 8), 3))) == 3


def test_no_windows_have_no_batches() -> None:
    assert list(batches([], 4)) == []


def test_invalid_windows_are_refused() -> None:
    with pytest.raises(SpecError, match="stride"):
        list(windows(10, 4, 5))
    with pytest.raises(SpecError, match="two tokens"):
        perplexity(Bigram(3), torch.tensor([1]))


def test_mcnemar_equals_enumeration_of_coin_tosses() -> None:
    a = torch.tensor([1, 1, 1, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
    b = torch.tensor([1, 0, 0, 0, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
    split = 6  # five right only in a, one right only in b
    tosses = [sum(toss) for toss in itertools.product((0, 1), repeat=split)]
    want = sum(t <= 1 or t >= split - 1 for t in tosses) / len(tosses)
    assert mcnemar(a, b) == pytest.approx(want)
    assert mcnemar(a, a) == 1.0


def test_bootstrap_distinguishes_a_shift_from_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(400, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(400, generator=generator, dtype=torch.float64) * 0.1
    shifted, same = bootstrap(base, base + noise + 0.05), bootstrap(base, base + noise - noise.mean())
    assert shifted.p < 0.01 and shifted.mean == pytest.approx(0.05, abs=0.02)
    assert shifted.stderr == pytest.approx(0.1 / 20, rel=0.2)
    assert same.p > 0.5
    with pytest.raises(SpecError):
        bootstrap(base, base[:3])


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("5 + 5 = 10\n#### 10", "10", "10"),
        ("It costs $1,234.50.", None, "1234.5"),
        ("#### -3 apples, or 7", "-3", "7"),
        ("no idea", None, None),
        ("The answer is 18.", None, "18"),
    ],
)
def test_numbers_are_extracted_from_answers(text: str, strict: str | None, flexible: str | None) -> None:
    assert (q.strict(text), q.flexible(text)) == (strict, flexible)


def test_questions_and_scores(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(3)]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    questions = q.read_questions(file)
    assert q.prompt(questions[2], questions[:1]).endswith("#### 0\n\nQuestion: What is 2 + 2?\nAnswer:")
    scores = q.score(["#### 0", "it is 2", "5"], questions)
    assert scores["strict"].right.tolist() == [True, False, False]
    assert scores["flexible"].right.tolist() == [True, True, False]
    first, second = (
        EvalResult(Variant(), scores=scores),
        EvalResult(Variant("mxfp4"), scores=q.score(["#### 0"] * 3, questions)),
    )
    assert second.describe(first)["flexible"]["p"] == 1.0
    for line in ("{", '{"question": "x"}', '{"question": "x", "answer": "no number"}'):
        file.write_text(line)
        with pytest.raises(MalformedFile, match="line 1"):
            q.read_questions(file)


def test_variants_are_parsed() -> None:
    assert Variant.parse("mxfp4/int8/reference") == Variant("mxfp4", "int8", "reference")
    assert Variant.parse("stored") == Variant()
    with pytest.raises(SpecError):
        Variant.parse("a/b/c/d/e")
