"""The most likely token: NumPy's way finds what torch's argmax does."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

from lancebill.errors import NotFinite
from lancebill.serving import sampling
from lancebill.serving.sampling import Sampling, choose, most_likely

ROWS = {
    "largest": [0.0, 3.0, -1.0, 2.0],
    "ties": [1.0, 2.0, 2.0, 2.0],
    "nan": [1.0, float("nan"), 5.0, float("nan")],
    "infinite": [-float("inf"), float("inf"), float("inf"), float("nan")],
    "nothing": [-float("inf")] * 4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_most_likely_tokens_are_those_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(list(ROWS.values())).to(dtype)
    coarse = torch.randint(0, 9, (8, 1000), generator=generator).to(dtype)  # many ties
    for logits in (rows, coarse, coarse[:, ::2], coarse[:0]):
        assert most_likely(logits) == logits.argmax(-1).tolist()


def test_numbers_that_differ_in_their_last_bits_are_told_apart() -> None:
    assert most_likely(torch.tensor([[1.0, 1.0 + 2**-40]], dtype=torch.float64)) == [1]


def test_logits_of_an_inference_step_and_of_one_with_gradients() -> None:
    with torch.inference_mode():
        logits = torch.tensor([[0.0, 1.0]])
    assert most_likely(logits) == most_likely(torch.tensor([[0.0, 1.0]], requires_grad=True)) == [1]


@pytest.mark.parametrize("row", ROWS)
def test_temperature_zero_takes_the_most_likely_token(row: str) -> None:
    logits = torch.tensor(ROWS[row])
    for how in (Sampling(), Sampling(5e-324), Sampling(1e-40, top_p=0.5), Sampling(1e-9, top_k=2)):
        if logits.max().isfinite():
            assert choose(logits, how, (), how.generator()).id == int(logits.argmax())
        else:
            with pytest.raises(NotFinite):
                choose(logits, how, (), how.generator())


def test_large_logits_are_drawn_as_small_ones() -> None:
    how, large = Sampling(1e-6, seed=1), torch.tensor([-3e38, 3e38, 3e38, -float("inf")])
    assert {choose(large, how, (), source).id for source in [how.generator()] for _ in range(50)} == {1, 2}


def test_penalties_come_before_the_choice() -> None:
    how = Sampling(logit_bias={1: -9.0})
    assert choose(torch.tensor([0.0, 3.0, 2.0]), how, (), how.generator()).id == 2
    assert not how.plain and sampling.Sampling().plain


def probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """The plain way: everything is sorted."""
    values, ids = (logits.double() / how.temperature).sort(descending=True, stable=True)
    if how.top_k:
        values, ids = values[: how.top_k], ids[: how.top_k]
    sorted_ones = values.softmax(-1)
    before = sorted_ones.cumsum(-1) - sorted_ones
    sorted_ones = sorted_ones * (before < how.top_p)
    sorted_ones = sorted_ones * (sorted_ones >= how.min_p * sorted_ones[0])
    return torch.zeros(logits.numel(), dtype=torch.float64).index_add(0, ids, sorted_ones / sorted_ones.sum())


HOWS = [
    Sampling(1.0),
    Sampling(0.7, top_p=0.9),
    Sampling(2.0, top_p=0.5),
    Sampling(1.0, top_k=3),
    Sampling(0.5, top_k=99),
]
HOWS += [Sampling(1.5, top_p=0.6, top_k=4), Sampling(2.0, top_p=1e-6)]
HOWS += [Sampling(1.0, min_p=0.2), Sampling(2.0, min_p=1.0), Sampling(1.5, top_p=0.8, top_k=6, min_p=0.3)]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("logits", ["some", "equal", "excluded", "two blocks"])
def test_tokens_are_drawn_as_often_as_the_sorted_distribution_says(
    logits: str, how: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,096 draws at even distances each token gets its share, up to one."""
    monkeypatch.setattr(sampling, "FIRST_SORTED", 5)
    monkeypatch.setattr(sampling, "BLOCK", 8)
    rows = {"some": torch.linspace(-2, 3, 12).flip(0)[torch.randperm(12)], "equal": torch.zeros(7)}
    rows["excluded"] = torch.tensor([1.0, -float("inf"), 2.0, -float("inf"), 0.5])
    rows["two blocks"] = torch.cat([torch.full((8,), -1e30), torch.arange(5.0)])
    draws, expected = 4096, probabilities(rows[logits], how)
    randoms = iter((torch.arange(draws, dtype=torch.float64) + 0.5) / draws)
    monkeypatch.setattr(torch, "rand", lambda *given, **more: next(randoms))
    drawn = [choose(rows[logits], how, (), how.generator()).id for _ in range(draws)]
    found = torch.bincount(torch.tensor(drawn), minlength=expected.numel()) / draws
    assert (found - expected).abs().max() <= 1.01 / draws


def test_the_last_random_number_draws_something_likely() -> None:
    weights = numpy.array([0.1, 0.2, 0.3, 0.0], dtype=numpy.float32)
    assert sampling._drawn(weights, 1 - 2**-53) == 2 and sampling._drawn(weights, 0.0) == 0


def test_a_seed_decides_whatever_runs_beside_it() -> None:
    rows, how = torch.randn(20, 3000), Sampling(1.0, top_p=0.95, seed=3)

    def answer(beside: int) -> list[int]:
        source, others = how.generator(), [replace(how, seed=None).generator() for _ in range(beside)]
        return [[choose(row, how, (), each).id for each in (*others, source)][-1] for row in rows]

    assert answer(0) == answer(3)


def test_no_vocabulary_is_sorted_for_a_likely_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sort = [], numpy.sort
    monkeypatch.setattr(numpy, "sort", lambda values: sizes.append(values.size) or sort(values))
    monkeypatch.setattr(Tensor, "sort", lambda *given, **more: pytest.fail("sorts"))
    logits = torch.arange(50_000.0)
    for how in (Sampling(0.7), Sampling(0.7, top_k=20), Sampling(0.7, top_p=0.95), Sampling(0.7, 0.95, 2000)):
        choose(logits, how, (), how.generator())
    assert sizes == [1024, 1024]


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    processors = pytest.importorskip("transformers").generation.logits_process
    logits, prompt, earlier = torch.randn(3, 50), [4, 4, 7, 9], [9, 30, 31, 30]
    for penalty in (1.3, 0.8, 100.0):
        how = Sampling(repetition_penalty=penalty)
        judge = processors.RepetitionPenaltyLogitsProcessor(penalty)
        expected = judge(torch.tensor([prompt + earlier] * 3), logits.clone())
        for row, right in zip(logits, expected):
            assert torch.equal(sampling._adjusted(row, how, earlier, how.asked(prompt)), right)
            assert choose(row, how, earlier, how.generator(), how.asked(prompt)).id == int(right.argmax())
    assert not how.plain and Sampling().asked(prompt) is None
