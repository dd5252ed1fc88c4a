"""Load-tests a server with concurrent streaming requests and records when each token arrives."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lancebill.errors import LaunchError, SpecError

WORDS = "time way year work day part place case week point group number night home water room area money story fact"
PERCENTILES = (50, 90, 99)
LOOK_SECONDS = 0.2  # a signal that comes just before a wait does not end it: Ctrl-C is noticed this much later at most


@dataclass(frozen=True)
class Request:
    """One finished request: when it was sent, when each piece of text arrived, and the error if it failed."""

    sent: float
    arrivals: tuple[float, ...] = ()
    error: str | None = None
    counted: int | None = None  # tokens as the server counts them: a piece of text may hold several

    @property
    def tokens(self) -> int:
        return len(self.arrivals) if self.counted is None else self.counted

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:])]


@dataclass(frozen=True)
class Load:
    """The requests to send: `prompts` random prompts of `input_len` words each, `concurrency` at a time."""

    input_len: int
    output_len: int
    prompts: int
    concurrency: int
    seed: int = 0

    def prompt(self, index: int) -> str:
        chooser = random.Random(self.seed * 1_000_003 + index)
        return " ".join(chooser.choice(WORDS.split()) for _ in range(self.input_len))


def run_load(
    url: str,
    load: Load,
    *,
    timeout: float = 600.0,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Send all requests, wait for all answers, and return the measurements."""
    server = Server(url, timeout, api_key)
    model = server.model()
    requests: list[Request] = []
    indices = iter(range(load.prompts))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(indices, None)
            if index is None:
                return
            requests.append(send(server, model, load.prompt(index), load.output_len))
            progress(1)

    start = time.perf_counter()
    # Daemon threads, so that Ctrl-C ends the process although requests are still open.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(load.concurrency, load.prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
    return summarize_requests(model, requests, time.perf_counter() - start)


def summarize_requests(model: str, requests: list[Request], seconds: float) -> dict[str, Any]:
    """Throughput, and latencies in milliseconds. Failed requests are counted but not part of the averages."""
    good = [r for r in requests if r.error is None and r.arrivals]
    tokens = sum(r.tokens for r in good)
    errors = sorted({r.error or "no token arrived" for r in requests if r not in good})
    return {
        "model": model,
        "requests": len(requests),
        "failed": len(requests) - len(good),
        "errors": errors[:5],
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": tokens / seconds,
        "time_to_first_token_ms": percentiles([r.time_to_first_token for r in good]),
        "inter_token_latency_ms": percentiles([gap for r in good for gap in r.gaps]),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Least, mean and nearest-rank percentiles, converted from seconds to milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    result = {"min": 1e3 * ordered[0], "mean": 1e3 * sum(ordered) / len(ordered)}
    for p in PERCENTILES:
        result[f"p{p}"] = 1e3 * ordered[min(len(ordered) - 1, -(-p * len(ordered) // 100) - 1)]
    return result


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server: its address, its patience, and the key that it asks for."""

    url: str
    timeout: float = 600.0
    api_key: str | None = None

    def model(self) -> str:
        """The first model the server lists."""
        try:
            listed = json.loads(self.request("GET", "models").read())
            return str(listed["data"][0]["id"])
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError("no server answers at this address", where=self.url, got=reason) from None
        except (ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"
            raise LaunchError(
                "the server does not list a model", where=self.url, got=reason, hint="does the URL end in /v1?"
            ) from None

    def request(self, method: str, page: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """The answer to one request on a connection of its own."""
        connection, path = _connect(self.url, self.timeout)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection.request(method, f"{path}/{page}", None if body is None else json.dumps(body), headers)
        return connection.getresponse()


def send(server: Server, model: str, prompt: str, tokens: int) -> Request:
    """Send one streaming chat request and record when its tokens arrive."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    sent = time.perf_counter()
    arrivals, counted = [], None
    try:
        answer = server.request("POST", "chat/completions", body)
        if answer.status != 200:
            return Request(sent, error=f"status {answer.status}: {answer.read(200).decode(errors='replace')}")
        for event in _events(answer):
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                arrivals.append(time.perf_counter())
            if event.get("usage"):
                counted = int(event["usage"]["completion_tokens"])
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        return Request(sent, tuple(arrivals), f"{type(error).__name__}: {error}")
    return Request(sent, tuple(arrivals), counted=counted)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for raw in answer:
        line = raw.decode().strip()
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))


def _connect(url: str, timeout: float) -> tuple[http.client.HTTPConnection, str]:
    parts, wrong = urlsplit(url), SpecError("not the URL of a server", expected="http://host:port/v1", got=url)
    try:
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise wrong
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = parts.path.rstrip("/")
    return kind(parts.hostname, port, timeout=timeout), path or "/v1"
