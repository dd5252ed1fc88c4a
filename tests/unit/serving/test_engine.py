"""The engine with a model that only counts: joining, leaving, limits, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.errors import LaunchError, QueueFull
from lancebill.serving import engine as engines
from lancebill.serving.engine import Answer, BatchEngine, End, Limits
from lancebill.serving.sampling import Sampling, Token

VOCABULARY = 50
LIMIT = 60.0  # seconds: nothing is expected to take so long, however busy the machine is


class Counting:
    """Its next token is the sum of all tokens so far; remembers what each step held."""

    whole_prompts = False

    def __init__(self, seconds: float = 0.0, seconds_per_token: float = 0.0) -> None:
        self.seconds, self.seconds_per_token, self.steps = seconds, seconds_per_token, list[list[int]]()
        self.fail_at: int | None = None
        self.held = list[int]()  # tokens of all sequences, after each step

    def new_sequence(self) -> list[int]:
        return []

    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Tensor:
        self.steps.append([len(each) for each in tokens])
        if len(self.steps) == self.fail_at:
            raise RuntimeError("out of memory")
        time.sleep(self.seconds + self.seconds_per_token * sum(map(len, tokens)))
        logits = torch.zeros(len(tokens), VOCABULARY)
        for row, (sequence, new) in enumerate(zip(sequences, tokens)):
            sequence.extend(new)
            logits[row, sum(sequence) % VOCABULARY] = 1
        self.held.append(sum(map(len, sequences)))
        return logits


class Followed(Answer):
    """An answer that collects its own events."""

    def __init__(self, prompt: Sequence[int], most: int = 5, how: Sampling | None = None) -> None:
        self.got: list[Token | End] = []
        self.ended = threading.Event()
        super().__init__(prompt, most, how or Sampling(), self.collect)

    def collect(self, event: Token | End) -> None:
        self.got.append(event)
        if isinstance(event, End):
            self.ended.set()

    def wait(self) -> tuple[list[int], str]:
        assert self.ended.wait(LIMIT)
        *tokens, end = self.got
        assert isinstance(end, End)
        return [token.id for token in tokens if isinstance(token, Token)], end.reason


def alone(prompt: Sequence[int], most: int, ends: Sequence[int] = ()) -> tuple[list[int], str]:
    total, tokens = sum(prompt), list[int]()
    while len(tokens) < most:
        token = total % VOCABULARY
        if token in ends:
            return tokens, "stop"
        tokens.append(token)
        total += token
    return tokens, "length"


def running(model: Counting, ends: Sequence[int] = (), **limits: int) -> BatchEngine:
    return BatchEngine(model, Limits(4096, **limits), ends).start()


def limit_steps(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Every step reads up to so many tokens of prompts."""
    for limit in ("LEAST_STEP_TOKENS", "MOST_STEP_TOKENS"):
        monkeypatch.setattr(engines, limit, tokens)


def test_answers_that_join_and_leave_are_those_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_steps(monkeypatch, 8)
    model = Counting(0.001)
    engine = running(model, ends=[30], running=4, cached_tokens=100)
    answers = [Followed(range(1, 2 + i * 3 % 17), 1 + i * 5 % 11) for i in range(20)]
    for answer in answers:
        engine.submit([answer])
    assert [answer.wait() for answer in answers] == [alone(a.prompt, a.most, [30]) for a in answers]
    assert any(len(step) == 4 for step in model.steps) and all(len(step) <= 4 for step in model.steps)
    assert {end for _, end in (answer.wait() for answer in answers)} == {"stop", "length"}
    counted = engine.counters()
    assert counted.prompt_tokens == sum(len(answer.prompt) for answer in answers) and counted.running == 0
    assert engine.stop(LIMIT)


def test_a_short_prompt_does_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_steps(monkeypatch, 10)
    model = Counting()
    engine = BatchEngine(model, Limits(4096))
    long, short = Followed([1] * 100, 1), Followed([1] * 8, 2)
    engine.submit([long, short])
    engine.start()
    long.wait()
    assert model.steps[:4] == [[5, 5], [5, 3], [10, 1], [10]]
    engine.stop(LIMIT)


def test_some_models_read_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_steps(monkeypatch, 10)
    model = Counting()
    model.whole_prompts = True
    engine = BatchEngine(model, Limits(4096))
    engine.submit([Followed([1] * 100, 2), long := Followed([1] * 200, 2)])
    engine.start()
    long.wait()
    assert model.steps == [[100, 200], [1, 1]] and engine.stop(LIMIT)


def test_a_step_reads_as_much_of_a_prompt_as_its_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for step_seconds, seconds_per_token, most in ((LIMIT, 1e-6, 1024), (0.06, 2e-4, 300), (1e-9, 1e-6, 128)):
        monkeypatch.setattr(engines, "STEP_SECONDS", step_seconds)
        model = Counting(seconds_per_token=seconds_per_token)
        engine = BatchEngine(model, Limits(4096))
        under_way, long = Followed([1], 4096), Followed([1] * 3000, 1)
        engine.submit([under_way, long])
        engine.start()
        long.wait()
        engine.stop(LIMIT)
        reading = [step[1] for step in model.steps if len(step) == 2][:-1]
        assert max(reading) <= most and min(reading) >= 63  # two prompts share the first 128
        assert most == 300 or max(reading) == most


