"""What a request says: a body of bounded size, JSON of bounded depth, and of that the fields that we know."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from edge_run.base import strict_json
from edge_run.base.units import MIB, format_size
from edge_run.devices.host.memory import BESIDE_BUDGETS
from edge_run.runtime.processes.fair_room import FairRoom
from edge_run.runtime.server.access import whose
from edge_run.runtime.server.refusals import Refusal

MOST_BODY_BYTES = 8 * MIB
MOST_ROOM_BYTES = 64 * MIB
BODY = "edge_run.body"  # of an ASGI scope: an ExitStack, closed when what the body said is needed no more
BYTES_OF_A_VALUE = 64  # that most of them take once they are read, at least
SMALL_BYTES = 1 << 16  # of each body, which the bound of connections bounds; parsed in less than a few milliseconds
LARGEST_SHARED = 256  # whole numbers that are there once, however often a document has them

_Kind = TypeVar("_Kind")
_LEAVES = {str, int, float, bool, type(None)}  # of values of JSON; asked for an exact type, as there may be millions
_type_info: Callable[[Any], inspect.Type] = functools.cache(inspect.type_info)  # which takes milliseconds


class BodyRoom:
    """What all bodies may take together until a request is understood, so that many large ones cannot fill the memory.

    Room is held until the stack at BODY of the request's scope is closed: what a body says may wait for its model, and
    for its turn to be prepared. Without such a stack, until it is read. What it takes is beside budgets meanwhile: a
    model may be opened for it.

    The first SMALL_BYTES of a body are not counted, so that large ones that come slowly hold up large ones only; and
    where there are keys, those of one key may take a half.
    """

    def __init__(self, room_bytes: int = MOST_ROOM_BYTES) -> None:
        self._room_bytes = room_bytes
        self._held_bytes = Counter[str]()  # by key
        self._turn = FairRoom(1)

    async def read(self, request: Request, kind: type[_Kind]) -> _Kind:
        """Return the body of a request as a `kind`. Raises Refusal."""
        _check_encoding(request.headers)
        body, key, held = bytearray(), whose(request.scope), _Held()
        with contextlib.ExitStack() as reading:
            (request.scope.get(BODY) or reading).callback(self._give_back, held, key)
            reading.callback(lambda: BESIDE_BUDGETS.add(-len(body)))
            try:
                async for piece in request.stream():
                    if len(body) + len(piece) > MOST_BODY_BYTES:
                        raise _too_large()
                    self._hold(held, len(body) + len(piece) - SMALL_BYTES, key)
                    body += piece
                    BESIDE_BUDGETS.add(len(piece))
            except ClientDisconnect:
                raise Refusal(400, "the client went away before it had sent the request", closes=True) from None
            if len(body) <= SMALL_BYTES:
                return _decoded(held, body, kind)
            self._hold(held, min(BYTES_OF_A_VALUE * body.count(b","), self._room_bytes // 4), key)  # half a key's share
            async with self._turn.held(key):
                return await anyio.to_thread.run_sync(_decoded_alone, held, body, kind)

    def _hold(self, held: _Held, n_bytes: int, key: str) -> None:
        """Hold so many bytes, if fewer were held so far. Raises Refusal where there is no room."""
        more_bytes = max(0, n_bytes - held.room_bytes)
        if more_bytes > self._free_bytes(key):
            raise Refusal(503, "too many large requests at once", retry_after_s=5, closes=True)
        held.room_bytes += more_bytes
        self._held_bytes[key] += more_bytes

    def _give_back(self, held: _Held, key: str) -> None:
        BESIDE_BUDGETS.add(-held.memory_bytes)
        self._held_bytes[key] -= held.room_bytes
        if not self._held_bytes[key]:
            del self._held_bytes[key]

    def _free_bytes(self, key: str) -> int:
        free_bytes = self._room_bytes - self._held_bytes.total()
        return min(free_bytes, self._room_bytes // 2 - self._held_bytes[key]) if key else free_bytes


@dataclass(slots=True)
class _Held:
    """What a request holds: of the room, and of the memory once it is read."""

    room_bytes: int = 0
    memory_bytes: int = 0


def _decoded(held: _Held, body: bytearray, kind: type[_Kind]) -> _Kind:
    """Return what `decode` does, and note what that takes."""
    value = decode(body, kind)
    held.memory_bytes = value_bytes(value)
    BESIDE_BUDGETS.add(held.memory_bytes)
    return value


def _decoded_alone(held: _Held, body: bytearray, kind: type[_Kind]) -> _Kind:
    """Return what `_decoded` does; nobody measures memory before it is known what it takes."""
    with BESIDE_BUDGETS.changing:
        return _decoded(held, body, kind)


def value_bytes(value: Any) -> int:
    """Return what a value of JSON takes, or a struct with such: what Python has for many of them is not counted."""
    n_bytes, outer = sys.getsizeof(value), [value]
    while outer:
        inner = [one for each in outer for one in _inside(each)]
        n_bytes += sum([sys.getsizeof(one) for one in inner if not _is_shared(one)])
        outer = [one for one in inner if type(one) not in _LEAVES]
    return n_bytes


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return [getattr(value, name) for name in getattr(value, "__struct_fields__", ())]


def _is_shared(value: object) -> bool:
    """Return whether it is there once, however often a document has it."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_SHARED
    return value is None or (isinstance(value, str) and len(value) < 2)


