"""Hostile input: valid input, broken by chance. Bytes are broken as bytes; JSON is broken as values, too.

What comes out is reached by no writer of ours: flipped, cut, repeated and spliced bytes, lengths at the borders of
their types; whole numbers of thousands of digits, NaN, nesting of thousands of levels, values of other types, missing,
foreign and doubled keys, lone surrogates, and JSON as large as a reader takes.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 200 << 10  # but for what is large on purpose
BORDERS = (0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 65535, 65536, 2**24, 2**30)
BORDERS += (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_SIZED = {1: struct.Struct("<B"), 2: struct.Struct("<H"), 4: struct.Struct("<I"), 8: struct.Struct("<Q")}
_WORDS = ("", "x", "\0", "\ud800", "\U0010ffff", "a\nb", "\x1b[2J", "nan", "-1", "1" * 400, "é" * 50, "../../x", "[")
_NUMBERS = (*BORDERS, -1, -(2**31), -(2**63), 0.5, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, 10**30, 10**400)


class Raw(str):
    """A value that `dump` writes as it is: JSON that no value of Python is dumped as, or none."""


_RAW = [Raw(text) for text in ("1" * 5000, "[" * 600 + "]" * 600, "[" * 20_000, '{"a":' * 3000 + "1" + "}" * 3000)]
_RAW += [
    Raw(text)
    for text in ("1e999", "-", '"\\ud800"', "nul", "[1,]", "{}{}", "0x1", "01", '"', "1.5e+3", '{"a":1,"a":2}')
]


def broken_bytes(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Return `data` with some of its bytes changed; others: valid input that is spliced into it."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(len(made) + 1)
        how = chance.randrange(8)
        if how == 0 and place < len(made):
            made[place] ^= 1 << chance.randrange(8)
        elif how == 1 and place < len(made):
            made[place] = chance.randrange(256)
        elif how == 2:
            del made[place:]
        elif how == 3:
            del made[place : place + chance.choice((1, 2, 4, 8, 40))]
        elif how == 4:
            made[place:place] = chance.randbytes(chance.choice((1, 2, 4, 8, 40)))
        elif how == 5:
            layout = _SIZED[chance.choice((1, 2, 4, 8))]
            made[place : place + layout.size] = layout.pack(chance.choice(BORDERS) % (1 << 8 * layout.size))
        elif how == 6:
            other = chance.choice(others)
            start = chance.randrange(len(other) + 1)
            made[place:] = other[start:]
        else:
            made[place:place] = made[place : place + chance.choice((1, 8, 64))] * chance.choice((1, 2, 30))
    return bytes(made)


def hostile_value(chance: random.Random) -> Any:
    """Return a value that hardly belongs where it is put."""
    how = chance.randrange(10)
    if how < 4:
        return chance.choice(_NUMBERS)
    if how < 6:
        return chance.choice(_WORDS)
    if how < 7:
        return chance.choice(_RAW)
    return chance.choice((None, True, False, [], {}, [[]], {"": {}}, [0] * 50, ["x"] * 50, {"key": 1, "kind": "want"}))


def broken_value(value: Any, chance: random.Random) -> Any:
    """Return a JSON value like `value`, changed in one place: at its root seldom, else anywhere below."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return _near(value, chance) if chance.random() < 0.3 else hostile_value(chance)
    made = dict(value) if isinstance(value, dict) else list(value)
    place = chance.choice(list(made) if isinstance(made, dict) else range(len(made)))
    how = chance.random()
    if how < 0.7:
        made[place] = broken_value(made[place], chance)  # type: ignore[index, call-overload]
    elif how < 0.8:
        del made[place]  # type: ignore[arg-type]
    elif isinstance(made, list):
        made[place:place] = (
            [hostile_value(chance)] if how < 0.9 else made[place : place + 1] * chance.choice((1, 9, 99))
        )
    elif how < 0.9:
        made[chance.choice(_WORDS)] = hostile_value(chance)
    else:
        made[place + chance.choice(_WORDS)] = made.pop(place)
    return made


def dump(value: Any) -> bytes:
    """Return `value` as JSON, or as what is none: NaN, lone surrogates and `Raw` are written as they are."""
    raw: list[str] = []

    def marked(one: Any) -> Any:
        if isinstance(one, Raw):
            raw.append(one)
            return f"raw-{len(raw) - 1}-raw"
        if isinstance(one, dict):
            return {key: marked(item) for key, item in one.items()}
        return [marked(item) for item in one] if isinstance(one, list | tuple) else one

    text = json.dumps(marked(value), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    for number, one in enumerate(raw):
        text = text.replace(f'"raw-{number}-raw"', one)
    return text.encode("utf-8", "surrogatepass")


def broken_document(documents: Sequence[Any], chance: random.Random) -> bytes:
    """Return the text of one of `documents`, broken as values, and seldom with a key twice, or as bytes."""
    value = chance.choice(documents)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        value = broken_value(value, chance)
    text = dump(value)
    if len(text) > MOST_BYTES:
        return broken_document(documents, chance)
    if text.startswith(b"{") and chance.random() < 0.05:
        text = b"{" + text[1:-1] + b"," + text[1:]
    return broken_bytes(text, [text], chance) if chance.random() < 0.1 else text


def large_text(size_bytes: int, chance: random.Random) -> bytes:
    """Return JSON of about `size_bytes` that takes as much more memory as JSON can when it is read."""
    one: bytes = chance.choice((b"[],", b"{},", b"1.5,", b'"\xf0\x9f\x98\x80",', b'{"a":0},', b"[[[]]],", b'"",'))
    return b"[" + one * max(1, size_bytes // len(one) - 1) + b"0]"


def _near(value: Any, chance: random.Random) -> Any:
    """Return a value of the same type, close by or at a border."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value, value * 2, chance.choice(BORDERS)))
    if isinstance(value, float):
        return chance.choice(
            (-value, value * 1e300, value / 1e300, math.nan, math.inf, int(value) if math.isfinite(value) else 0)
        )
    if isinstance(value, str):
        return chance.choice((value + "x", value[:-1], value.upper(), value[:99] * 200, value[::-1]))
    return value * 2 if isinstance(value, list) else {}
