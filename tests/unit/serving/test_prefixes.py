"""Prompts that start equally: answers are those without sharing, and what is kept stays within its limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

from test_engine import LIMIT, Counting, Followed, limit_steps  # noqa: E402

from lancebill.serving import engine as engines  # noqa: E402
from lancebill.serving import prefixes  # noqa: E402
from lancebill.serving.choose_runner import runner  # noqa: E402
from lancebill.serving.engine import BatchEngine, Counters, Limits  # noqa: E402
from lancebill.serving.prefixes import LEAST_SHARED, MOST_KEPT, Prefixes  # noqa: E402
from lancebill.serving.ragged import FIRST_CAPACITY, KeysValues, RaggedModel, SeparateModel  # noqa: E402
from lancebill.serving.sampling import Sampling  # noqa: E402

SIZE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 48, "max_position_embeddings": 1024,
}  # fmt: skip
SYSTEM = [(7 * i + 3) % 48 for i in range(40)]


def tiny(**more: int) -> Any:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZE, **more)).eval()


@pytest.fixture(scope="module")
def model() -> RaggedModel:
    found = runner(tiny(sliding_window=12))  # keys and values of older tokens stay
    assert isinstance(found, RaggedModel)
    return found


@contextmanager
def running(model: Any, **limits: int) -> Iterator[BatchEngine]:
    engine = BatchEngine(model, Limits(1024, **limits)).start()
    yield engine
    assert engine.stop(LIMIT)


def ask(engine: BatchEngine, prompt: Sequence[int], most: int = 6, how: Sampling | None = None) -> Followed:
    answer = Followed(prompt, most, how)
    engine.submit([answer])
    answer.wait()
    return answer


def begin(known: Prefixes, prompt: Sequence[int], share: int = 1000) -> tuple[KeysValues, int]:
    begun = known.begin(prompt, share)
    assert begun is not None
    return begun


def test_shared_starts_change_no_answer(model: RaggedModel) -> None:
    first = [*SYSTEM, 1, 2]
    with running(model, kept_tokens=0) as engine:
        said = ask(engine, first).tokens
        conversation = [*first, *said, 9, 9]
        prompts = [first, first, [*SYSTEM, 5, 6, 7], conversation, SYSTEM[:LEAST_SHARED], SYSTEM[1:], [*SYSTEM, 1]]
        expected = [ask(engine, prompt).tokens for prompt in prompts]
        assert engine.counters().shared_tokens == 0
    with running(model) as engine:
        answers = [ask(engine, prompt) for prompt in prompts]
        counted = engine.counters()
    assert [answer.tokens for answer in answers] == expected
    # All but one token of an equal prompt; of a conversation also what the model has read of its own answer.
    known = [0, len(first) - 1, len(SYSTEM), len(first) + len(said) - 1, 0, 0, len(SYSTEM)]
    assert [answer.shared for answer in answers] == known
    assert counted.shared_tokens == sum(known)
    assert counted.prompt_tokens == sum(map(len, prompts)) - sum(known)


def test_an_answer_under_way_shares_too(model: RaggedModel) -> None:
    with running(model) as engine:
        long, late = Followed(SYSTEM, 900), Followed([*SYSTEM, 4], 4)
        engine.submit([long])
        while not long.got:
            pass
        engine.submit([late])
        late.wait()
        assert not long.ended.is_set() and late.shared == len(SYSTEM)
        engine.cancel([long])
    with running(model, kept_tokens=0) as engine:
        assert ask(engine, [*SYSTEM, 4], 4).tokens == late.tokens


def test_answers_that_were_cancelled_are_kept_as_far_as_they_came(model: RaggedModel) -> None:
    with running(model) as engine:
        gone = Followed(SYSTEM, 900)
        engine.submit([gone])
        while not gone.got:
            pass
        engine.cancel([gone])
        while engine.counters().cancelled == 0:
            pass
        assert ask(engine, [*SYSTEM, *gone.tokens[:3], 1]).shared >= len(SYSTEM)


class Recorded(RaggedModel):
    """Remembers how many tokens each of its steps had, and fails when told to."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.steps, self.fails = list[list[int]](), False

    def step(self, sequences: Sequence[KeysValues], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        self.steps.append([len(each) for each in tokens])
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(sequences, tokens)


def together(model: RaggedModel, prompt: Sequence[int], count: int, **limits: int) -> list[Followed]:
    answers = [Followed(prompt, 3, Sampling(temperature=1.0, seed=i)) for i in range(count)]
    engine = BatchEngine(model, Limits(1024, **limits))
    engine.submit(answers)
    engine.start()
    for answer in answers:
        answer.wait()
    assert engine.stop(LIMIT)
    return answers


def test_of_equal_prompts_one_is_read_if_all_would_take_several_steps(
    model: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_steps(monkeypatch, 64)
    recorded = Recorded(model.model)
    answers = together(recorded, SYSTEM, 4)
    assert recorded.steps[:2] == [[40], [1, 1, 1, 1]]
    assert [answer.shared for answer in answers] == [0, 39, 39, 39]
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in together(model, SYSTEM, 4, kept_tokens=0)
    ]
    monkeypatch.undo()  # 128 tokens
    recorded.steps.clear()
    together(recorded, SYSTEM, 3)
    assert recorded.steps[0] == [40, 40, 40], "none waits if all are read at once"


def test_those_that_wait_for_one_that_leaves_begin_themselves(
    model: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_steps(monkeypatch, 32)
    long = [(i * i) % 48 for i in range(400)]
    first, second = Followed(long, 2), Followed(long, 2)
    recorded = Recorded(model.model)
    engine = BatchEngine(recorded, Limits(1024))
    step = recorded.step

    def cancel_first(*given: Any) -> torch.Tensor:
        if len(recorded.steps) == 2:
            engine.cancel([first])
        return step(*given)

    monkeypatch.setattr(recorded, "step", cancel_first)
    engine.submit([first, second])
    engine.start()
    assert len(second.wait()[0]) == 2 and engine.stop(LIMIT)
    assert recorded.steps[:4] == [[32]] * 4 and second.shared == 96


def test_what_failed_is_not_kept(model: RaggedModel) -> None:
    recorded = Recorded(model.model)
    with running(recorded) as engine:
        ask(engine, SYSTEM)
        recorded.fails = True
        assert ask(engine, SYSTEM).wait() == ([], "error")
        recorded.fails = False
        assert ask(engine, SYSTEM).shared == 0


def test_running_answers_have_the_room(model: RaggedModel) -> None:
    with running(model, cached_tokens=200) as engine:
        ask(engine, SYSTEM)
        assert engine._prefixes.tokens == FIRST_CAPACITY
        ask(engine, [9] * 100, 50)  # with it, more than 200
        assert ask(engine, SYSTEM).shared == 0


@pytest.mark.parametrize("kept_tokens", [0, 1 << 13])
def test_answers_that_pause_go_on_as_they_would_have(
    model: RaggedModel, kept_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three choices of one prompt and others, which draw random numbers, in too little room."""
    monkeypatch.setattr(engines, "GROWTH", 1)
    prompts = [SYSTEM, SYSTEM, SYSTEM, SYSTEM[:20], [9] * 30]

    def asked(**limits: int) -> tuple[list[list[int]], Counters]:
        sampling = [Sampling(temperature=1.0, seed=i, presence_penalty=0.5) for i in range(len(prompts))]
        answers = [Followed(prompt, 60 + 9 * i, sampling[i]) for i, prompt in enumerate(prompts)]
        engine = BatchEngine(model, Limits(1024, kept_tokens=kept_tokens, **limits))
        engine.submit(answers)
        engine.start()
        assert all(answer.wait() == (answer.tokens, "length") for answer in answers)
        assert engine.stop(LIMIT) and engine._prefixes.tokens <= min(kept_tokens, limits.get("cached_tokens", 1 << 17))
        return [answer.tokens for answer in answers], engine.counters()

    expected, before = asked()
    found, counted = asked(cached_tokens=250)
    assert found == expected and before.reread_tokens == 0 < counted.reread_tokens
    assert counted.prompt_tokens + counted.shared_tokens == sum(map(len, prompts))


def filled(length: int) -> KeysValues:
    state = KeysValues()
    state.append(0, torch.ones(1, 1, length, 4), torch.ones(1, 1, length, 4))
    state.length = length
    return state


def kept(known: Prefixes, tokens: list[int]) -> None:
    """A sequence with these tokens has run and ended."""
    state, held = begin(known, [*tokens, 0])
    if not held:
        state.append(0, *[torch.ones(1, 1, len(tokens), 4)] * 2)
    state.length = len(tokens)
    known.end(state, tokens)


def held(known: Prefixes, prompt: Sequence[int]) -> int:
    """How many tokens a new sequence would begin with."""
    state, count = begin(known, prompt)
    known.end(state, [])
    return count


def number(which: int, length: int = 20) -> list[int]:
    return [which] * length


def test_the_least_recently_used_is_dropped_first(model: RaggedModel) -> None:
    known = Prefixes(model, 3 * FIRST_CAPACITY)
    for which in (1, 2, 3):
        kept(known, number(which))
    assert held(known, [*number(1), 0]) == 20
    kept(known, number(4))
    assert known.tokens == 3 * FIRST_CAPACITY
    assert [held(known, [*number(which), 0]) for which in (1, 3, 4)] == [20, 20, 20]
    assert held(known, [*number(2), 0]) == 0
    known.shrink(FIRST_CAPACITY)
    assert known.tokens == FIRST_CAPACITY
    known.shrink(-5)
    assert known.tokens == 0


def test_only_so_many_are_compared(model: RaggedModel) -> None:
    known = Prefixes(model, 1 << 20)
    for which in range(MOST_KEPT + 5):
        kept(known, number(which))
    assert known.tokens == MOST_KEPT * FIRST_CAPACITY


def test_a_longer_one_replaces_what_it_starts_with(model: RaggedModel) -> None:
    known = Prefixes(model, 1 << 20)
    for length in (20, 30, 25):
        kept(known, number(1, length))
    assert known.tokens == FIRST_CAPACITY and held(known, number(1, 100)) == 30


def test_of_a_sequence_that_is_too_long_the_start_is_kept(model: RaggedModel) -> None:
    known = Prefixes(model, 100)
    kept(known, number(1, 200))
    assert known.tokens == 100 and held(known, number(1, 300)) == 100
    kept(known, number(2, LEAST_SHARED - 1))
    assert known.tokens == 100, "too short to be of use"


@torch.inference_mode()
def test_copies_are_their_own(model: RaggedModel) -> None:
    state = filled(20)
    copy = state.beginning(17, 64)
    assert (copy.length, copy.capacity) == (17, 64)
    copy.append(0, torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    keys, _ = state.append(0, torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    assert bool((keys == 1).all())


def test_models_of_other_kinds_share_nothing() -> None:
    with running(SeparateModel(tiny())) as engine:
        assert len(ask(engine, SYSTEM).tokens) == 6
        assert ask(engine, SYSTEM).shared == 0
    with running(Counting()) as engine:
        assert ask(engine, SYSTEM).shared == ask(engine, SYSTEM).shared == 0


class Changing:
    """Small steps that never come to compute; their model changes."""

    most_tokens, cache_type, caches = 0, torch.float32, ()

    def __init__(self) -> None:
        self.changed = False

    def current(self) -> bool:
        return not self.changed

    def step(self, *given: Any) -> torch.Tensor:
        raise AssertionError("no step is as small")

    def settle(self, own_seconds: float, small_seconds: float) -> None: ...


def test_nothing_of_a_model_that_has_changed_is_used(model: RaggedModel) -> None:
    small = Changing()
    with running(RaggedModel(model.model, small)) as engine:
        ask(engine, SYSTEM)
        assert ask(engine, SYSTEM).shared == len(SYSTEM) - 1
        under_way = Followed([*SYSTEM, 1, 2, 3], 500)
        engine.submit([under_way])
        while not under_way.got:
            pass
        small.changed = True
        assert ask(engine, SYSTEM).shared == 0
        assert ask(engine, SYSTEM).shared == len(SYSTEM) - 1, "of the changed model"
        engine.cancel([under_way])
        while engine.counters().running:
            pass
        assert ask(engine, [*SYSTEM, 1, 2, 3]).shared <= len(SYSTEM) + 1, "not with what began before the change"


def test_prompts_are_compared_to_the_first_difference() -> None:
    assert prefixes._equal(number(1, 30), [*number(1, 18), 2]) == 18
    assert prefixes._equal(number(1, 30), number(1, 20)) == 20
    assert prefixes._equal([*number(1, 5), 2, *number(1, 30)], number(1, 30)) == 0
    assert prefixes._equal([], number(1)) == 0
