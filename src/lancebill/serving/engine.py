"""Continuous batching: one thread that runs the model; answers join and leave between two steps.

Every step continues all running answers. An answer with unread prompt tokens takes an even share of the step's token
budget, so that a short prompt does not wait for a long one; every other answer takes one token. The budget follows the
measured time of steps, because running answers and new requests wait for the end of a step. The first step after an
idle time waits a moment for requests that arrive together: a request that just misses a step waits for all of it.

Answers are admitted by the tokens they hold, not by their maximum: few answers reach it. If running answers hold too
many tokens, the newest is paused: it frees its keys and values and becomes the first in the queue. When it resumes, the
model reads its prompt and its tokens so far as one prompt. A paused answer resumes only after another one finishes, so
none is paused twice in a row and the oldest never is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import LancebillError, LaunchError, QueueFull
from lancebill.serving.prefixes import Prefixes
from lancebill.serving.runners import Runner, check_device
from lancebill.serving.sampling import Sampling, Token, checked, choose, most_likely

log = logging.getLogger("lancebill")

STEP_FAILED = (LancebillError, RuntimeError, MemoryError)
CHOOSING_FAILED = (LancebillError, RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, MemoryError)
STEP_SECONDS = 0.25  # how long a step that reads prompts may take, within the next two limits
LEAST_STEP_TOKENS = 128  # of prompts: with fewer, reading the weights would take most of the time
MOST_STEP_TOKENS = 1024
GROWTH = 256  # tokens that there is room for beside each answer when one begins: with less it would soon be paused
GATHER_SECONDS = 0.05  # the longest that a first answer waits for others: too short to be noticed


@dataclass(frozen=True)
class Limits:
    """What one server holds at most."""

    context: int  # tokens of one answer and its prompt
    running: int = 32  # answers computed together
    cached_tokens: int = 1 << 17  # of all running answers together; a single one may hold more
    waiting: int = 128  # answers in the queue
    kept_tokens: int = 1 << 13  # of ended answers, for prompts that start equally; they make room for running ones


@dataclass(frozen=True)
class End:
    """No more tokens: `stop` (the model ended its answer), `length`, or `error`."""

    reason: str


Event = Token | End
Deliver = Callable[[Event], None]


class Answer:
    """One answer under way."""

    def __init__(self, prompt: Sequence[int], most: int, how: Sampling, deliver: Deliver) -> None:
        self.prompt, self.most, self.how, self.deliver = list(prompt), most, how, deliver
        self.tokens: list[int] = []
        self.text = self.prompt  # what the model reads before it generates: after a pause all tokens until then
        self.read = 0  # tokens of this text that the model has seen
        self.known = 0  # tokens of this text that it had seen before a pause
        self.shared = 0  # of these, with another answer
        self.state: Any = None
        self.source, self.asked = how.generator(), how.asked(prompt)
        self.cancelled = self.paused = False
        self.suspect = False  # was in a step that failed: its next step is its own
        self.submitted = time.perf_counter()

    @property
    def held(self) -> int:
        """Tokens whose keys and values it has after its next steps: what is left of a prompt counts too."""
        return len(self.prompt) + len(self.tokens)

    @property
    def growing(self) -> int:
        """Tokens that it should have room for when it begins."""
        return self.held + min(GROWTH, self.most - len(self.tokens))

    @property
    def reads(self) -> bool:
        """Whether the model has not seen all of the text."""
        return self.read < len(self.text)

    def pause(self) -> None:
        """Everything is to be read again, once it goes on."""
        self.known = max(self.known, self.held if self.tokens else self.read)
        self.paused, self.text, self.read = True, [*self.prompt, *self.tokens], 0

    def pending(self, share: int) -> Sequence[int]:
        """The tokens of its next step."""
        if self.reads:
            return self.text[self.read : self.read + share]
        return self.tokens[-1:]


@dataclass(frozen=True)
class Counters:
    """Answers that are `running`, `waiting` (for their first step) and `paused` now, and what happened since the start.

    `prompt_tokens` counts tokens read for the first time, `reread_tokens` tokens read again after a pause.
    """

    running: int
    waiting: int
    paused: int
    prompt_tokens: int
    reread_tokens: int
    shared_tokens: int
    generated_tokens: int
    cancelled: int
    steps: int


class BatchEngine:
    """Owns the model. `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        ends: Iterable[int] = (),
        on_first_token: Callable[[float], None] = lambda seconds: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.limits, self._device = limits, device
        self._runner, self._ends, self._on_first = runner, frozenset(ends), on_first_token
        self._prefixes = Prefixes(runner, limits.kept_tokens)
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._changed = threading.Condition()
        self._arriving = 0  # requests
        self._step_tokens = LEAST_STEP_TOKENS  # of prompts in the next step
        self._stopping = False
        self.failed = False  # the thread has ended though nobody stopped it
        self._prompt_tokens = self._reread = self._shared_tokens = 0
        self._generated = self._cancelled = self._steps = 0
        self._thread = threading.Thread(target=self._loop, name="lancebill-engine", daemon=True)

    def start(self) -> BatchEngine:
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """While a request is prepared that will submit answers: the first step after a pause waits for it."""
        with self._changed:
            self._arriving += 1
        try:
            yield
        finally:
            with self._changed:
                self._arriving -= 1
                self._changed.notify()

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue answers; all or none. An engine that has ended ends them with an error."""
        with self._changed:
            waiting = len(self._waiting) - self._paused()  # these have been admitted
            if waiting + len(answers) > self.limits.waiting:
                raise QueueFull("the queue is full", got=f"{waiting} answers waiting")
            if not self._stopping:
                self._waiting.extend(answers)
                self._changed.notify()
                return
        self._end(answers, End("error"))

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Nobody wants these any more: they leave before the next step."""
        with self._changed:
            for answer in answers:
                answer.cancelled = True
            self._changed.notify()

    def stop(self, patience: float) -> bool:
        """End after the step under way; whether that was within `patience` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def counters(self) -> Counters:
        with self._changed:
            paused = self._paused()
            tokens = self._prompt_tokens, self._reread, self._shared_tokens, self._generated
            waiting = len(self._waiting) - paused
            return Counters(len(self._running), waiting, paused, *tokens, self._cancelled, self._steps)

    def _paused(self) -> int:
        return sum(answer.paused for answer in self._waiting)

    def _loop(self) -> None:
        try:
            while self._admit():
                self._step()
        except LaunchError as error:  # of the device itself: every further step would fail
            self.failed = True
            log.error("%s", error)
        except BaseException:
            self.failed = True
            raise
        finally:  # also if the model raised something unexpected: nobody may wait for ever
            with self._changed:
                self._stopping = True
                left = [*self._running, *self._waiting]
                self._running, self._waiting = [], deque()
            self._end(left, End("error"))

    def _admit(self) -> bool:
        """Wait for work, drop cancelled answers, pause those without room, start waiting ones; False at the end."""
        with self._changed:
            while not self._stopping:
                if self._waiting and not self._running:
                    self._gather()
                self._drop_cancelled()
                self._pause()
                while self._waiting and self._fits(self._waiting[0]):
                    self._running.append(self._waiting.popleft())
                    self._running[-1].paused = False
                self._prefixes.shrink(self.limits.cached_tokens - self._held())
                if self._running:
                    return not self._stopping
                self._changed.wait()
            return False

    def _drop_cancelled(self) -> None:
        gone = [answer for answer in (*self._running, *self._waiting) if answer.cancelled]
        for answer in gone:
            self._release(answer)
        if gone:
            self._running = [answer for answer in self._running if not answer.cancelled]
            self._waiting = deque(answer for answer in self._waiting if not answer.cancelled)
            self._cancelled += len(gone)

    def _gather(self) -> None:
        """Wait until no request is on its way."""
        end = time.monotonic() + GATHER_SECONDS
        while self._arriving and not self._stopping and (left := end - time.monotonic()) > 0:
            self._changed.wait(left)

    def _fits(self, answer: Answer) -> bool:
        if not self._running or answer.suspect or any(other.suspect for other in self._running):
            return not self._running
        growing = answer.growing + sum(other.growing for other in self._running)
        return len(self._running) < self.limits.running and growing <= self.limits.cached_tokens

    def _held(self) -> int:
        return sum(answer.held for answer in self._running)

    def _pause(self) -> None:
        """Pause the newest answers until the rest has room for the next step. A paused answer becomes the first in the
        queue, so both lists stay in order of arrival."""
        while len(self._running) > 1 and self._held() > self.limits.cached_tokens:
            answer = self._running.pop()
            self._release(answer)
            answer.pause()
            self._waiting.appendleft(answer)

    def _step(self) -> None:
        answers = list(self._running)
        start = time.monotonic()
        try:
            new = self._next_tokens(answers)
            answers, tokens = list(new), list(new.values())
            logits = self._runner.step([answer.state for answer in answers], tokens)
            plain = [row for row, answer in enumerate(answers) if answer.how.plain]
            ids = most_likely(logits if len(plain) == len(answers) else logits[plain])
            best = dict(zip(plain, zip(ids, logits[plain, ids].tolist())))
        except STEP_FAILED as error:
            check_device(self._device)
            log.error("a step of %d answers failed: %s: %s", len(answers), type(error).__name__, error)
            self._try_apart(answers)
            return
        seconds = time.monotonic() - start
        self._steps += 1
        read = 0
        for row, answer in enumerate(answers):
            if answer.reads:
                read += self._count_read(answer, len(tokens[row]))
            if answer.reads:
                continue
            answer.suspect = False
            try:
                token = self._chosen(answer, logits[row], best.get(row))
            except CHOOSING_FAILED as error:  # whatever is wrong with this answer, the others go on
                self._fail(answer, error)
            else:
                self._take(answer, token)
        self._fit_steps(read, seconds)

    def _try_apart(self, answers: Sequence[Answer]) -> None:
        """All begin again, each in a step of its own; one whose own step fails ends."""
        for answer in answers:
            self._drop(answer)
        self._prefixes.forget()
        if len(answers) == 1:
            self._end(answers, End("error"))
            return
        with self._changed:
            self._running = [answer for answer in self._running if answer not in answers]
            for answer in answers:
                answer.pause()
                answer.suspect = True
            self._waiting.extendleft(reversed(answers))

    def _count_read(self, answer: Answer, count: int) -> int:
        again = max(0, min(count, answer.known - answer.read))
        answer.read += count
        self._prompt_tokens += count - again
        self._reread += again
        return count

    def _chosen(self, answer: Answer, logits: Tensor, best: tuple[int, float] | None) -> Token:
        """`best` is the most likely token and its logit, known for plain answers."""
        if best is None:
            return choose(logits, answer.how, answer.tokens, answer.source, answer.asked)
        checked(best[1])
        return Token(best[0])

    def _fail(self, answer: Answer, error: Exception) -> None:
        log.error("an answer ended with an error: %s: %s", type(error).__name__, error)
        self._drop(answer)
        self._end([answer], End("error"))

    def _drop(self, answer: Answer) -> None:
        """Its keys and values may be wrong: no other answer begins with them."""
        if answer.state is not None:
            self._prefixes.end(answer.state, ())
            answer.state = None

    def _next_tokens(self, answers: Sequence[Answer]) -> dict[Answer, Sequence[int]]:
        """The tokens that the next step appends to each answer. New answers may wait for a prefix being read."""
        share = self._share(answers)
        ready = [answer for answer in answers if answer.state is not None or self._begin(answer, share)]
        share = self._share(ready)
        return {answer: answer.pending(share) for answer in ready}

    def _share(self, answers: Sequence[Answer]) -> int:
        """How many tokens of its prompt each of these may read in the next step."""
        if self._runner.whole_prompts:
            return self.limits.context
        return max(1, self._step_tokens // max(1, sum(answer.reads for answer in answers)))

    def _begin(self, answer: Answer, share: int) -> bool:
        begun = self._prefixes.begin(answer.text, share)
        if begun is None:
            return False
        answer.state, answer.read = begun
        if not answer.known:
            answer.shared = answer.read
            self._shared_tokens += answer.shared
        return True

    def _fit_steps(self, read: int, seconds: float) -> None:
        """The next step reads as many tokens of prompts as `STEP_SECONDS` allow, if the last one read any."""
        if read:
            fitting = int(read * STEP_SECONDS / max(seconds, 1e-6))
            self._step_tokens = min(max(fitting, LEAST_STEP_TOKENS), MOST_STEP_TOKENS)

    def _take(self, answer: Answer, token: Token) -> None:
        if not answer.tokens:
            self._on_first(time.perf_counter() - answer.submitted)
        self._generated += 1
        if token.id in self._ends:
            self._end([answer], End("stop"))
            return
        answer.tokens.append(token.id)
        answer.deliver(token)
        if len(answer.tokens) == answer.most:
            self._end([answer], End("length"))

    def _end(self, answers: Sequence[Answer], end: End) -> None:
        with self._changed:
            self._running = [answer for answer in self._running if answer not in answers]
        for answer in answers:
            self._release(answer)
            answer.deliver(end)

    def _release(self, answer: Answer) -> None:
        """It needs its state no more; later ones may begin with it."""
        if answer.state is not None:
            self._prefixes.end(answer.state, [*answer.prompt, *answer.tokens])
            answer.state = None
