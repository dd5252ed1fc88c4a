"""`lancebill serve` in a separate process, called over HTTP with the openai client."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

LIMIT = 300.0  # seconds: nothing is expected to take so long, however busy the machine is
KEY = "a key"
Served = tuple[str, subprocess.Popen[str]]


def free_port() -> int:
    """Not one of those that the system gives to whoever asks for any: another test could get it first."""
    for port in itertools.count(20000 + os.getpid() % 10000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            break
    return port


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        body: bytes = answer.read()
        return body


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    """Those started so far."""
    started: list[Served] = []
    yield started
    for _, process in started:
        process.kill()
        process.wait()


@pytest.fixture
def served(servers: list[Served], tmp_path: Path) -> Served:
    """The address of a running server, and its process: the last one, unless a test has ended it."""
    if not servers or servers[-1][1].poll() is not None:
        tiny.save_model_with_tokenizer(transformers, tmp_path / "model")
        servers.append(start_server(tmp_path / "model"))
    return servers[-1]


def start_server(folder: Path) -> Served:
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
        "--engine",
        "transformers",
        "--api-key",
        KEY,
    ]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    end = time.monotonic() + LIMIT
    while True:
        try:
            get(f"http://127.0.0.1:{port}/health")
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "the server did not come up"
            time.sleep(0.1)
    return f"http://127.0.0.1:{port}/v1", process


@functools.cache
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key=KEY, timeout=LIMIT, max_retries=0)


def stream_answer(
    url: str, word: str, tokens: int = 5, on_first: Callable[[], None] = lambda: None, **more: Any
) -> str:
    """The concatenated text of a streamed answer; `on_first` is called at its first token."""
    stream = client(url).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": word}],
        max_tokens=tokens,
        stream=True,
        temperature=0,
        **more,
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
    from lancebill.serving.listen import bind_addresses

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(LaunchError, match="in use"):
            bind_addresses("127.0.0.1", taken)
        command = [sys.executable, "-m", "lancebill.cli.main", "serve", str(tmp_path), "--engine", "transformers"]
        done = subprocess.run([*command, "--host", "127.0.0.1", "--port", str(taken)], capture_output=True, text=True)
        assert done.returncode == 1 and "cannot listen" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(LaunchError, match="cannot listen"):
        bind_addresses("no.such.host.invalid", 1234)
    for bound in bind_addresses("localhost", free_port()):
        bound.close()


def post(url: str, page: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a request; `body` is sent as JSON, or as it is if it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    listed = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
    request = urllib.request.Request(url.removesuffix("/v1") + page, data, listed)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(text: str = "w3 w4", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 5, "temperature": 0, **more}


def metric(url: str, name: str) -> float:
    lines = get(url.removesuffix("v1") + "metrics").decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"lancebill_{name} ")))


def test_models(served: Served) -> None:
    assert [model.id for model in client(served[0]).models.list().data] == ["tiny"]
    assert client(served[0]).models.retrieve("tiny").id == "tiny"
    assert post(served[0], "/v1/chat/completions", chat())[1]["model"] == "tiny"


def test_what_is_wrong_is_refused_in_openais_form(served: Served) -> None:
    url, page = served[0], "/v1/chat/completions"
    cases = [
        (page, chat(model="other"), 404, "model"),
        (page, chat(messages=[]), 400, "messages"),
        (page, chat(max_tokens="abc"), 400, "max_tokens"),
        (page, chat(max_tokens=1000), 400, "messages"),
        (page, chat(" ".join(["w1"] * 70)), 400, "messages"),
        (page, chat(n=0), 400, "n"),
        (page, chat(top_logprobs=3), 400, "top_logprobs"),
        (page, chat(stream_options={}), 400, "stream_options"),
        (page, chat(logit_bias={"5000": 1}), 400, "logit_bias"),
        (page, chat(tools=[{"type": "function"}]), 400, "tools"),
        (page, chat(response_format={"type": "json_object"}), 400, "response_format"),
        (page, chat(reasoning_effort="low"), 400, "reasoning_effort"),
        (page, chat(no_such_thing=1), 400, "no_such_thing"),
        (page, {"messages": []}, 400, "messages"),
        (page, {}, 400, "model"),
        (page, [1], 400, None),
        (page, b"{", 400, None),
        (page, b"\xff\xfe", 400, None),
        (page, b"[" * 100_000, 400, None),
        (page, b'{"model": "tiny", "temperature": NaN}', 400, None),
        (page, b" " * (5 << 20), 413, None),
        ("/v1/completions", {"model": "tiny", "prompt": [500]}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "prompt"),
        ("/v1/models", {}, 405, None),
        ("/v1/models/other", {}, 404, "model"),
        *((path, {}, 404, None) for path in ("/load_model", "/reset", "/docs", "/openapi.json")),
    ]
    for path, body, status, param in cases:
        try:
            got, reply = post(url, path, body)
        except (BrokenPipeError, ConnectionResetError, urllib.error.URLError):
            assert status == 413, "only a body that is too large is not read to its end"
            continue
        assert got == status and set(reply["error"]) == {"message", "type", "param", "code"}, (body, got, reply)
        assert reply["error"]["param"] == param, (body, reply)
    assert post(url, page, chat(), Authorization="Bearer wrong")[0] == 401
    assert post(url, page, chat(), **{"Content-Type": "text/plain"})[0] == 415
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as raw:
        raw.sendall(b"this is not HTTP\r\n\r\n")
        assert b"HTTP/1.1 400" in raw.recv(1000)


def test_every_parameter_does_something(served: Served) -> None:
    url, page = served[0], "/v1/chat/completions"

    def text(**more: Any) -> str:
        status, reply = post(url, page, chat(**more))
        assert status == 200, reply
        return str(reply["choices"][0]["message"]["content"])

    plain = text()
    words = plain.split()
    assert len(words) == 5 and text(max_tokens=None, max_completion_tokens=3) == " ".join(words[:3])
    cut = post(url, page, chat(stop=[words[2]]))[1]
    assert cut["choices"][0]["message"]["content"] == f"{words[0]} {words[1]} "
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["usage"]["completion_tokens"] == 3
    assert stream_answer(url, "w3 w4", stop=[words[2]]) == f"{words[0]} {words[1]} "
    number = int(words[0][1:]) + 1
    assert text(logit_bias={str(number): -100}) != plain
    assert text(temperature=2, seed=1) == text(temperature=2, seed=1) != text(temperature=2, seed=2)
    assert text(temperature=2, top_k=1) == text(temperature=2, top_p=0.001) == plain
    several = post(url, page, chat(n=3, temperature=2, seed=1))[1]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in several["choices"]}) == 3
    listed = post(url, page, chat(logprobs=True, top_logprobs=2))[1]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in listed] == words
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] < 0 for entry in listed)


def test_completions_and_responses(served: Served) -> None:
    asked = client(served[0])
    expected = stream_answer(served[0], "w3 w4")
    done = asked.completions.create(model="tiny", prompt=["w3 w4", [4, 5]], max_tokens=5, temperature=0)
    assert [choice.text for choice in done.choices] == [expected, expected]
    (judged,) = asked.completions.create(model="tiny", prompt="w3 w4", max_tokens=5, temperature=0, logprobs=2).choices
    assert judged.logprobs.tokens == expected.split() and judged.text == expected
    assert all(len(best) == 2 for best in judged.logprobs.top_logprobs)
    starts = judged.logprobs.text_offset
    assert [expected[start:end].strip() for start, end in zip(starts, [*starts[1:], None])] == expected.split()
    pieces = list(
        asked.completions.create(
            model="tiny", prompt="w3 w4", max_tokens=5, temperature=0, stream=True, logprobs=2,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert [start for piece in pieces for choice in piece.choices for start in choice.logprobs.text_offset] == starts
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == expected
    assert pieces[-1].usage.completion_tokens == 5 and not pieces[-1].choices
    options: dict[str, Any] = {"model": "tiny", "input": "w3 w4", "max_output_tokens": 5, "temperature": 0}
    whole = asked.responses.create(**options)
    assert whole.output_text == expected and whole.status == "incomplete" and whole.usage.output_tokens == 5
    events = list(asked.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[0].type == "response.created" and events[-1].response.output_text == expected


def test_prompts_that_start_equally_are_read_once(served: Served) -> None:
    url, page, said = served[0], "/v1/chat/completions", " ".join(f"w{i}" for i in range(30, 55))
    before = metric(url, "shared_prompt_tokens_total")
    first, second = (post(url, page, chat(said))[1] for _ in range(2))
    assert first["choices"] == second["choices"]
    counted = second["usage"]
    assert counted["prompt_tokens"] == first["usage"]["prompt_tokens"] >= 25
    assert counted["prompt_tokens_details"]["cached_tokens"] == counted["prompt_tokens"] - 1
    several = post(url, page, chat(f"{said} w7", n=2, max_tokens=2))[1]["usage"]
    assert 25 <= several["prompt_tokens_details"]["cached_tokens"] < several["prompt_tokens"]
    options: dict[str, Any] = {"model": "tiny", "input": said, "max_output_tokens": 5, "temperature": 0}
    whole = client(url).responses.create(**options)
    assert whole.output_text == first["choices"][0]["message"]["content"]
    assert whole.usage.input_tokens_details.cached_tokens == counted["prompt_tokens"] - 1
    assert metric(url, "shared_prompt_tokens_total") >= before + 2 * counted["prompt_tokens"]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_has_gone_stops_generating(served: Served, stream: bool) -> None:
    """The answers would be as long as the context allows. If they end before we have gone, we ask again."""
    url = served[0]
    body = json.dumps(chat(max_tokens=None, n=8, stream=stream)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = metric(url, "answers_cancelled_total")

    def ask_and_go() -> bool:
        generated = metric(url, "generated_tokens_total")
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as raw:
            raw.sendall(head.encode() + body)
            wait_until(lambda: metric(url, "generated_tokens_total") > generated)
        wait_until(lambda: metric(url, "answers_running") + metric(url, "answers_waiting") == 0)
        return metric(url, "answers_cancelled_total") > before

    wait_until(ask_and_go)


def test_the_chat_page(served: Served) -> None:
    page = get(served[0].removesuffix("v1")).decode()
    assert "<title>lancebill</title>" in page and "http" not in page.replace("</html>", ""), (
        "loads nothing from outside"
    )


def test_streamed_answers_equal_whole_answers(served: Served) -> None:
    url = served[0]
    whole = client(url).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "w3 w4"}], max_tokens=5, temperature=0
    )
    assert len((whole.choices[0].message.content or "").split()) == 5
    assert stream_answer(url, "w3 w4") == whole.choices[0].message.content


def test_concurrent_clients(served: Served) -> None:
    url = served[0]
    words = [f"w{i} w{i + 1}" for i in range(1, 9)]
    alone = [stream_answer(url, word) for word in words]
    with ThreadPoolExecutor(len(words)) as pool:
        assert list(pool.map(lambda word: stream_answer(url, word), words)) == alone
    assert len(set(alone)) > 1


def test_requests_whose_bytes_are_there_share_their_steps(served: Served) -> None:
    """On a machine that is busy for longer than the engine gathers, one of them may come too late: three tries."""
    assert 4 in (steps_of_eight_at_once(*served) for _ in range(3))


def steps_of_eight_at_once(url: str, process: subprocess.Popen[str]) -> int:
    """How many steps eight answers of four tokens take."""
    host = urlsplit(url).netloc
    before = metric(url, "steps_total")
    process.send_signal(signal.SIGSTOP)  # the system accepts connections and keeps their bytes meanwhile
    try:
        clients = [http.client.HTTPConnection(host, timeout=LIMIT) for _ in range(8)]
        for number, each in enumerate(clients):
            body = {"model": "tiny", "prompt": f"w{number}", "max_tokens": 4}
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
            each.request("POST", "/v1/completions", json.dumps(body), headers)
    finally:
        process.send_signal(signal.SIGCONT)
    replies = [json.loads(each.getresponse().read()) for each in clients]
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [4] * 8
    return int(metric(url, "steps_total") - before)


def test_sigterm_ends_soon_and_lets_short_answers_finish(served: Served) -> None:
    url, process = served
    whole = stream_answer(url, "w5 w6", 10)
    assert stream_answer(url, "w5 w6", 10, on_first=lambda: process.send_signal(signal.SIGTERM)) == whole
    assert process.wait(timeout=LIMIT) in (0, -signal.SIGTERM)
    shown = process.stderr.read() if process.stderr else ""
    assert "int4-g32 x fp32 on" in shown and "run batched" in shown and "Traceback" not in shown


SLOW = """
import sys
sys.path.insert(0, sys.argv[1])
from test_engine import Counting
from test_requests import served
from dataclasses import replace
from lancebill.serving.app import App
from lancebill.serving.engine import BatchEngine, Limits
from lancebill.serving.listen import bind_addresses, make_server
from lancebill.serving.metrics import Metrics

