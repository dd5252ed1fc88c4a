"""benchmarks/old/serve_accuracy.py against two servers that know different answers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "old"


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


def test_variants_are_compared_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve_accuracy

    file, out = tmp_path / "questions.jsonl", tmp_path / "out.json"
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(20)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with server(range(20)) as stored, server(range(6, 20)) as other:
        words = ["--questions", str(file), "--examples", str(file), "--shots", "2", "--out", str(out)]
        words += ["--likelihood", "10"]
        urls = ["--url", f"stored={stored}", "--url", f"other={other}"]
        monkeypatch.setattr(sys, "argv", ["serve_accuracy.py", *words, *urls])
        serve_accuracy.main()
    found = json.loads(out.read_text())
    first, second = found["variants"]
    assert (first["strict"]["value"], second["strict"]["value"]) == (1.0, 0.7)
    assert (second["strict"]["gained"], second["strict"]["lost"]) == (0, 6)
    assert second["strict"]["p"] == pytest.approx(2 * 0.5**6)
    assert second["right"]["strict"] == "0" * 6 + "1" * 14
    assert "What is" not in out.read_text()
    letters = 10 * len(" #### 1")  # of ten solutions; the other server does not know six of them
    assert first["likelihood"] == {"tokens": letters, "nats": 1.0}
    likelihood = second["likelihood"]
    assert (likelihood["nats"], likelihood["difference"]) == (pytest.approx(1.6), pytest.approx(0.6))
    assert likelihood["same_likeliest"] == pytest.approx(0.4) and likelihood["p"] < 0.01
