"""Limits of connections, with a server in this process: how many there are, and how slow their clients may be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from lancebill.errors import LaunchError
from lancebill.serving import listen

PIECE, PIECES = 1 << 20, 16
LIMIT = 60.0  # seconds: nothing is expected to take so long
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def much(scope: Any, receive: Any, send: Any) -> None:
    """An application with a long answer, more than the system keeps for a client that does not read."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for i in range(PIECES):
        await send({"type": "http.response.body", "body": bytes(PIECE), "more_body": i + 1 < PIECES})


class Running:
    """A server in a thread."""

    def __init__(self) -> None:
        self.bound = listen.bind_addresses("127.0.0.1", 0)
        self.server = listen.make_server(much)  # type: ignore[arg-type]  # any application
        self.thread = threading.Thread(target=self.server.run, args=(self.bound,))
        self.clients: list[socket.socket] = []
        self.thread.start()
        self.wait_until(lambda: self.server.started)

    def connect(self) -> socket.socket:
        self.clients.append(socket.create_connection(self.bound[0].getsockname(), timeout=LIMIT))
        return self.clients[-1]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.server.should_exit = True
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    server = Running()
    yield server
    server.stop()


class Stopped:
    """An application whose engine has failed."""

    class engine:
        failed = True


def test_a_server_whose_engine_has_failed_ends_with_an_error() -> None:
    with pytest.raises(LaunchError, match="engine has failed"):
        listen.serve_until_end(Stopped(), listen.bind_addresses("127.0.0.1", 0))  # type: ignore[arg-type]


def everything(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection, or breaks it."""
    found = []
    while True:
        try:
            found.append(client.recv(1 << 16))
        except ConnectionResetError:
            found.append(b"")
        if not found[-1]:
            return b"".join(found)


def test_one_connection_too_many(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "MOST_CONNECTIONS", 1)
    first = running.connect()
    first.sendall(REQUEST)
    assert first.recv(100).startswith(b"HTTP/1.1 200")
    refused = everything(running.connect())
    assert refused.startswith(b"HTTP/1.1 429") and b"too many connections" in refused


def test_a_client_that_pauses_gets_everything(running: Running) -> None:
    client = running.connect()
    client.sendall(REQUEST.replace(b"Host", b"Connection: close\r\nHost"))
    start = client.recv(100)
    time.sleep(0.2)  # the server has to wait
    assert (start + everything(client)).count(b"\0") == PIECE * PIECES


def test_a_client_that_stops_reading_is_dropped(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "STALL_SECONDS", 0.1)
    client = running.connect()
    client.sendall(REQUEST)
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    running.wait_until(lambda: not running.server.server_state.connections)
    assert everything(client).count(b"\0") < PIECE * PIECES - 100


@pytest.mark.parametrize("sent", [b"", REQUEST[:10]])
def test_a_request_that_does_not_arrive_is_dropped(
    sent: bytes, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "RECEIVE_SECONDS", 0.1)
    client = running.connect()
    client.sendall(sent)
    assert everything(client) == b""


def test_an_upgrade_is_a_request_like_others(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost"
    client = running.connect()
    client.sendall(REQUEST.replace(b"Host", upgrade))
    assert client.recv(100).startswith(b"HTTP/1.1 200") and not caplog.records


def test_nothing_stays_bound_if_one_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        addresses = [(*kinds, ("127.0.0.2", port)), (*kinds, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: addresses)  # a host with two addresses
        with pytest.raises(LaunchError, match="cannot listen"):
            listen.bind_addresses("two", port)
        socket.create_server(("127.0.0.2", port)).close()


def test_addresses_of_ipv6_are_its_own() -> None:
    """Other programs may have the same port of IPv4."""
    try:
        (bound,) = listen.bind_addresses("::1", 0)
    except LaunchError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with bound:
        assert bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