engine = BatchEngine(Counting(float(sys.argv[3])), Limits(100_000)).start()
app = App(engine, replace(served(), context=100_000), Metrics(), sys.argv[4])
make_server(app).run(bind_addresses("127.0.0.1", int(sys.argv[2])))
"""


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, LIMIT), (signal.SIGINT, 0.01)])
def test_requests_that_a_signal_cuts_are_told(number: signal.Signals, seconds: float) -> None:
    """In a process with a model that only counts: one step that takes longer than everything else, or many steps."""
    port, unit = free_port(), Path(__file__).parents[1] / "unit" / "serving"
    command = [sys.executable, "-c", SLOW, str(unit), str(port), str(seconds), KEY]
    url = f"http://127.0.0.1:{port}/v1"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process, ThreadPoolExecutor(4) as pool:
        try:
            wait_until(lambda: answers(url))
            page, more = "/v1/chat/completions", {"max_tokens": 90_000}
            whole = [pool.submit(post, url, page, chat(**more)) for _ in range(2)]
            streams = [pool.submit(streamed, url, chat(stream=True, **more)) for _ in range(2)]
            wait_until(lambda: metric(url, "answers_running") + metric(url, "answers_waiting") == 4)
            start = time.monotonic()
            process.send_signal(number)
            for status, reply in (each.result(LIMIT) for each in whole):
                assert status == 503 and reply["error"]["code"] == "shutting_down"
            for text in (each.result(LIMIT) for each in streams):
                assert json.loads(text.rstrip().rpartition("data: ")[2])["error"]["code"] == "shutting_down"
            process.wait(LIMIT)
            assert time.monotonic() - start < LIMIT / 4, "5 s where no other program computes"
        finally:
            process.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(get(url.removesuffix("v1") + "health"))
    return False


def streamed(url: str, body: Any) -> str:
    """All that comes of a stream."""
    listed = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), listed)
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return str(answer.read().decode())
