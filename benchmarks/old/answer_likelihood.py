"""How likely a server's model finds the reference solutions of questions: a score also of models that solve none.

The server's completions page must support `echo` with `logprobs`, as vLLM's does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.evaluate.load import Server
from lancebill.evaluate.paired import bootstrap
from lancebill.evaluate.questions import Question, prompt


@dataclass(frozen=True)
class Reading:
    """Of one reference solution: nats of each token, and the token that the model finds likeliest in its place."""

    nats: tuple[float, ...]
    likeliest: tuple[str, ...]


def read_solutions(server: Server, questions: Sequence[Question], concurrency: int) -> list[Reading]:
    """Of each question's solution after the question alone, without examples."""
    model = server.model()
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda question: _read(server, model, question), questions))


def _read(server: Server, model: str, question: Question) -> Reading:
    text = prompt(question, ())
    body = {"model": model, "prompt": f"{text} {question.worked}", "echo": True, "logprobs": 1, "max_tokens": 0}
    response = server.request("POST", "completions", {**body, "temperature": 0})
    if response.status != 200:
        raise LaunchError("the server refused a solution", got=f"{response.status} {response.read(300)!r}")
    found = json.loads(response.read())["choices"][0]["logprobs"]
    places = [i for i, offset in enumerate(found["text_offset"]) if offset >= len(text)]
    top = (found["top_logprobs"][i] for i in places)
    return Reading(
        tuple(-found["token_logprobs"][i] for i in places),
        tuple(max(each, key=each.__getitem__) for each in top),
    )


def described(readings: Sequence[Reading], first: Sequence[Reading]) -> dict[str, Any]:
    """Mean nats of a token; the difference to the first variant, of means of solutions; and equal likeliest tokens."""
    mine = torch.tensor([nats for each in readings for nats in each.nats], dtype=torch.float64)
    facts: dict[str, Any] = {"tokens": mine.numel(), "nats": float(mine.mean())}
    if readings is first:
        return facts
    pair = bootstrap(_means(first), _means(readings))
    equal = [
        a == b for x, y in zip(first, readings, strict=True) for a, b in zip(x.likeliest, y.likeliest, strict=True)
    ]
    facts |= {"difference": pair.mean, "difference_stderr": pair.stderr, "p": pair.p}
    return facts | {"same_likeliest": sum(equal) / len(equal)}


def _means(readings: Sequence[Reading]) -> Tensor:
    """Of each solution: its tokens are not independent of each other."""
    return torch.tensor([sum(each.nats) / len(each.nats) for each in readings], dtype=torch.float64)
