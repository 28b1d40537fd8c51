"""TextStream: whatever the split, the pieces are the decoded whole, cut at the first stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_run.base.errors import ConfigError
from edge_run.runtime.generation.text import TextStream

# Few letters, so that stop strings occur, overlap and contain one another; parts of characters, so that some break.
FRAGMENTS = st.sampled_from(
    [b"a", b"b", b"c", "é".encode(), "€".encode(), "😀".encode(), b"\xe2\x82", b"\xf0", b"\xff"]
)
DATA = st.one_of(st.lists(FRAGMENTS, max_size=24).map(b"".join), st.binary(max_size=24))
STOPS = st.lists(st.text(alphabet="abcé€\ufffd", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def split(data: bytes, points: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(bounds)]


@given(DATA, STOPS, st.lists(st.integers(min_value=0), max_size=24))
@example(b"abcd", ["bc", "abcd"], [1, 2, 3])
@example(b"abce", ["bc", "abcd"], [1, 2, 3])
@example(b"aab", ["ab"], [1, 2])
@example("a€".encode(), ["a€", "a"], [1])
def test_pieces_are_the_whole_cut_at_the_first_stop(data: bytes, stops: list[str], points: list[int]) -> None:
    stream = TextStream(stops)
    pieces = [stream.push(part) for part in split(data, points)]
    text = "".join(pieces) + stream.finish()
    whole = data.decode("utf-8", "replace")
    assert text == cut(whole, stops)
    assert stream.is_stopped == any(stop in whole for stop in stops)
    there = [stop for stop in stops if whole.startswith(stop, len(text))]
    assert stream.stop_text in (there or [""]), "of several that begin there, the one that was complete first"
    at_once = TextStream(stops)
    at_once.push(data)
    at_once.finish()
    assert at_once.stop_text == next(iter(there), "")
    assert stream.finish() == ""


@given(DATA, st.lists(st.integers(min_value=0), max_size=24))
def test_without_stops_only_an_unfinished_character_is_held_back(data: bytes, points: list[int]) -> None:
    stream, seen, text = TextStream(), b"", ""
    for part in split(data, points):
        seen += part
        text += stream.push(part)
        assert len(text.encode()) >= len(seen) - 3
        assert seen.decode("utf-8", "replace").startswith(text)


@given(DATA, STOPS)
def test_nothing_comes_after_the_stop(data: bytes, stops: list[str]) -> None:
    stream = TextStream(stops)
    for byte in data:
        was_stopped = stream.is_stopped
        piece = stream.push(bytes([byte]))
        assert not (was_stopped and piece)


def test_a_character_over_three_tokens() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "€".encode()] == ["", "", "€"]


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    stream = TextStream()
    assert stream.push(b"ok \xe2\x82") == "ok "
    assert stream.finish() == "\ufffd"


def test_what_may_begin_a_stop_string_is_held_back_and_then_let_go() -> None:
    stream = TextStream(["\nUser:"])
    assert stream.push(b"yes\nUs") == "yes"
    assert stream.push(b"ed") == "\nUsed"
    assert not stream.is_stopped


def test_a_stop_string_over_two_tokens_ends_the_answer_before_it() -> None:
    stream = TextStream(["\nUser:"])
    assert stream.push(b"yes\nUs") + stream.push(b"er: and") == "yes"
    assert stream.is_stopped
    assert stream.push(b"more") == stream.finish() == ""


def test_the_leftmost_stop_string_wins_also_when_another_is_complete_first() -> None:
    stream = TextStream(["bc", "abcd"])
    assert stream.push(b"-abc") == "-"
    assert not stream.is_stopped
    assert stream.push(b"d") == ""
    assert stream.is_stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        TextStream(["\n", ""])
