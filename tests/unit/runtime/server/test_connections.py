"""Connections: that a client has left is noticed, whatever it sent before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from edge_run.runtime.server.connections import PIECE_BYTES, BoundedProtocol

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
UPGRADE = POST.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")
N_AHEAD = 2 * PIECE_BYTES // len(POST)


@contextlib.asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of `app`, which may be closed in the block."""
    config, state, loop = Config(app, lifespan="off", log_config=None), ServerState(), asyncio.get_running_loop()
    config.load()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.close()
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def messages_of(sent: bytes, request: bytes) -> list[Any]:
    """Return what an app hears of a client that makes a request, sends this a moment later, and leaves."""
    heard, has_body, has_left = list[Any](), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())
        has_body.set()
        heard.append(await receive())
        has_left.set()

    async with client_of(app) as (_, writer):
        writer.write(request)
        await asyncio.wait_for(has_body.wait(), 60)
        await asyncio.sleep(0.05)
        writer.write(sent)
        await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(has_left.wait(), 60)
    return heard


@pytest.mark.parametrize("asked", [POST, UPGRADE], ids=["plain", "upgrade"])
@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", POST, b"x" * PIECE_BYTES, b"x" * (8 * PIECE_BYTES)],
    ids=["nothing", "line", "request", "much", "more"],
)
def test_who_leaves_while_an_answer_is_made_is_noticed(
    sent: bytes, asked: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a line break, as some send behind a body, the app heard nothing, and made its answer to the end."""
    monkeypatch.setattr(BoundedProtocol, "ahead_s", 0.05)
    body, *after = asyncio.run(messages_of(sent, asked))
    assert body["body"] == b"{}"
    assert after == [{"type": "http.disconnect"}]


@pytest.mark.parametrize(("answer_s", "ahead_s", "n_answered"), [(0.0, 30.0, N_AHEAD), (1.5, 0.5, 1)])
def test_of_many_requests_that_are_sent_at_once_a_slow_one_is_the_last(
    answer_s: float, ahead_s: float, n_answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "ahead_s", ahead_s)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(answer_s)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def answers() -> bytes:
        found = b""
        async with client_of(app) as (reader, writer):
            writer.write(POST * N_AHEAD)
            while found.count(b"done") < N_AHEAD and (more := await asyncio.wait_for(reader.read(1 << 16), 60)):
                found += more
        return found

    assert asyncio.run(answers()).count(b"done") == n_answered
