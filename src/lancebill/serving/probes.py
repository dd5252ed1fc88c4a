"""Whether a way to run a model gives the logits of the model, tried on a few tokens.

In fp32 two ways differ in the last bits, and everything larger is wrong. In 16 bits rounding alone may change logits by
some percent in a deep model, as much as a little of another sequence would. There it is also tried whether a sequence
gets other logits beside others: that changes no rounding but that of the experts, which other tokens share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lancebill.serving.runners import Runner

PROBES = ((3, 1, 4, 1, 5), (9, 2, 6))  # of the two sequences that are compared; far apart, they are token ids
OTHERS = (8, 7, 0, 2, 8)
SPREAD = 40503  # the first ids of a vocabulary are special tokens, whose logits say little
# Of the norm of the logits. Of eight tiny families the largest was 4e-7 in fp32; with wrong attention it was 2e-3 at
# least, and 7e-2 in the same probe. In 16 bits it was 8e-3, and grows with the depth of a model.
MOST_DIFFERENCE = {torch.float32: 1e-3}
MOST_DIFFERENCE_16 = 0.2
MOST_INFLUENCE = 0.02  # of other sequences in 16 bits: it was 5e-3 at most, and 4e-2 with wrong attention
TIMES_ROUNDING = 4  # what differs by less than that times the rounding of the model itself may be rounding


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype, rounding: float) -> bool:
    """Whether every row is close; a cosine would not see logits of another size, which temperatures do."""
    if found.shape != expected.shape:
        return False
    most = max(MOST_DIFFERENCE.get(dtype, MOST_DIFFERENCE_16), TIMES_ROUNDING * rounding)
    return difference(found, expected) <= min(most, MOST_DIFFERENCE_16)


def difference(found: Tensor, expected: Tensor) -> float:
    """Of the row that differs most. NaN is never small."""
    differences = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(differences.max().nan_to_num(torch.inf))


def probe_tokens(model: Any) -> list[list[int]]:
    vocabulary = int(model.config.get_text_config().vocab_size)
    return [[number * SPREAD % vocabulary for number in each] for each in (*PROBES, OTHERS)]


def probe(candidate: Runner, probes: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
    """Logits of two sequences in every kind of step (prompts, a piece of a prompt beside a single token), and the
    seconds of the last step, which has one token of each: this thread's own, whatever else the machine computes."""
    probes = probes[:2]
    sequences = [candidate.new_sequence() for _ in probes]
    first = candidate.step(sequences, probes)
    second = candidate.step(sequences, [probes[1], probes[0][:1]])
    start = time.thread_time()
    third = candidate.step(sequences[::-1], [probes[0][1:2], probes[1][1:2]])
    return torch.cat([first, second, third]).float(), time.thread_time() - start


def rounding_of(separate: Runner, probes: Sequence[Sequence[int]], expected: Tensor) -> float:
    """How far the model's own logits are from each other if it reads the same tokens in one step and in several."""
    first, second = probes[:2]
    whole = [[*second, *first[:2]], [*first, *second, second[1]]]  # the sequences of `probe` at its end
    found = [separate.step([separate.new_sequence()], [tokens])[0] for tokens in whole]
    return difference(torch.stack(found).float(), expected[-2:])


def independent(candidate: Runner, probes: Sequence[Sequence[int]], dtype: torch.dtype, rounding: float) -> bool:
    """Whether a sequence gets the same logits whatever is before and after it in the same steps."""
    if dtype in MOST_DIFFERENCE:
        return True  # `agree` has shown it
    own, one, other = probes[1], probes[0], probes[2]
    found = [_between(candidate, own, neighbours) for neighbours in ((one, other), (other, one))]
    return difference(found[0], found[1]) <= max(MOST_INFLUENCE, TIMES_ROUNDING * rounding)


def _between(candidate: Runner, own: Sequence[int], neighbours: tuple[Sequence[int], Sequence[int]]) -> Tensor:
    """Logits of one sequence after a prompt and after one more token."""
    before, after = neighbours
    sequences = [candidate.new_sequence() for _ in range(3)]
    first = candidate.step(sequences, [before, own, after])[1]
    second = candidate.step(sequences, [before[:1], own[:1], after[:1]])[1]
    return torch.stack([first, second]).float()
