"""What bodies take that are being read."""

from __future__ import annotations

import contextlib
import tracemalloc
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from edge_run.base.units import MIB
from edge_run.devices.host.memory import BESIDE_BUDGETS
from edge_run.runtime.server.access import WHOSE
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.bodies import BODY, SMALL_BYTES, BodyRoom, decode, value_bytes
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.service import Service

pytestmark = pytest.mark.anyio


class Upload:
    """A request whose body has so many bytes; the last one comes when `may_end` is set."""

    def __init__(self, n_bytes: int, key: str = "", is_slow: bool = False) -> None:
        self._pieces = [b" " * (n_bytes - 3) + b"{}", b" "]
        self.may_end = anyio.Event()
        if not is_slow:
            self.may_end.set()
        self.request = Request({"type": "http", "headers": [], WHOSE: key}, self._receive)

    async def _receive(self) -> Message:
        if len(self._pieces) == 1:
            await self.may_end.wait()
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}


async def status(room: BodyRoom, upload: Upload) -> int:
    try:
        await room.read(upload.request, dict[str, Any])
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize(
    ("key", "n_slow", "other", "of_key", "of_other"),
    [
        ("", 8, "", 503, 503),
        ("one", 4, "two", 503, 200),
    ],
)
async def test_large_bodies_that_come_slowly_hold_up_no_small_ones_nor_those_of_other_keys(
    key: str, n_slow: int, other: str, of_key: int, of_other: int
) -> None:
    room = BodyRoom(8 * MIB)
    slow = [Upload(MIB + SMALL_BYTES, key, is_slow=True) for _ in range(n_slow)]
    async with anyio.create_task_group() as group:
        for upload in slow:
            group.start_soon(room.read, upload.request, dict[str, Any])
        await anyio.wait_all_tasks_blocked()
        assert await status(room, Upload(SMALL_BYTES, key)) == 200
        assert await status(room, Upload(2 * SMALL_BYTES, key)) == of_key
        assert await status(room, Upload(2 * SMALL_BYTES, other)) == of_other
        for upload in slow:
            upload.may_end.set()
    assert await status(room, Upload(2 * SMALL_BYTES, key)) == 200
    assert not room._held_bytes


async def test_room_is_held_until_what_was_asked_is_needed_no_more() -> None:
    room, upload = BodyRoom(8 * MIB), Upload(5 * MIB)
    stack = upload.request.scope[BODY] = contextlib.ExitStack()
    assert await status(room, upload) == 200
    assert await status(room, Upload(5 * MIB)) == 503
    stack.close()
    assert await status(room, Upload(5 * MIB)) == 200
    assert not room._held_bytes


async def test_a_body_of_many_values_takes_the_room_that_they_take() -> None:
    room, upload = BodyRoom(8 * MIB), Upload(0)
    upload._pieces = [b'{"a": [' + b"1," * 100_000 + b"1]}"]
    stack = upload.request.scope[BODY] = contextlib.ExitStack()
    assert await status(room, upload) == 200
    assert room._held_bytes.total() == 2 * MIB
    stack.close()


async def test_a_body_of_many_values_is_read_beside_another_of_its_key() -> None:
    room, other, upload = BodyRoom(8 * MIB), Upload(2 * SMALL_BYTES, "key"), Upload(0, "key")
    upload._pieces = [b'{"a": [' + b"1," * 100_000 + b"1]}"]
    other.request.scope[BODY] = contextlib.ExitStack()
    assert [await status(room, other), await status(room, upload)] == [200, 200]


async def test_who_is_counted_holds_no_room_while_the_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, closed = contextlib.ExitStack(), list[str]()
    stack.callback(closed.append, "room")
    service = Service(SimpleNamespace(is_at_hand=lambda entry: True), Admission(1))  # type: ignore[arg-type]
    monkeypatch.setattr(service, "hold", lambda entry, key: contextlib.nullcontext("served"))
    never = anyio.Event()
    request = Request({"type": "http", "headers": [], BODY: stack}, never.wait)  # type: ignore[arg-type]
    async with service.visit(SimpleNamespace(name="m"), request) as served:  # type: ignore[arg-type]
        assert (served, closed) == ("served", [])
    assert closed == ["room"]


class Asked(msgspec.Struct):
    """A request of all kinds of values."""

    texts: list[str] = []
    numbers: list[int] | None = None
    other: dict[str, Any] | None = None


@pytest.mark.parametrize(
    "asked",
    [
        {"texts": [f"word{n}" for n in range(20_000)]},
        {"texts": ["\N{SNOWMAN}" + "a" * 500_000], "other": {"x": [1.5, None, {"y": [True, "z" * 1000]}] * 500}},
        {"numbers": [*range(50_000), *[7] * 50_000]},
        {"texts": ["a", ""] * 50_000},
    ],
    ids=["words", "one text and trees", "numbers", "letters"],
)
def test_what_a_value_takes_is_what_python_took_for_it(asked: dict[str, Any]) -> None:
    body = msgspec.json.encode(asked)
    decode(b"{}", Asked)
    tracemalloc.start()
    try:
        value = decode(body, Asked)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert value.texts or value.numbers
    assert 0.9 * taken_bytes < value_bytes(value) < 1.02 * taken_bytes


@pytest.mark.parametrize("n_values", [100, 100_000], ids=["small", "large"])
async def test_what_requests_take_is_beside_budgets_until_it_is_needed_no_more(n_values: int) -> None:
    before = BESIDE_BUDGETS.n_bytes
    room, upload = BodyRoom(), Upload(0, is_slow=True)
    body = b'{"numbers": [%b]}' % b",".join(b"%d" % n for n in range(1000, 1000 + n_values))
    upload._pieces = [body, b" "]
    stack = upload.request.scope[BODY] = contextlib.ExitStack()
    async with anyio.create_task_group() as group:
        group.start_soon(room.read, upload.request, Asked)
        await anyio.wait_all_tasks_blocked()
        assert BESIDE_BUDGETS.n_bytes - before == len(body)
        upload.may_end.set()
    assert 36 * n_values <= BESIDE_BUDGETS.n_bytes - before < 48 * n_values + 1000
    stack.close()
    assert BESIDE_BUDGETS.n_bytes == before


async def test_what_is_refused_takes_nothing() -> None:
    before = BESIDE_BUDGETS.n_bytes
    upload = Upload(2 * SMALL_BYTES)
    upload.request.scope[BODY] = contextlib.ExitStack()
    upload._pieces[-1] = b"}"
    assert await status(BodyRoom(), upload) == 400
    assert BESIDE_BUDGETS.n_bytes == before
