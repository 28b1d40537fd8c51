"""Connections: that a client has left is noticed, whatever it sent before."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from edge_run.runtime.server.connections import PIECE_BYTES, BoundedProtocol

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


async def messages_of(sent: bytes) -> list[Any]:
    """Return what an app hears of a client that asks for a long answer, sends this a moment later, and leaves."""
    heard, has_body, has_left = list[Any](), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())
        has_body.set()
        heard.append(await receive())
        has_left.set()

    config, state, loop = Config(app, lifespan="off", log_config=None), ServerState(), asyncio.get_running_loop()
    config.load()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
    try:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(POST)
        await asyncio.wait_for(has_body.wait(), 60)
        await asyncio.sleep(0.05)
        writer.write(sent)
        await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(has_left.wait(), 10)
        return heard
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


@pytest.mark.parametrize("sent", [b"", b"\r\n", POST, b"x" * PIECE_BYTES], ids=["nothing", "line", "request", "much"])
def test_who_leaves_while_an_answer_is_made_is_noticed(sent: bytes) -> None:
    """After a line break, as some send behind a body, the app heard nothing, and made its answer to the end."""
    body, *after = asyncio.run(messages_of(sent))
    assert body["body"] == b"{}"
    assert after == [{"type": "http.disconnect"}]
