"""`lancebill serve` in a separate process, called over HTTP with the openai client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

STARTUP_LIMIT = 120.0  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a running server, and its process."""
    folder = tmp_path_factory.mktemp("serve") / "model"
    tiny.save_model_with_tokenizer(transformers, folder)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "lancebill.cli.main",
        "serve",
        str(folder),
        "--weights",
        "int4-g32",
        "--name",
        "tiny",
    ]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    end = time.monotonic() + STARTUP_LIMIT
    while True:
        try:
            get(f"http://127.0.0.1:{port}/health")
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "the server did not come up"
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/v1", process
    if process.poll() is None:
        process.kill()
        process.wait()


def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0)


def stream_answer(url: str, word: str, tokens: int = 5, on_first: Callable[[], None] = lambda: None) -> str:
    """The concatenated text of a streamed answer; `on_first` is called at its first token."""
    stream = client(url).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": word}],
        max_tokens=tokens,
        stream=True,
        temperature=0,
    )
    pieces = []
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            pieces.append(event.choices[0].delta.content)
            if len(pieces) == 1:
                on_first()
    return "".join(pieces)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    from lancebill.errors import LaunchError
    from lancebill.integrations.transformers.server import bind_addresses

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(LaunchError, match="in use"):
            bind_addresses("127.0.0.1", taken)
        command = [sys.executable, "-m", "lancebill.cli.main", "serve", str(tmp_path), "--host", "127.0.0.1"]
        done = subprocess.run([*command, "--port", str(taken)], capture_output=True, text=True)
        assert done.returncode == 1 and "cannot listen" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(LaunchError, match="cannot listen"):
        bind_addresses("no.such.host.invalid", 1234)
    for bound in bind_addresses("localhost", free_port()):
        bound.close()


def test_models(served: tuple[str, subprocess.Popen[str]]) -> None:
    assert [model.id for model in client(served[0]).models.list().data] == ["tiny"]


def test_streamed_answers_equal_whole_answers(served: tuple[str, subprocess.Popen[str]]) -> None:
    url = served[0]
    whole = client(url).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "w3 w4"}], max_tokens=5, temperature=0
    )
    assert len((whole.choices[0].message.content or "").split()) == 5
    assert stream_answer(url, "w3 w4") == whole.choices[0].message.content


def test_concurrent_clients(served: tuple[str, subprocess.Popen[str]]) -> None:
    url = served[0]
    words = [f"w{i} w{i + 1}" for i in range(1, 9)]
    alone = [stream_answer(url, word) for word in words]
    with ThreadPoolExecutor(len(words)) as pool:
        assert list(pool.map(lambda word: stream_answer(url, word), words)) == alone
    assert len(set(alone)) > 1


def test_sigterm_finishes_open_requests(served: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = served
    whole = stream_answer(url, "w5 w6", 40)
    assert stream_answer(url, "w5 w6", 40, on_first=lambda: process.send_signal(signal.SIGTERM)) == whole
    assert process.wait(timeout=60) in (0, -signal.SIGTERM)
    assert "int4-g32 x fp32 on" in (process.stderr.read() if process.stderr else "")
