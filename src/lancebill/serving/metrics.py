"""Counts of a running server in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import Counter

from lancebill.serving.engine import Counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Metrics:
    """Requests by route and status, and the time to first tokens. The engine counts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first_tokens: Counter[float] = Counter()
        self._seconds = 0.0

    def count_request(self, route: str, status: int) -> None:
        with self._lock:
            self._requests[route, status] += 1

    def count_first_token(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds
            self._first_tokens[next((bound for bound in BUCKETS if seconds <= bound), float("inf"))] += 1

    def render(self, engine: Counters) -> str:
        lines = []
        rows = (
            ("gauge", "answers_running", "Answers that are being generated.", engine.running),
            ("gauge", "answers_waiting", "Answers in the queue.", engine.waiting),
            ("gauge", "answers_paused", "Answers that wait until others leave them room.", engine.paused),
            ("counter", "prompt_tokens_total", "Tokens of prompts that the model has read.", engine.prompt_tokens),
            ("counter", "reread_tokens_total", "Tokens that were read again after a pause.", engine.reread_tokens),
            ("counter", "shared_prompt_tokens_total", "Prompt tokens taken from other answers.", engine.shared_tokens),
            ("counter", "generated_tokens_total", "Tokens that the model has generated.", engine.generated_tokens),
            ("counter", "answers_cancelled_total", "Answers ended by a stop string or their client.", engine.cancelled),
            ("counter", "steps_total", "Calls of the model.", engine.steps),
        )
        for kind, name, text, value in rows:
            lines += [f"# HELP lancebill_{name} {text}", f"# TYPE lancebill_{name} {kind}", f"lancebill_{name} {value}"]
        with self._lock:
            lines += [
                "# HELP lancebill_requests_total Finished HTTP requests.",
                "# TYPE lancebill_requests_total counter",
            ]
            for (route, status), count in sorted(self._requests.items()):
                lines.append(f'lancebill_requests_total{{route="{route}",status="{status}"}} {count}')
            lines += self._histogram("lancebill_time_to_first_token_seconds")
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str) -> list[str]:
        lines, total = [f"# HELP {name} From a request to its first token.", f"# TYPE {name} histogram"], 0
        for bound in (*BUCKETS, float("inf")):
            total += self._first_tokens[bound]
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f'{name}_bucket{{le="{label}"}} {total}')
        return [*lines, f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]
