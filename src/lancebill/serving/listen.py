"""Sockets, connections and the end of the server: everything between the network and `App`."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.serving.parameters import ApiError

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise UnsupportedProblem(
        "a dependency of the server is not installed", got=str(error), hint="pip install 'lancebill[serve]'"
    ) from None

if TYPE_CHECKING:  # its torch takes seconds to import, and an address in use is reported sooner
    from lancebill.serving.app import App

MOST_CONNECTIONS = 512
RECEIVE_SECONDS = 30.0  # to receive a whole request
STALL_SECONDS = 60.0  # a client that does not read its reply for this long is dropped
IDLE_SECONDS = 15  # a connection between two requests
FINISH_SECONDS = 2  # at the end, for the requests that are still open; the whole end takes less than 5 s
REFUSE_SECONDS = 1.0  # then, to tell those that did not end


class BoundedConnection(H11Protocol):
    """A connection that ends if its client sends or reads too slowly; one too many is refused."""

    _receiving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._receiving = self.loop.call_later(RECEIVE_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        complete = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if complete and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        elif not complete and self._receiving is None:
            self._receiving = self.loop.call_later(RECEIVE_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """A request to change the protocol is answered like any other; uvicorn's log would advise a package."""

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error in OpenAI's form too."""
        self.transport.write(_raw_reply(400, "Bad Request", ApiError(400, msg, None, "invalid_request")))
        self.transport.close()


def _raw_reply(status: int, phrase: str, error: ApiError) -> bytes:
    body = json.dumps(error.body()).encode()
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


_TOO_MANY = _raw_reply(
    429, "Too Many Requests", ApiError(429, "too many connections", None, "too_many_connections", "overloaded")
)


class EndingServer(uvicorn.Server):
    """Shuts down as on SIGTERM as soon as `failed()` is true. The process lives until all open requests have got an
    error."""

    def __init__(self, config: uvicorn.Config, failed: Callable[[], bool]) -> None:
        super().__init__(config)
        self.failed = failed

    async def on_tick(self, counter: int) -> bool:  # ten times a second
        self.should_exit = self.should_exit or self.failed()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn only cancels them: it raises the signal again before any of them could reply."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REFUSE_SECONDS)


def serve_until_end(app: App, sockets: list[socket.socket]) -> None:
    """Serve until a signal. If the engine ends before, an error makes the exit status one at which supervisors start
    the server again."""
    make_server(app, lambda: app.engine.failed).run(sockets)
    if app.engine.failed:
        raise LaunchError("the engine has failed, so the server has ended", hint="the reason is above")


def make_server(app: App, failed: Callable[[], bool] = lambda: False) -> uvicorn.Server:
    """A server for `run(sockets)`. At SIGINT or SIGTERM open requests have `FINISH_SECONDS` to end."""
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_level="warning",
        backlog=MOST_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=FINISH_SECONDS,
        server_header=False,
    )
    return EndingServer(config, failed)


def bind_addresses(host: str, port: int) -> list[socket.socket]:
    """Bind all addresses of `host` before the model is loaded, so that a port in use is reported early.

    The sockets do not listen yet: clients are refused until the server starts.
    """
    bound: list[socket.socket] = []
    elsewhere = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            try:
                bound.append(_bind(socket.socket(family, kind, protocol), address))
            except OSError as error:
                # `localhost` may resolve to an IPv6 address on a machine without IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                elsewhere = error
        if elsewhere is not None and not bound:
            raise elsewhere
    except (OSError, UnicodeError) as error:
        for each in bound:
            each.close()
        raise LaunchError(
            "cannot listen on this address", where=f"{host}:{port}", got=error, hint="see --host and --port"
        ) from None
    return bound


def _bind(unbound: socket.socket, address: Any) -> socket.socket:
    try:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if unbound.family == socket.AF_INET6:
            unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        unbound.bind(address)
    except OSError:
        unbound.close()
        raise
    return unbound
