"""Questions whose answer is one number, in GSM8K's format: JSON lines with `question` and `answer`.

The reference answer ends in `#### 42`. The strict score takes the number after `####` in the model's text; the
flexible score takes the last number in it.
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
    worked: str  # the full reference solution, shown to the model in few-shot examples

    @property
    def answer(self) -> str:
        number = strict(self.worked)
        assert number is not None
        return number


def read_questions(path: Path) -> list[Question]:
    """All questions of a file; raises if a line has no question or no answer."""
    questions = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise MalformedFile("not a line of JSON", where=where, got=error.msg) from None
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
            raise MalformedFile("the line needs the strings 'question' and 'answer'", where=where)
        if strict(row["answer"]) is None:
            raise MalformedFile("the answer does not end in '#### number'", where=where)
        questions.append(Question(row["question"], row["answer"]))
    if not questions:
        raise MalformedFile("the file has no questions", where=str(path), expected="a JSON object in each line")
    return questions


def read_text(path: Path) -> str:
    """The content of a text file; raises if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFile("not a UTF-8 text", where=f"{path}, byte {error.start}") from None


def strict(text: str) -> str | None:
    """The number after `####`."""
    match = _STRICT.search(text)
    return None if match is None else normal(match[1])


def flexible(text: str) -> str | None:
    """The last number of the text."""
    numbers = _NUMBER.findall(text)
    return normal(numbers[-1]) if numbers else None


def normal(number: str) -> str:
    """A number in the form in which answers are compared: `$1,234.50.` becomes `1234.5`."""
    plain = number.replace("$", "").replace(",", "").rstrip(".")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return plain or "0"


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """A few-shot prompt: `examples` with their solutions, then the question."""
    shown = [f"Question: {e.text}\nAnswer: {e.worked}\n" for e in examples]
    return "\n".join([*shown, f"Question: {question.text}\nAnswer:"])


@dataclass(frozen=True)
class Score:
    """Right or wrong for each question, read either strictly or flexibly."""

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
    """The strict and the flexible score; `answers` are in the order of `questions`."""
    scores = {}
    for name, read_number in (("strict", strict), ("flexible", flexible)):
        right = [read_number(answer) == question.answer for answer, question in zip(answers, questions)]
        scores[name] = Score(torch.tensor(right, dtype=torch.bool, device="cpu"))
    return scores
