"""bench-serve against a test server that sends tokens at known times."""

from __future__ import annotations

import _thread
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from lancebill.cli.main import app
from lancebill.errors import LaunchError, SpecError
from lancebill.evaluate.load import Load, percentiles, run_load

FIRST, GAP = 0.05, 0.02


class Answers(BaseHTTPRequestHandler):
    """Streams `max_tokens` words; answers 503 to prompts whose first word is in `refused`, and to others' keys."""

    refused: tuple[str, ...] = ()
    key: str | None = None
    counts = False  # whether the last event says how many tokens there were: two in each word

    def do_GET(self) -> None:
        self._head(200)
        listed = [{"id": "words"}] if self.path == "/v1/models" else []
        self.wfile.write(json.dumps({"data": listed}).encode())

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        right = self.key is None or self.headers["Authorization"] == f"Bearer {self.key}"
        if not right or body["messages"][0]["content"].split()[0] in self.refused:
            self._head(503)
            return
        self._head(200)
        for index in range(body["max_tokens"]):
            time.sleep(GAP if index else FIRST)
            self._event({"choices": [{"delta": {"content": "word "}}]})
        self._event({"choices": [{"delta": {}}]})
        if self.counts:
            self._event({"choices": [], "usage": {"completion_tokens": 2 * body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_measurements_of_a_server(url: str) -> None:
    found = run_load(url, Load(input_len=5, output_len=4, prompts=6, concurrency=3))
    assert (found["requests"], found["failed"], found["model"]) == (6, 0, "words")
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(24)
    assert found["time_to_first_token_ms"]["p50"] >= 1e3 * FIRST
    assert found["inter_token_latency_ms"]["p50"] >= 1e3 * GAP * 0.9


def test_failures_are_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(input_len=3, output_len=2, prompts=5, concurrency=2)
    monkeypatch.setattr(Answers, "refused", (load.prompt(0).split()[0],))
    found = run_load(url, load)
    assert (found["requests"], found["failed"]) == (5, 1)  # no other prompt starts with that word
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(8)
    assert len(found["errors"]) == 1 and found["errors"][0].startswith("status 503")


def test_ctrl_c_while_requests_are_open() -> None:
    """Ctrl-C ends the command even if the server never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, connections = f"http://127.0.0.1:{silent.getsockname()[1]}/v1", []
        answering = threading.Thread(target=_list_and_hang, args=(silent, connections), daemon=True)
        answering.start()
        command = [sys.executable, "-m", "lancebill.cli.main", "bench-serve", url, "--num-prompts", "2"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_reset_sigint)
        try:
            answering.join(60)
            assert not answering.is_alive()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
        assert process.stderr is not None and process.stderr.read().strip() == "stopped"


def test_ctrl_c_just_before_a_wait_is_not_lost() -> None:
    """`interrupt_main` does not end a wait of the main thread, as a signal that comes just before it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, connections = f"http://127.0.0.1:{silent.getsockname()[1]}/v1", []

        def answer_and_interrupt() -> None:
            _list_and_hang(silent, connections)
            time.sleep(0.3)  # until the main thread waits
            _thread.interrupt_main()

        threading.Thread(target=answer_and_interrupt, daemon=True).start()
        before, start = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                run_load(url, Load(4, 4, 1, 1), timeout=120.0)
        finally:
            signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 60.0, "it must not wait until the request fails"


def _reset_sigint() -> None:
    """A shell's background job ignores SIGINT, and its children inherit that. Restore the default."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _list_and_hang(server: socket.socket, connections: list[socket.socket]) -> None:
    """List a model, then accept one request and never answer it."""
    body = json.dumps({"data": [{"id": "silent"}]})
    with server.accept()[0] as connection:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    connections.append(server.accept()[0])
    connections[0].recv(4096)


def test_no_server() -> None:
    with pytest.raises(LaunchError, match="no server answers"):
        run_load("http://127.0.0.1:9/v1", Load(1, 1, 1, 1), timeout=2)
    with pytest.raises(SpecError, match="URL"):
        run_load("not a url", Load(1, 1, 1, 1))


def test_a_server_without_models(url: str) -> None:
    with pytest.raises(LaunchError, match="does not list a model"):
        run_load(f"{url}/elsewhere", Load(1, 1, 1, 1))


def test_the_command_prints_the_measurements(url: str) -> None:
    words = ["bench-serve", url, "--num-prompts", "2", "--output-len", "2"]
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0 and "words" in done.output, done.output


def test_the_command_names_failures_and_leaves_out_what_was_not_measured(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "key", "mine")
    words = ["bench-serve", url, "--num-prompts", "1", "--output-len", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "1 failed: status 503" in done.output and "time to first" not in done.output
    done = CliRunner().invoke(app, [*words, "--api-key", "mine"])
    assert done.exit_code == 0 and "time to first token" in done.output
    assert "inter token latency" not in done.output  # one token has no neighbour


def test_the_server_counts_tokens_if_it_can(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "counts", True)
    found = run_load(url, Load(input_len=1, output_len=2, prompts=1, concurrency=1))
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(4)


def test_percentiles_use_the_nearest_rank() -> None:
    found = percentiles([i / 1000 for i in range(1, 101)])
    assert found == pytest.approx({"min": 1, "mean": 50.5, "p50": 50, "p90": 90, "p99": 99})
    assert percentiles([0.002])["p99"] == 2
