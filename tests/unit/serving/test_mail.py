"""Events from several threads to one loop: all of them, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from lancebill.serving.mail import Mail

THREADS, LETTERS = 4, 2000
LIMIT = 60.0  # seconds: nothing is expected to take so long


def counted(mail: Mail[Any]) -> list[int]:
    """Counts the wake-ups of this mail's loop."""
    wake, calls = mail.loop.call_soon_threadsafe, [0]

    def call_soon_threadsafe(*given: Any) -> Any:
        calls[0] += 1
        return wake(*given)

    mail.loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[method-assign]
    return calls


def test_letters_of_several_threads_arrive_in_the_order_of_each() -> None:
    got: list[tuple[int, int]] = []

    async def collect() -> None:
        mail, done = Mail[tuple[int, int]](asyncio.get_running_loop()), asyncio.Event()

        def deliver(letter: tuple[int, int]) -> None:
            got.append(letter)
            if len(got) == THREADS * LETTERS:
                done.set()

        def post(thread: int) -> None:
            for number in range(LETTERS):
                mail.post(deliver, (thread, number))

        threads = [threading.Thread(target=post, args=[thread]) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done.wait(), LIMIT)  # with a letter lost, it would wait until then
        for thread in threads:
            thread.join()

    asyncio.run(collect())
    for thread in range(THREADS):
        assert [number for sender, number in got if sender == thread] == list(range(LETTERS))


def test_a_busy_loop_is_woken_once() -> None:
    async def collect() -> None:
        loop = asyncio.get_running_loop()
        mail, got = Mail[int](loop), list[int]()
        calls = counted(mail)
        for round_ in range(3):
            for number in range(8):
                mail.post(got.append, number)
            assert calls[0] == round_ + 1 and got == list(range(8)) * round_
            await asyncio.sleep(0)
            assert got == list(range(8)) * (round_ + 1)

    asyncio.run(collect())


def test_what_is_posted_while_letters_are_delivered_is_not_lost() -> None:
    async def collect() -> None:
        mail, got = Mail[int](asyncio.get_running_loop()), list[int]()

        def deliver(letter: int) -> None:
            got.append(letter)
            if letter < 5:
                mail.post(deliver, letter + 1)

        mail.post(deliver, 0)
        while len(got) < 6:
            await asyncio.sleep(0)
        assert got == list(range(6))

    asyncio.run(asyncio.wait_for(collect(), LIMIT))


def test_a_closed_loop_is_no_error() -> None:
    async def make() -> Mail[int]:
        return Mail(asyncio.get_running_loop())

    mail, got = asyncio.run(make()), list[int]()
    for number in range(3):
        mail.post(got.append, number)
    assert got == [] and not mail._posted