def decode(body: bytes | bytearray, kind: type[_Kind], what: str = "the body") -> _Kind:
    """Return JSON, which is `what`, as a `kind`: fields that it does not have are left out.

    Raises Refusal that names what is wrong.
    """
    try:
        value = strict_json.parse(bytes(body))
    except ValueError as error:
        raise Refusal(400, f"{what} is not JSON as it should be: {_short(error)}", code="invalid_json") from None
    return convert(value, kind)


def convert(value: Any, kind: type[_Kind], where: str = "") -> _Kind:
    """Return a value of JSON as a `kind`; where: what it is part of. Raises Refusal that names what is wrong.

    Null is taken for a field that is not there, and 10.0 for 10: some clients write so.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        value = _plain(value, _type_info(kind))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        place = place.rpartition("` in `")[2]  # of a key that is wrong, the object that it is in
        param = (where + place.rstrip("`").removeprefix("$")).removeprefix(".") or None
        if message.startswith("Object missing required field"):
            param = message.split("`")[1] if param is None else f"{param}.{message.split('`')[1]}"
            message = "is missing"
        raise Refusal(400, f"{param}: {message}" if param else message, param=param) from None


def _plain(value: Any, kind: inspect.Type) -> Any:
    """Return a value of JSON without null for optional fields of a `kind`, and with whole numbers for its integers."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, float) and value.is_integer():
        is_number = any(isinstance(one, inspect.FloatType) for one in kinds)
        return int(value) if not is_number and any(isinstance(one, inspect.IntType) for one in kinds) else value
    if isinstance(value, list):
        items = zip(value, _item_kinds(kinds, len(value)), strict=True)
        return [_plain(one, item) if isinstance(one, float | list | dict) else one for one, item in items]
    if isinstance(value, dict):
        structs = [one for one in kinds if isinstance(one, inspect.StructType)]
        fields = {field.encode_name: field for struct in structs for field in struct.fields}
        return {
            name: _plain(inner, fields[name].type) if name in fields else inner
            for name, inner in value.items()
            if inner is not None or name not in fields or fields[name].required
        }
    return value


def _item_kinds(kinds: Iterable[inspect.Type], n_items: int) -> Iterable[inspect.Type]:
    """Return the kind of each item of a list that is one of `kinds`."""
    for kind in kinds:
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            return repeat(kind.item_type, n_items)
        if isinstance(kind, inspect.TupleType) and len(kind.item_types) == n_items:
            return kind.item_types
    return repeat(inspect.AnyType(), n_items)


def _check_encoding(headers: Mapping[str, str]) -> None:
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "a compressed body is not taken; send it as it is", closes=True)
    declared = headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > MOST_BODY_BYTES:
        raise _too_large()


def _too_large() -> Refusal:
    return Refusal(413, f"the body has more than {format_size(MOST_BODY_BYTES)}", closes=True)


def _short(error: Exception) -> str:
    """Return what is wrong with JSON, never the text itself: a decoding error quotes it."""
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    return " ".join(str(error).split())[:200]
