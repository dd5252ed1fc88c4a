"""Requests that the server refuses or cannot finish, without a server: limits, templates, failures."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

sys.path.insert(0, str(Path(__file__).parent))

from test_engine import LIMIT, VOCABULARY, Counting, running  # noqa: E402

from lancebill.errors import LaunchError, UnsupportedProblem  # noqa: E402
from lancebill.serving import templates  # noqa: E402
from lancebill.serving.app import LONG_TEXT, MOST_BODY, App, Call, ClientGone  # noqa: E402
from lancebill.serving.engine import Answer, BatchEngine  # noqa: E402
from lancebill.serving.generation import Generation, Piece  # noqa: E402
from lancebill.serving.listen import bind_addresses  # noqa: E402
from lancebill.serving.mail import Mail  # noqa: E402
from lancebill.serving.metrics import Metrics  # noqa: E402
from lancebill.serving.parameters import ApiError  # noqa: E402
from lancebill.serving.replies import CompletionReply  # noqa: E402
from lancebill.serving.requests import Served, Wanted, wanted  # noqa: E402
from lancebill.serving.sampling import Sampling, Token  # noqa: E402
from lancebill.serving.text import token_bytes  # noqa: E402

MESSAGES = [{"role": "user", "content": "w3 w4"}]


def served(template: str | None = None) -> Served:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = template
    return Served("tiny", tokenizer, 64, VOCABULARY, Sampling())


def test_prompts_in_tokens() -> None:
    assert wanted(served(), {"messages": MESSAGES}).prompts == ((3, 4),)
    joined = served("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    asked = {"instructions": "w9", "input": MESSAGES, "max_output_tokens": 3}
    assert wanted(joined, asked).prompts == ((9, 3, 4),) and wanted(joined, asked).most == (3,)
    thinking = served("{{ reasoning_effort }}")
    assert wanted(thinking, {"messages": MESSAGES, "reasoning_effort": "w7"}).prompts == ((7,),)


def test_tokens_of_an_answer() -> None:
    assert wanted(served(), {"prompt": ["w3", "w3 " * 60]}).most == (16, 4)
    assert wanted(served(), {"messages": MESSAGES}).most == (62,)
    assert wanted(served(), {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 5}).most == (5,)


@pytest.mark.parametrize(
    ("values", "status", "param"),
    [
        ({"model": "other", "prompt": ["w3"]}, 404, "model"),
        ({"prompt": ["w3"], "top_logprobs": 2}, 400, "top_logprobs"),
        ({"prompt": ["w3"], "stream_options": True}, 400, "stream_options"),
        ({"prompt": ["w3"], "logit_bias": {VOCABULARY: 1.0}}, 400, "logit_bias"),
        ({"prompt": ["w3"], "max_tokens": 64}, 400, "prompt"),
        ({"prompt": ["w3 " * 64]}, 400, "prompt"),
        ({"prompt": [""]}, 400, "prompt"),
        ({"prompt": [[VOCABULARY]]}, 400, "prompt"),
        ({"messages": MESSAGES, "reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"user": 1}}, 400, "chat_template_kwargs"),
        ({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
        ({"messages": MESSAGES}, 400, "messages"),
    ],
)
def test_what_is_refused(values: Mapping[str, Any], status: int, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wanted(served("{{ raise_exception('no users') }}"), values)
    assert (caught.value.status, caught.value.param) == (status, param)


@pytest.mark.parametrize(
    "template", ["{{ x | tojson }}", "{{ 1 // x[0] }}", "{{ x + 1 }}", "{{ x['a'].b.c }}", "{% if"]
)
def test_a_template_that_cannot_use_a_variable_refuses_it(template: str) -> None:
    deep: Any = [0]
    for _ in range(5000):
        deep = [deep]
    for value in (deep, [0], "\ud800", 10**400):
        with pytest.raises(ApiError) as caught:
            for part in (template, "{{ x }}{{ x[0][0].c }}{{ 1 // 0 }}"):
                wanted(served(part), {"messages": MESSAGES, "chat_template_kwargs": {"x": value}})
        assert caught.value.status == 400 and json.dumps(caught.value.body(), ensure_ascii=False).encode()


TEMPLATE = """{%- macro shown(message) %}{{ message.content }}{% endmacro -%}
{%- if tools %}{{ tools | tojson }}{% endif %}{% if thinking is not defined %}{% set thinking = true %}{% endif -%}
{%- for message in messages %}{% if loop.first and depth is defined %}{{ raise_exception("other") }}{% endif -%}
{% generation %}{{ shown(message) }}{% endgeneration %}{% if not thinking %}{% break %}{% endif %}{% endfor -%}
{%- set space = namespace(a=1) %}{{ bos_token }}{% if add_generation_prompt %}{% endif %}"""


def test_variables_are_those_that_the_template_reads() -> None:
    assert templates.variables(TEMPLATE) == {"thinking", "depth", "bos_token"}
    assert templates.variables("{% if") == frozenset()
    refused = ["tools", "messages", "loop", "message", "is", "first", "other", "space", "namespace", "raise_exception"]
    refused += ["chat_template", "tokenize", "add_generation_prompt", "shown", "a", "content", "\ud800"]
    for name in refused:
        with pytest.raises(ApiError) as caught:
            wanted(served(TEMPLATE), {"messages": MESSAGES, "chat_template_kwargs": {name: []}})
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs"), name
    given = {"messages": MESSAGES, "chat_template_kwargs": {"thinking": False}}
    assert wanted(served(TEMPLATE), given).prompts == ((3, 4),)


def generate(engine: BatchEngine, prompts: Sequence[tuple[int, ...]], stops: tuple[str, ...] = ()) -> list[Piece]:
    async def pieces() -> list[Piece]:
        asked = Wanted(tuple(prompts), 1, (4,) * len(prompts), Sampling(), stops, False, False)
        generation = Generation(engine, served(), asked, Mail(asyncio.get_running_loop()))
        generation.submit()
        return [piece async for piece in generation.pieces()]

    return asyncio.run(pieces())


def test_answers_until_they_stop() -> None:
    engine = running(Counting())
    assert "".join(piece.text for piece in generate(engine, [(3, 4)])).split() == ["w7", "w14", "w28", "w6"]
    stopped = generate(engine, [(3, 4)], stops=("w14",))
    assert "".join(piece.text for piece in stopped).split() == ["w7"] and stopped[-1].finish == "stop"
    assert engine.stop(5)


def test_special_tokens_are_stops() -> None:
    """w14 has no text: it is skipped."""
    model = served()
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["w14", "w28"]})
    assert wanted(model, {"prompt": ["w3"], "stop": ("w14", "w1", "4")}).stop_tokens == {14}
    engine = running(Counting())

    async def pieces(stops: tuple[str, ...]) -> list[Piece]:
        asked = wanted(model, {"prompt": ["w3 w4"], "max_tokens": 4, "stop": stops})
        generation = Generation(engine, model, asked, Mail(asyncio.get_running_loop()))
        generation.submit()
        return [piece async for piece in generation.pieces()]

    whole, cut = asyncio.run(pieces(())), asyncio.run(pieces(("w14", "w7 w7")))
    assert "".join(piece.text for piece in whole).split() == ["w7", "w6"] and whole[-1].finish == "length"
    assert "".join(piece.text for piece in cut).split() == ["w7"] and cut[-1].finish == "stop"
    assert [token.id for piece in cut for token in piece.tokens] == [7]
    assert engine.stop(5)


def test_a_full_queue_and_a_failing_model() -> None:
    full, failing = running(Counting(), waiting=1), Counting()
    with pytest.raises(ApiError) as caught:
        generate(full, [(3, 4)] * 2)
    assert caught.value.status == 400, "it would never fit"
    full._waiting.extend([Answer((3,), 1, Sampling(), lambda event: None)])  # as long as the engine has not seen it
    with pytest.raises(ApiError) as caught:
        generate(full, [(3, 4)])
    assert caught.value.status == 429
    failing.fail_at = 1
    broken = running(failing)
    with pytest.raises(ApiError) as caught:
        generate(broken, [(3, 4)])
    assert caught.value.status == 500
    assert full.stop(5) and broken.stop(5)


def call(*messages: Mapping[str, Any], **headers: str) -> Call:
    """A request whose body and end arrive as these messages."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return dict(left.pop(0))

    async def send(message: Mapping[str, Any]) -> None:
        raise AssertionError(f"nothing is to be sent: {message}")

    return Call("POST", "/", headers, receive, send)


