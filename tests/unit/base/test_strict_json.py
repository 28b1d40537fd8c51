"""JSON from elsewhere: what no writer of ours makes is a ValueError, whatever Python's own reader makes of it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.split import FrameReport
from edge_run.base.strict_json import MOST_CONTAINERS, MOST_DEPTH, decode, parse, parse_first, to_json, write


@dataclass(frozen=True)
class Inner:
    size_bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Outer:
    speed: float
    inner: Inner


DEEP = MOST_DEPTH + 2
BRACKETS = "[{" * MOST_CONTAINERS
GOOD = {"speed": 0.5, "inner": {"size_bytes": 3, "names": ["x", "é", "\U0001f600"]}}


@pytest.mark.parametrize("is_ascii", [True, False])
def test_what_was_written_comes_back(is_ascii: bool) -> None:
    value = {**GOOD, "more": [None, True, -1.5e-7, 2**100, {}, [[[]]]]}
    assert parse(json.dumps(value, ensure_ascii=is_ascii)) == value
    assert parse(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nul",
        "[1,]",
        "NaN",
        "[-Infinity]",
        "1e999",
        "1" * 50,
        "-" + "1" * 5000,
        '{"a": 1, "a": 1}',
        '"\\ud800"',
        '{"\\udfff": 1}',
        "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        "[" * 500 + "]" * 500,  # Python reads it, and repr of it ends in a RecursionError somewhere else
        "[" * 100_000,
        "[" + "[]," * MOST_CONTAINERS + "0]",
        '["\\\\",' + "[]," * MOST_CONTAINERS + "0]",
        '["\\"",' + "[]," * MOST_CONTAINERS + "0]",
        b"\xff",
        b"\xef\xbb\xbf[]",
        '"\ud800"'.encode("utf-8", "surrogatepass"),
        "[1]".encode("utf-16"),
    ],
)
def test_what_nobody_of_ours_writes_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any of its kinds
        parse(text)
    assert len(str(caught.value)) < 300


def test_the_first_of_several_is_read_as_strictly() -> None:
    text = 'add{"a": [1, {}]}; {"b": 2'
    assert parse_first(text, 3) == ({"a": [1, {}]}, 17)
    for wrong in ('{"a": 1, "a": 1}', "NaN", "[" * DEEP + "]" * DEEP, "[" * 100_000, '"\\ud800"', "add", ""):
        with pytest.raises(ValueError):  # noqa: PT011 - any of its kinds
            parse_first(f"{wrong} []")


@pytest.mark.parametrize("text", [BRACKETS, f'"{BRACKETS}', f"{BRACKETS}\\", f'\\"{BRACKETS}"\\\\'], ids=range(4))
def test_brackets_in_strings_are_no_lists_and_objects(text: str) -> None:
    value = [{"a": text, text: ["", [{}]]}, text]
    assert parse(json.dumps(value)) == value


@pytest.mark.parametrize("text", ['["' + '[\\"' * 500_000, '["' + "[\\\\" * 500_000, '"["' * 500_000], ids=range(3))
def test_strings_are_told_apart_in_no_time(text: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError):  # noqa: PT011
        parse(text)
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize(
    "changed",
    [
        {"speed": 10**400},
        {"speed": 0},
        {"speed": True},
        {"inner": {"size_bytes": 10**400, "names": []}},
        {"inner": {"size_bytes": 2**63, "names": []}},
        {"inner": {"size_bytes": -1, "names": []}},
        {"inner": {"size_bytes": 1, "names": "x"}},
        {"inner": {"size_bytes": 1, "names": ["a\nb", 1]}},
        {"inner": "a\nb"},
        {"another": 1},
    ],
)
def test_a_dataclass_takes_what_it_declares(changed: dict[str, object]) -> None:
    assert decode(Outer, GOOD) == Outer(0.5, Inner(3, ("x", "é", "\U0001f600")))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode(Outer, {**GOOD, **changed})
    assert "\n" not in str(caught.value)


def test_paths_are_texts() -> None:
    assert parse(write({"a": [Path("/a/b")], "b": math.inf, "c": Path("c")})) == {"a": ["/a/b"], "b": None, "c": "c"}


def test_numbers_that_json_does_not_have_are_null() -> None:
    value = {"a": [math.inf, -math.inf, math.nan, 0.5], "b": (np.array([1.0, np.nan]), np.float32("inf")), "c": "NaN"}
    assert parse(write(value)) == {"a": [None, None, None, 0.5], "b": [[1.0, None], None], "c": "NaN"}
    assert parse(to_json(FrameReport("local", 0, 0.1, False, math.nan, 1)))["interest"] is None
    with pytest.raises(TypeError, match="set has no form in JSON"):
        write({"a": {1}})
