"""What requests hold until they are understood, prepared and read has bounds, in which no key stops another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.types import Message

from edge_run.devices.host.memory import BESIDE_BUDGETS
from edge_run.runtime.server.access import Access
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.app import Guard
from edge_run.runtime.server.bodies import BODY
from edge_run.runtime.server.catalogue.served_model import MOST_UNPREPARED, Preparing
from edge_run.runtime.server.connections import PIECE_BYTES, UnreadRoom
from edge_run.runtime.server.refusals import Refusal

pytestmark = pytest.mark.anyio


async def test_a_key_that_has_many_prompts_prepared_stops_no_other() -> None:
    preparing, may_end, order = Preparing(), threading.Event(), list[str]()

    async def prepare(key: str) -> None:
        await preparing.run(key, may_end.wait, 60)
        order.append(key)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(MOST_UNPREPARED + 2):
                group.start_soon(prepare, "many")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Refusal) as caught:
                await prepare("many")
            assert caught.value.status == 429
            group.start_soon(prepare, "few")
            await anyio.wait_all_tasks_blocked()
            may_end.set()
    assert order.index("few") < MOST_UNPREPARED // 2, "it was next, though its thread may be slower than others"


class Reader:
    """A client that reads so many pieces, and then none. pieces: what it has read."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.pieces, self.most = list[bytes](), most

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if len(self.pieces) >= self.most:
            await anyio.sleep_forever()
        self.pieces.append(message.get("body", b""))


async def test_the_client_is_dropped_that_read_nothing_for_longest_of_the_key_that_holds_most() -> None:
    room, sent, before = UnreadRoom(8 * PIECE_BYTES), dict[str, bool](), BESIDE_BUDGETS.n_bytes
    body: Message = {"type": "http.response.body", "body": b"x" * (3 * PIECE_BYTES)}

    async def write(name: str, key: str, reader: Reader) -> None:
        sent[name] = await room.write(reader.send, body, key)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for name, key in (("other", "b"), ("first", "a"), ("second", "a")):
                group.start_soon(write, name, key, Reader(1))
                await anyio.wait_all_tasks_blocked()
            assert sent == {"first": False}
            assert BESIDE_BUDGETS.n_bytes - before == 6 * PIECE_BYTES
            reader = Reader()
            await write("reads", "c", reader)
            assert (sent["reads"], len(reader.pieces)) == (True, 3)
            group.cancel_scope.cancel()
    assert not room._held
    assert BESIDE_BUDGETS.n_bytes == before


async def ask(guard: Guard, send: Callable[[Message], Any]) -> None:
    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"host", b"localhost")],
    }
    await guard(scope, receive, send)


async def test_an_answer_is_written_as_it_is_read_and_ends_what_was_held_for_its_body() -> None:
    released = False

    def release() -> None:
        nonlocal released
        released = True

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope[BODY].callback(release)
        await json_response("x" * (5 * PIECE_BYTES))(scope, receive, send)

    guard, reader = Guard(app, Access(frozenset({"localhost"}))), Reader()
    await ask(guard, reader.send)
    assert released
    assert max(map(len, reader.pieces)) == PIECE_BYTES
    assert len(b"".join(reader.pieces)) == 5 * PIECE_BYTES + 2
    guard._unread = UnreadRoom(6 * PIECE_BYTES)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, guard, Reader(2).send)
            await anyio.wait_all_tasks_blocked()
            await ask(guard, (other := Reader()).send)
    assert len(b"".join(other.pieces)) == 5 * PIECE_BYTES + 2
