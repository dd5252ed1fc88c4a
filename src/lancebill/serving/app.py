"""The routes of the server, as an ASGI application. What is not in `ROUTES` does not exist."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lancebill.serving import parameters
from lancebill.serving.engine import BatchEngine
from lancebill.serving.generation import Arrived, Generation
from lancebill.serving.mail import Mail
from lancebill.serving.metrics import CONTENT_TYPE, Metrics
from lancebill.serving.parameters import ApiError
from lancebill.serving.replies import ChatReply, CompletionReply, Reply
from lancebill.serving.requests import Served, Wanted, wanted
from lancebill.serving.responses_reply import ResponsesReply

MOST_BODY = 4 << 20  # bytes
LONG_TEXT = 1 << 16  # characters that take a fraction of a second to tokenise; 4 MiB take many seconds
LOOP_ROUNDS = 6  # of the event loop, from a connection that waits to be accepted to the task of its request
MODELS = "/v1/models/"  # and the name of one
PAGE = Path(__file__).with_name("page.html")
# The page runs its own script and talks to this server only.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"

ENDING = ApiError(503, "the server is shutting down", None, "shutting_down", "overloaded").body()

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The client closed its connection; nobody reads the reply."""


@dataclass(frozen=True)
class Call:
    """One request and the way to reply to it."""

    method: str
    path: str
    headers: Mapping[str, str]
    receive: Receive
    send: Send

    async def body(self) -> bytes:
        length = self.headers.get("content-length", "0")
        too_large = ApiError(413, f"a body has at most {MOST_BODY} bytes", None, "body_too_large")
        if not length.isdigit() or int(length) > MOST_BODY:
            raise too_large
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MOST_BODY:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(parts)

    async def reply(self, status: int, content: bytes, kind: str, **headers: str) -> None:
        listed = {"content-type": kind, "content-length": str(len(content)), **headers}
        await self._start(status, listed)
        await self.send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else content})

    async def reply_json(self, status: int, value: Mapping[str, Any], **headers: str) -> None:
        await self.reply(status, json.dumps(value, ensure_ascii=False).encode(), "application/json", **headers)

    async def stream(self, events: AsyncIterator[str]) -> None:
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        async for event in events:
            await self.send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": listed})

    async def until_gone(self) -> None:
        """Returns when the client closes its connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class App:
    """Replies to every request; holds what is shared by them."""

    def __init__(self, engine: BatchEngine, served: Served, metrics: Metrics, api_key: str | None = None) -> None:
        self.engine, self.served, self.metrics, self.api_key = engine, served, metrics, api_key
        self._started = int(time.time())
        self._mail: Mail[Arrived] | None = None
        self._long_texts = ThreadPoolExecutor(1, "lancebill-long-texts")
        self._model_path = f"{MODELS}{served.name}"
        self.routes: dict[str, tuple[str, Callable[[Call], Awaitable[int]]]] = {
            "/": ("GET", self._page),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            self._model_path: ("GET", self._model),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/responses": ("POST", self._response),
        }

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        last: Message | None = None

        async def remember(message: Message) -> None:
            nonlocal last
            last = message
            await send(message)

        call = Call(scope["method"], scope["path"], headers, receive, remember)
        try:
            status = await self._route(call)
        except ApiError as error:
            status = error.status
            more = {"retry-after": "1"} if status == 429 else {}
            await call.reply_json(status, error.body(), **more)
        except ClientGone:
            status = 499
        except asyncio.CancelledError:  # the server ends
            status = 503
            if last is None:
                await call.reply_json(status, ENDING)
            elif last.get("more_body", last["type"] == "http.response.start"):
                await send({"type": "http.response.body", "body": _event(ENDING).encode()})
        except Exception:
            body = ApiError(500, "internal error", None, "server_error", "server_error").body()
            await call.reply_json(500, body)
            raise
        self.metrics.count_request(self._label(call.path), status)

    def _label(self, path: str) -> str:
        """A route's name in the metrics: never what a client or a user wrote."""
        if path == self._model_path:
            return MODELS + "{model}"
        return path if path in self.routes else "unknown"

    async def _route(self, call: Call) -> int:
        if call.path not in self.routes:
            if call.path.startswith(MODELS):
                name = call.path.removeprefix(MODELS)[:128]
                raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")
            raise ApiError(404, f"no such page: {call.method[:16]} {call.path[:128]}", None, "not_found")
        method, handler = self.routes[call.path]
        if call.method not in {"GET": ("GET", "HEAD")}.get(method, (method,)):
            raise ApiError(405, f"{call.path} takes {method}", None, "method_not_allowed")
        if self.api_key is not None and call.path.startswith("/v1/"):
            scheme, _, given = call.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self.api_key.encode())
            if scheme.lower() != "bearer" or not right:
                raise ApiError(401, "wrong or missing API key", None, "invalid_api_key", "authentication_error")
        return await handler(call)

    async def _page(self, call: Call) -> int:
        policy = {"content-security-policy": PAGE_POLICY}
        await call.reply(200, PAGE.read_bytes(), "text/html; charset=utf-8", **policy)
        return 200

    async def _health(self, call: Call) -> int:
        status = 200 if self.engine.alive else 503
        await call.reply_json(status, {"status": "ok" if self.engine.alive else "stopped"})
        return status

    async def _metrics(self, call: Call) -> int:
        await call.reply(200, self.metrics.render(self.engine.counters()).encode(), CONTENT_TYPE)
        return 200

    async def _models(self, call: Call) -> int:
        await call.reply_json(200, {"object": "list", "data": [self._description()]})
        return 200

    async def _model(self, call: Call) -> int:
        await call.reply_json(200, self._description())
        return 200

    def _description(self) -> dict[str, Any]:
        name, length = self.served.name, self.served.context
        head = {"id": name, "object": "model", "created": self._started, "owned_by": "lancebill"}
        return {**head, "max_model_len": length}

    async def _chat(self, call: Call) -> int:
        values = await _values(call, parameters.CHAT, "messages")
        return await self._generate(call, values, ChatReply(self.served), done="data: [DONE]\n\n")

    async def _completion(self, call: Call) -> int:
        values = await _values(call, parameters.COMPLETION, "prompt")
        return await self._generate(call, values, CompletionReply(self.served), done="data: [DONE]\n\n")

    async def _response(self, call: Call) -> int:
        values = await _values(call, parameters.RESPONSE, "input")
        return await self._generate(call, values, ResponsesReply(self.served, values), done="")

    async def _generate(self, call: Call, values: Mapping[str, Any], reply: Reply, done: str) -> int:
        """Generate and reply, for as long as the client is there."""
        answering = asyncio.create_task(self._answer(call, values, reply, done))
        gone = asyncio.create_task(call.until_gone())
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientGone
            answering.result()
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)
        return 200

    def _own_mail(self) -> Mail[Arrived]:
        """The mail of the running loop, for all requests."""
        loop = asyncio.get_running_loop()
        if self._mail is None or self._mail.loop is not loop:
            self._mail = Mail(loop)
        return self._mail

    async def _answer(self, call: Call, values: Mapping[str, Any], reply: Reply, done: str) -> None:
        with self.engine.arriving():
            asked = await self._wanted(values)
            await _let_others_begin()
            generation = Generation(self.engine, self.served, asked, self._own_mail())
            generation.submit()
        try:
            if asked.stream:
                await call.stream(_server_sent(reply.events(generation), done))
            else:
                await call.reply_json(200, await reply.whole(generation))
        finally:
            generation.close()

    async def _wanted(self, values: Mapping[str, Any]) -> Wanted:
        """Validate and tokenise in another thread, so that other requests continue. Long texts share one thread and
        never block short ones; a long text leaves this queue if its client disconnects."""
        lane = self._long_texts if _characters(values) > LONG_TEXT else None
        return await asyncio.get_running_loop().run_in_executor(lane, wanted, self.served, values)


def _characters(value: Any) -> int:
    """The total length of all texts in a request."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0


async def _let_others_begin() -> None:
    """Let requests that have arrived register with the engine before it starts a step."""
    for _ in range(LOOP_ROUNDS):
        await asyncio.sleep(0)


async def _server_sent(events: AsyncIterator[dict[str, Any]], done: str) -> AsyncIterator[str]:
    """Server-sent events. An error after the first one can only be an event itself."""
    try:
        async for event in events:
            yield _event(event)
    except ApiError as error:
        yield _event(error.body())
    yield done


def _event(value: Mapping[str, Any]) -> str:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _values(call: Call, table: Mapping[str, parameters.Read], required: str) -> dict[str, Any]:
    kind = call.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps other sites' pages from sending requests through a browser
        raise ApiError(415, f"the content type must be application/json, not {kind[:64]!r}", None, "wrong_content_type")
    try:
        body = json.loads(await call.body(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", None, "invalid_json")
    return parameters.read_parameters(table, body, ["model", required])


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