def test_bodies_in_pieces() -> None:
    piece, last = {"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.request", "body": b"c"}
    gone = {"type": "http.disconnect"}
    assert asyncio.run(call(piece, piece, last).body()) == b"ababc"
    with pytest.raises(ClientGone):
        asyncio.run(call(piece, gone).body())
    large = {"type": "http.request", "body": bytes(MOST_BODY), "more_body": True}
    for asked in (call(large, large), call(**{"content-length": str(MOST_BODY + 1)}), call(**{"content-length": "-1"})):
        with pytest.raises(ApiError) as refused:
            asyncio.run(asked.body())
        assert refused.value.status == 413
    waiting = call(last, gone, gone)
    asyncio.run(waiting.until_gone())
    assert asyncio.run(waiting.receive()) == gone  # nothing is read after the first


class Client:
    """Sends one request to an application, and keeps what comes back."""

    def __init__(self, path: str, body: Mapping[str, Any] | None = None, **headers: str) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self._gone = asyncio.Event()
        self._left = [{"type": "http.request", "body": json.dumps(body).encode()}]
        listed = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"method": "GET" if body is None else "POST", "path": path, "headers": listed}

    async def receive(self) -> dict[str, Any]:
        if not self._left:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        return self._left.pop()

    def leave(self) -> None:
        self._gone.set()

    async def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