def test_answers_that_come_together_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GATHER_SECONDS", 2 * LIMIT)
    model = Counting()
    engine = running(model)
    first, second, late = Followed([1, 2], 3), Followed([3], 3), Followed([4], 2)
    with engine.arriving():
        engine.submit([first])
        time.sleep(0.02)
        assert model.steps == []
        engine.submit([second])
    second.wait()
    assert model.steps == [[2, 1], [1, 1], [1, 1]]
    model.seconds = 0.01
    first = Followed([1], 1000)
    engine.submit([first])
    while not first.got:
        time.sleep(0.001)
    with engine.arriving():  # an answer under way does not wait for it
        engine.submit([late])
        late.wait()
    engine.stop(LIMIT)


def test_one_that_takes_long_to_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GATHER_SECONDS", 0.05)
    engine = running(Counting())
    answer = Followed([1], 1)
    with engine.arriving():
        start = time.monotonic()
        engine.submit([answer])
        answer.wait()
        assert time.monotonic() - start >= 0.05
    with engine.arriving():
        monkeypatch.setattr(engines, "GATHER_SECONDS", 2 * LIMIT)
        engine.submit([Followed([1], 1)])
        assert engine.stop(LIMIT), "a stopped engine gathers no more"


def test_cancelled_answers_leave_and_cost_nothing() -> None:
    model = Counting(0.002)
    engine = running(model)
    gone, kept = Followed([1], 4000), Followed([2], 30)
    engine.submit([gone, kept])
    while not gone.got:
        time.sleep(0.001)
    engine.cancel([gone])
    kept.wait()
    assert len(gone.got) < 4000 and engine.counters().cancelled == 1
    steps = len(model.steps)
    time.sleep(0.05)
    assert len(model.steps) == steps, "an idle engine must not call the model"
    engine.stop(LIMIT)


def test_limits() -> None:
    engine = running(Counting(0.002), waiting=3, running=1)
    first = Followed([1], 1000)
    engine.submit([first])
    while not first.got:
        time.sleep(0.001)
    engine.submit([Followed([1]), Followed([1])])
    with pytest.raises(QueueFull):
        engine.submit([Followed([1]), Followed([1])])  # all or none
    assert engine.counters().waiting == 2
    assert engine.stop(LIMIT)
    assert first.wait()[1] == "error", "nobody waits for a stopped engine"
    late = Followed([1])
    engine.submit([late])
    assert late.wait()[1] == "error"


def test_a_step_that_fails_costs_its_answers_only() -> None:
    model = Counting()
    model.fail_at = 3
    engine = running(model)
    lost, later = Followed([1], 10), Followed([2], 10)
    engine.submit([lost])
    assert lost.wait()[1] == "error"
    engine.submit([later])
    assert later.wait() == alone([2], 10)
    engine.stop(LIMIT)


class Poisoned(Counting):
    """A step with a sequence that begins with 7 fails."""

    error: Exception = LaunchError("layer 3 failed")

    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Tensor:
        if any([*sequence, *new][0] == 7 for sequence, new in zip(sequences, tokens)):
            self.steps.append([len(each) for each in tokens])
            raise self.error
        return super().step(sequences, tokens)


@pytest.mark.parametrize("error", [LaunchError("layer 3 failed"), RuntimeError("bad request"), MemoryError()])
def test_an_answer_that_makes_steps_fail_ends_alone(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    model = Poisoned()
    model.error = error
    engine = BatchEngine(model, Limits(4096))
    before, bad, after = Followed([1], 10), Followed([7], 10), Followed([2], 10)
    engine.submit([before, bad, after])
    engine.start()
    assert bad.wait() == ([], "error") and [before.wait(), after.wait()] == [alone([1], 10), alone([2], 10)]
    assert engine.alive and not engine.failed
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "a step of 3 answers failed", "a step of 1 answers failed",
    ]  # fmt: skip
    late = Followed([3], 5)
    engine.submit([late])
    assert late.wait() == alone([3], 5) and engine.stop(LIMIT)


