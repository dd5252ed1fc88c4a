"""Many clients on `lancebill serve`, some of which misbehave: statuses, requests that never end, memory over time.

    python -m benchmarks serve --model PATH

Clients stream answers or wait for them, leave in the middle, send malformed or huge bodies, or send slowly. Then one
more request, and SIGTERM. A request is stuck if it is still open two minutes after the last one was sent.
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.machine import memory_bytes
from benchmarks.runner import Case, Run, subject

TIMEOUT = 120.0
HEADERS = {"Content-Type": "application/json"}


@subject("serve", lambda: [Case.of(clients=50, seconds=1800)], model=(Path, "a checkpoint folder"),
         weights=("mxfp4", "spec of the experts"), tokens=(8, "of an answer"))  # fmt: skip
def serve(run: Run) -> None:
    """Clients on `lancebill serve` that cut streams off, send malformed and huge bodies, or send slowly."""
    for case in run.cases:
        url, server = start_server(run.options.model, run.options.weights)
        try:
            found = stress(url, server.pid, case, run.options.tokens)
        finally:
            server.send_signal(signal.SIGTERM)
        run.add(case, {**found, "exit_code_after_sigterm": server.wait(timeout=TIMEOUT)})


def start_server(model: Path, weights: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server, wait until it answers; its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", str(model), "--weights", weights, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "lancebill.cli.main", *words, "--dtype", "float32"])
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return f"http://127.0.0.1:{port}/v1", server
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start") from None
            time.sleep(0.2)


def stress(url: str, pid: int, case: Case, tokens: int) -> dict[str, Any]:
    """All clients at once, memory once a second; then one more request, which must be answered."""
    end = time.monotonic() + case["seconds"]
    with urllib.request.urlopen(f"{url}/models", timeout=TIMEOUT) as listed:
        model = json.load(listed)["data"][0]["id"]
    clients = [Client(url, model, number, tokens) for number in range(case["clients"])]
    threads = [threading.Thread(target=client.work, args=(end,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end + TIMEOUT:
        memory.append(memory_bytes(pid)["VmRSS"] / 2**20)
        time.sleep(1)
    last = Client(url, model, -1, tokens)
    last.record("after", last.answer)
    outcomes = sum((client.outcomes for client in (*clients, last)), Counter())
    return {
        "requests": outcomes.total(),
        "server_errors": sum(count for (_, what), count in outcomes.items() if what.startswith("5")),
        "stuck": sum(thread.is_alive() for thread in threads),
        "afterwards": "answers" if outcomes["after", "200"] == 1 else "does not answer",
        "slowest_seconds": max(client.slowest for client in clients),
        "quarter_mb": memory[max(1, len(memory) // 4) - 1], "end_mb": memory[-1], "most_mb": max(memory),
        "outcomes": {f"{kind}: {what}": count for (kind, what), count in sorted(outcomes.items())},
    }  # fmt: skip


class Client:
    """One client that behaves well or badly, at random but the same in every run."""

    def __init__(self, url: str, model: str, number: int, tokens: int) -> None:
        where = urlsplit(url)
        assert where.hostname is not None and where.port is not None
        self.address = where.hostname, where.port
        self.page = f"{where.path}/chat/completions"
        self.model, self.number, self.tokens = model, number, tokens
        self.random = random.Random(number)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.slowest = 0.0

    def work(self, end: float) -> None:
        behaviours = {
            "streamed": self.stream, "whole": self.answer, "left while streaming": self.leave_stream,
            "left while waiting": self.leave_waiting, "malformed": self.send_malformed, "huge": self.send_huge,
            "slow": self.send_slowly,
        }  # fmt: skip
        while time.monotonic() < end:
            kind = self.random.choices(list(behaviours), weights=(6, 3, 2, 2, 1, 1, 1))[0]
            self.record(kind, behaviours[kind])

    def record(self, kind: str, behave: Callable[[], str]) -> None:
        started = time.monotonic()
        try:
            what = behave()
        except (OSError, http.client.HTTPException) as error:
            what = type(error).__name__
        self.outcomes[kind, what] += 1
        self.slowest = max(self.slowest, time.monotonic() - started)

    def stream(self) -> str:
        response = self._ask(stream=True)
        text = response.read()
        return str(response.status) if text.rstrip().endswith(b"[DONE]") else f"{response.status}, cut off"

    def answer(self) -> str:
        response = self._ask(stream=False)
        response.read()
        return str(response.status)

    def leave_stream(self) -> str:
        connection = self._connection()
        response = self._ask(stream=True, connection=connection, tokens=50 * self.tokens)
        response.readline()
        connection.close()
        return str(response.status)

    def leave_waiting(self) -> str:
        connection = self._connection()
        connection.request("POST", self.page, self._body(stream=False, tokens=50 * self.tokens), HEADERS)
        time.sleep(self.random.random())
        connection.close()
        return "left"

    def send_malformed(self) -> str:
        body = self._body(stream=False, tokens=self.tokens)
        bad = self.random.choice([body[:-9], b"", b"[]", body.replace(b"max_tokens", b"max_token"), b"\xff" * 50])
        return self._post(bad)

    def send_huge(self) -> str:
        return self._post(b" " * (64 << 20))

    def send_slowly(self) -> str:
        """A byte of the body at a time; leaves before the end or sends the rest."""
        body = self._body(stream=False, tokens=self.tokens)
        connection = self._connection()
        connection.putrequest("POST", self.page)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        for byte in body[:20]:
            connection.send(bytes([byte]))
            time.sleep(0.1)
        if self.random.random() < 0.5:
            connection.close()
            return "left"
        connection.send(body[20:])
        return str(connection.getresponse().status)

    def _post(self, body: bytes) -> str:
        connection = self._connection()
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent; the answer may be there
            connection.request("POST", self.page, body, HEADERS)
        return str(connection.getresponse().status)

    def _ask(
        self, *, stream: bool, connection: http.client.HTTPConnection | None = None, tokens: int = 0
    ) -> http.client.HTTPResponse:
        connection = connection or self._connection()
        connection.request("POST", self.page, self._body(stream=stream, tokens=tokens or self.tokens), HEADERS)
        return connection.getresponse()

    def _body(self, *, stream: bool, tokens: int) -> bytes:
        messages = [{"role": "user", "content": f"Count from {self.number}."}]
        asked = {"model": self.model, "messages": messages, "max_tokens": tokens, "stream": stream}
        return json.dumps(asked).encode()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=TIMEOUT)
