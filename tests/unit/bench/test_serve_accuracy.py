"""The subject serve-accuracy against two servers that know different answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


def echoed(text: str, known: range) -> dict[str, list[object]]:
    """Every character is a token. Each has one nat, or two where the number is not known; then `?` is likelier."""
    number = int(text.split("What is ")[-1].split("?")[0])
    nats = 1.0 if number in known else 2.0
    top = [{letter: -nats} | ({} if number in known else {"?": -0.5}) for letter in text]
    return {
        "text_offset": list(range(len(text))),
        "token_logprobs": [None, *([-nats] * (len(text) - 1))],
        "top_logprobs": [None, *top[1:]],
    }


class Listener(ThreadingHTTPServer):
    request_queue_size = 64  # connections beyond the default of 5 are reset on a busy machine


@contextmanager
def server(known: range) -> Iterator[str]:
    """Answers `What is N?` with N if it is among `known`, as a few-shot prompt's last question."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "one"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["temperature"] == 0 and asked["model"] == "one"
            if asked.get("echo"):
                self.answer({"choices": [{"logprobs": echoed(asked["prompt"], known)}]})
                return
            number = int(asked["messages"][0]["content"].split("What is ")[-1].split("?")[0])
            text = f"It is {number}.\n#### {number if number in known else -1}\n\nQuestion: What is 7?"
            self.answer({"choices": [{"message": {"content": text}}]})

        def answer(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    made = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/v1"
    made.shutdown()
    made.server_close()


def test_variants_are_compared_with_the_first(tmp_path: Path) -> None:
    from benchmarks import __main__ as command
    from benchmarks.runner import Record

    file, out = tmp_path / "questions.jsonl", tmp_path / "out.json"
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(20)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with server(range(20)) as stored, server(range(6, 20)) as other:
        words = ["--questions", str(file), "--examples", str(file), "--shots", "2", "--out", str(out)]
        urls = ["--url", f"stored={stored},other={other}", "--likelihood", "10"]
        command.main(["serve-accuracy", *words, *urls])
    first, second = Record.read(out).rows
    assert (first["strict"], second["strict"], second["variant"]) == (1.0, 0.7, "other")
    assert second["strict_p"] == pytest.approx(2 * 0.5**6) and "strict_p" not in first
    assert "What is" not in out.read_text()
    letters = 10 * len(" #### 1")  # of ten solutions; the other server does not know six of them
    assert (first["solution_tokens"], first["nats"]) == (letters, 1.0)
    assert (second["nats"], second["more_nats"]) == (pytest.approx(1.6), pytest.approx(0.6))
    assert second["same_likeliest"] == pytest.approx(0.4) and second["nats_p"] < 0.01