def test_a_dead_device_ends_the_engine_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that `meta` computes can be read, as nothing of a GPU after an illegal access."""
    model = Poisoned()
    model.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    engine = BatchEngine(model, Limits(4096), device="meta")
    lost, other = Followed([7]), Followed([1], 50)
    engine.submit([lost, other])
    engine.start()
    assert [lost.wait()[1], other.wait()[1]] == ["error", "error"]
    engine._thread.join(LIMIT)
    assert engine.failed and not engine.alive
    (record,) = caplog.records
    assert "computes nothing any more" in record.message and "meta" in record.message


def finish(engine: BatchEngine, answers: Sequence[Followed]) -> None:
    """All are the answers given alone, and nothing is left."""
    assert [answer.wait() for answer in answers] == [alone(answer.prompt, answer.most) for answer in answers]
    counted = engine.counters()
    assert (counted.running, counted.waiting, counted.paused) == (0, 0, 0)
    assert counted.prompt_tokens == sum(len(answer.prompt) for answer in answers)
    assert engine.stop(LIMIT)


def test_answers_that_may_get_long_run_together() -> None:
    """Eight that may fill the whole context, in room for four of these; they are as short as most are."""
    model = Counting()
    engine = BatchEngine(model, Limits(1 << 15), ends=[5])
    answers = [Followed([1, 3], (1 << 15) - 2) for _ in range(8)]  # 4, 8, 16 ...
    ending = [Followed([0, 5], 1 << 15) for _ in range(8)]
    engine.submit([*answers, *ending])
    engine.start()
    for answer in ending:
        assert answer.wait() == ([], "stop")
    assert model.steps[0] == [2] * 16
    engine.cancel(answers)
    assert engine.stop(LIMIT)


@pytest.mark.parametrize("share", [1000, 7])
@pytest.mark.parametrize("growth", [1, 3, 256])
def test_the_newest_answers_wait_when_all_have_become_long(
    growth: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "GROWTH", growth)
    limit_steps(monkeypatch, share)
    model = Counting()
    engine = BatchEngine(model, Limits(4096, cached_tokens=100))
    answers = [Followed(range(1, 4 + i), 40 + i * 7 % 30) for i in range(9)]
    engine.submit(answers[:5])
    engine.start()
    engine.submit(answers[5:])
    finish(engine, answers)
    assert max(model.held) <= 100 and (engine.counters().reread_tokens > 0) == (growth < 256)


def test_the_oldest_answer_goes_on_whatever_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GROWTH", 1)
    model = Counting()
    engine = BatchEngine(model, Limits(4096, cached_tokens=50))
    first, second = Followed([1], 120), Followed([2], 60)
    engine.submit([first, second])
    engine.start()
    finish(engine, [first, second])
    # Both while there is room, the first one to its end, then what the second one had as one prompt.
    assert [len(step) for step in model.steps] == [2] * 25 + [1] * (95 + 35) and model.steps[120] == [26]
    assert engine.counters().reread_tokens == 26


def test_paused_answers_are_counted_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GROWTH", 1)
    model = Counting(0.002)
    engine = running(model, cached_tokens=60, waiting=2)
    long, gone, last = Followed([1], 3000), Followed([2], 3000), Followed([3], 20)
    engine.submit([long, gone])
    while not engine.counters().paused:
        time.sleep(0.001)
    counted = engine.counters()
    assert (counted.running, counted.waiting, counted.paused) == (1, 0, 1)
    said = len(gone.got)
    engine.submit([last, Followed([4])])  # a paused answer takes no place of the queue
    with pytest.raises(QueueFull):
        engine.submit([Followed([4])])
    engine.cancel([gone])
    while engine.counters().cancelled == 0:
        time.sleep(0.001)
    assert len(gone.got) == said and engine.counters().paused == 0
    engine.cancel([long])
    assert last.wait() == alone([3], 20)
    assert engine.stop(LIMIT)


def test_a_stopped_engine_ends_paused_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GROWTH", 1)
    engine = running(Counting(0.002), cached_tokens=60)
    answers = [Followed([1], 3000), Followed([2], 3000)]
    engine.submit(answers)
    while not engine.counters().paused:
        time.sleep(0.001)
    assert engine.stop(LIMIT)
    assert [answer.wait()[1] for answer in answers] == ["error"] * 2


class Odd(Counting):
    """The logits of a sequence that begins with 7 are not numbers, or its step does what nobody expects."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Tensor:
        logits = super().step(sequences, tokens)
        for row, sequence in enumerate(sequences):
            if sequence[0] == 7:
                logits[row, 3] = self.logit
        return logits


@pytest.mark.parametrize("how", [Sampling(), Sampling(0.7), Sampling(0.7, top_p=0.5), Sampling(logit_bias={1: 1.0})])
@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_end_their_answer_only(logit: float, how: Sampling) -> None:
    engine = running(Odd(logit))
    wrong, right = Followed([7, 1], 5, how), Followed([2], 10)
    engine.submit([wrong, right])
    assert wrong.wait() == ([], "error") and right.wait() == alone([2], 10)
    assert engine.stop(LIMIT) and not engine.failed


def test_temperatures_that_are_almost_zero_are_greedy() -> None:
    engine = running(Counting())
    answers = [Followed([2], 5, Sampling(temperature)) for temperature in (1e-9, 1e-38, 1e-45, 5e-324)]
    engine.submit(answers)
    assert [answer.wait() for answer in answers] == [alone([2], 5)] * 4
    assert engine.stop(LIMIT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting()
    monkeypatch.setattr(model, "step", lambda *given: 1 // 0)
    engine, lost = running(model), Followed([1])
    engine.submit([lost])
    assert lost.wait()[1] == "error"
    engine._thread.join(LIMIT)
    assert engine.failed and not engine.alive
    healthy = running(Counting())
    assert healthy.stop(LIMIT) and not healthy.failed
