"""The most likely token: NumPy's way finds what torch's argmax does."""

from __future__ import annotations

import pytest
import torch

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
