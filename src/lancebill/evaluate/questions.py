"""Questions with one right number, in the form of GSM8K: JSON lines of `question` and `answer`.

The reference answer ends in `#### 42`. A model's answer counts strictly where it ends its text in that
form, and flexibly where the last number it names is the right one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lancebill.errors import MalformedFile

_STRICT = re.compile(r"####\s*(-?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")


@dataclass(frozen=True)
class Question:
    """A question and its solution."""

    text: str
    worked: str  # the reference's own solution, as shown to the model in examples

    @property
    def answer(self) -> str:
        found = strict(self.worked)
        assert found is not None
        return found


def read_questions(path: Path) -> list[Question]:
    """Every line checked: a question without an answer is an error here, not a wrong answer later."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise MalformedFile("not a line of JSON", where=where, got=error.msg) from None
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
            raise MalformedFile("a line has a question and an answer", where=where)
        if strict(row["answer"]) is None:
            raise MalformedFile("the answer does not end in '#### number'", where=where)
        found.append(Question(row["question"], row["answer"]))
    if not found:
        raise MalformedFile("the file has no questions", where=str(path), expected="a JSON object in each line")
    return found


def read_text(path: Path) -> str:
    """A text file; bytes that are no text are told from it before a model is loaded."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFile("not a text in UTF-8", where=f"{path}, byte {error.start}") from None


def strict(text: str) -> str | None:
    """The number after `####`."""
    match = _STRICT.search(text)
    return None if match is None else normal(match[1])


def flexible(text: str) -> str | None:
    """The last number of the text."""
    numbers = _NUMBER.findall(text)
    return normal(numbers[-1]) if numbers else None


def normal(number: str) -> str:
    """`$1,234.50.` as `1234.5`: how numbers are compared."""
    plain = number.replace("$", "").replace(",", "").rstrip(".")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return plain or "0"


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """The question after `examples` with their solutions."""
    shown = [f"Question: {e.text}\nAnswer: {e.worked}\n" for e in examples]
    return "\n".join([*shown, f"Question: {question.text}\nAnswer:"])


@dataclass(frozen=True)
class Score:
    """Right or wrong for each question, under one way to read answers."""

    right: Tensor  # [questions] bool

    @property
    def value(self) -> float:
        return float(self.right.double().mean())

    @property
    def stderr(self) -> float:
        count = self.right.numel()
        return math.sqrt(self.value * (1 - self.value) / max(1, count - 1))

    def __str__(self) -> str:
        return f"{self.value:.1%} ± {self.stderr:.1%}"


def score(answers: Sequence[str], questions: Sequence[Question]) -> dict[str, Score]:
    """Strict and flexible scores of answers in the questions' order."""
    made = {}
    for name, read in (("strict", strict), ("flexible", flexible)):
        right = [read(answer) == question.answer for answer, question in zip(answers, questions)]
        made[name] = Score(torch.tensor(right))
    return made