def test_the_key_and_its_scheme() -> None:
    engine = running(Counting())
    app = App(engine, served(), Metrics(), api_key="clé")
    for given, status in [("Bearer clé", 200), ("bearer clé", 200), ("clé", 401), ("Basic clé", 401), ("Bearer", 401)]:
        client = Client("/v1/models", authorization=given)
        asyncio.run(app(client.scope, client.receive, client.send))
        assert client.status == status, given
    assert engine.stop(5)


@pytest.mark.parametrize("times", [1, 2])  # uvicorn cancels what is left, then asyncio does
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_the_end_of_the_server_cuts_get_an_error(stream: bool, times: int) -> None:
    engine = running(Counting(seconds=0.05))
    app = App(engine, served(), Metrics())
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "stream": stream}
    client = Client("/v1/chat/completions", body)

    async def cut() -> None:
        task = asyncio.create_task(app(client.scope, client.receive, client.send))
        while not engine.counters().generated_tokens:
            await asyncio.sleep(0.01)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await task

    asyncio.run(cut())
    assert client.status == (200 if stream else 503) and b"shutting down" in client.sent[-1]["body"]
    assert [message.get("more_body", False) for message in client.sent[1:]].count(False) == 1, "it ends once"
    assert engine.stop(5)


class Holding:
    """A tokenizer that takes as long as it is told to for long texts."""

    chat_template = None

    def __init__(self, inner: Any) -> None:
        self.inner, self.go, self.begun = inner, threading.Event(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str) -> Any:
        if len(text) > LONG_TEXT:
            self.begun += 1
            self.go.wait(LIMIT)
        return self.inner(text)


def test_long_texts_keep_no_thread_from_short_ones() -> None:
    engine, held = running(Counting()), Holding(served().tokenizer)
    app = App(engine, replace(served(), tokenizer=held), Metrics())
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    long = {"model": "tiny", "messages": [{"role": "user", "content": "w3 " * LONG_TEXT}]}
    many, short = [Client("/v1/chat/completions", long) for _ in range(40)], Client("/v1/chat/completions", body)

    async def together() -> None:
        tasks = [asyncio.create_task(app(each.scope, each.receive, each.send)) for each in many]
        try:
            while not held.begun:
                await asyncio.sleep(0.001)
            await asyncio.wait_for(app(short.scope, short.receive, short.send), LIMIT / 4)
            assert short.status == 200 and held.begun == 1
            many[1].leave()
            await tasks[1]
            assert not many[1].sent or many[1].status == 499, "its client does not wait any more"
        finally:
            held.go.set()
        await asyncio.gather(*tasks)

    asyncio.run(together())
    assert [each.status for each in many if each.sent] == [400] * 39 and held.begun == 39
    assert engine.stop(5)


def byte_level() -> Any:
    """A tokenizer of single bytes, and one whole character of three."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"âĤ¬": 256}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def test_bytes_of_tokens() -> None:
    tokenizer = byte_level()
    found = {token: token_bytes(tokenizer, token, tokenizer.decode([token])) for token in range(257)}
    assert found.pop(256) == "€".encode()
    assert set(found.values()) == {bytes([byte]) for byte in range(256)}
    assert token_bytes(Named("<0xE2>"), 0, "\ufffd") == b"\xe2"
    assert token_bytes(Named("\u2581x\ufffd"), 0, "\ufffd") is None


class Named:
    """A tokenizer whose tokens all have this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.name


def test_log_probabilities_of_tokens_of_equal_text() -> None:
    reply = CompletionReply(replace(served(), tokenizer=byte_level()))
    parts = [token for token in range(256) if reply._text(token) == "\ufffd"][:2]
    token = Token(parts[0], -1.0, ((parts[0], -1.0), (parts[1], -2.0)))
    assert reply._best(token) == {"\ufffd": -1.0, f"token_id:{parts[1]}": -2.0}


def test_an_address_of_another_machine() -> None:
    with pytest.raises(LaunchError, match="cannot listen"):
        bind_addresses("192.0.2.1", 0)


def test_a_server_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "lancebill.serving.listen")
    with pytest.raises(UnsupportedProblem, match=r"lancebill\[serve\]"):
        importlib.import_module("lancebill.serving.listen")
