"""The address of a server, and how its failure comes out."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("uvicorn")

import uvicorn

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import connections, serving
from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.catalogue.catalogue import Catalogue
from edge_run.runtime.server.catalogue.folder import ModelFolder
from edge_run.runtime.server.connections import BoundedProtocol, HealthBeforeServing
from edge_run.runtime.server.serving import ServeOptions, bind
from waiting import until


def test_an_address_is_taken_before_its_server_serves() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--host 127\.0\.0\.1 --port {port}: Address already in use; give"):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), 30):
            pass  # it waits, and is not refused


def test_what_ends_a_server_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(server: object, sockets: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(serving._Server, "serve", fail)
    catalogue: Any = Catalogue(ModelFolder(()), lambda path, interrupt: pytest.fail("nobody asks"))
    options = ServeOptions(access_for("localhost", "127.0.0.1"), 1, SamplingConfig())
    with bind("127.0.0.1", 0) as bound, pytest.raises(OSError, match=r"^the network is gone$"):
        anyio.run(serving._serve, catalogue, "nothing", 1.0, bound, options, lambda line: None)


def test_before_there_is_a_server_its_health_is_told_and_who_asks_for_more_waits_for_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    def ask(path: str) -> socket.socket:
        asking = connect()
        asking.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return asking

    def connect() -> socket.socket:
        return closing.enter_context(socket.create_connection(bound.getsockname(), 30))

    async def serve() -> None:
        server = serving._Server(
            uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None), lambda: None
        )
        server.config.load()
        await server.startup([bound])
        waiting[0].sendall(b"GET /one HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for connection, path in zip(waiting, ("/one", "/two"), strict=True):
            found = b""
            while not found.endswith(path.encode()):
                piece = await anyio.to_thread.run_sync(connection.recv, 4096)
                assert piece
                found += piece
        server.servers[0].close()
        for protocol in [*server.server_state.connections]:
            protocol.transport.close()
        await anyio.sleep(0.01)

    with contextlib.ExitStack() as closing:
        bound = closing.enter_context(bind("127.0.0.1", 0))
        with HealthBeforeServing(bound):
            waiting = [connect(), ask("/two")]
            for path in ("/health", "/v1/health"):
                with ask(path) as asking:
                    told = asking.makefile("rb").read()
                assert told.startswith(b"HTTP/1.1 503 ")
                assert told.endswith(b'{"status":"loading model"}')
        assert len(bound.early) == 2
        anyio.run(serve)
        assert not bound.early


def test_few_connections_are_held_before_there_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_EARLY", 2)
    with contextlib.ExitStack() as closing:
        bound = closing.enter_context(bind("127.0.0.1", 0))
        with HealthBeforeServing(bound):

            def ask(path: str) -> socket.socket:
                asking = closing.enter_context(socket.create_connection(bound.getsockname(), 30))
                asking.sendall(f"GET {path} HTTP/1.1\r\n".encode())
                return asking

            ask("/")
            until(lambda: len(bound.early) == 1)
            for _ in range(2):  # each has the last place for a moment
                assert ask("/health").makefile("rb").read().startswith(b"HTTP/1.1 503 ")
            for _ in range(3):
                ask("/")
            until(lambda: len(bound.early) == 2)
        assert len(bound.early) == 2
        with bound.accept()[0] as other:
            assert other.recv(3) == b"GET", "the others wait in the system's queue"
