"""Checksums of chunks: whatever changes is found, in whichever run of chunks it is read again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_run.base.errors import ModelFileError
from edge_run.tiers import _libc
from edge_run.tiers.content_sums import ContentSums
from mapped import PAGE

LENGTHS = [2 * PAGE, 2 * PAGE, 3 * PAGE, PAGE + 123]
STARTS = [0, 2 * PAGE, 4 * PAGE, 7 * PAGE]


@pytest.fixture
def memory() -> Iterator[int]:
    address = _libc.map_anonymous(10 * PAGE)
    _libc.view(address, 10 * PAGE)[:] = random.Random(1).randbytes(10 * PAGE)
    yield address
    _libc.unmap(address, 10 * PAGE)


def test_what_was_read_together_agrees_when_it_is_read_apart(memory: int) -> None:
    sums = ContentSums(5)
    assert not sums.has_all([1])
    assert sums.agree(range(4), memory, LENGTHS)
    assert sums.has_all(range(4))
    assert not sums.has_all([3, 4])
    assert all(sums.agree([i], memory + STARTS[i], [LENGTHS[i]]) for i in range(4))
    assert sums.agree([1, 2], memory + STARTS[1], LENGTHS[1:3])


def test_what_was_read_again_is_compared_up_to_the_end_of_a_file_that_may_have_changed(memory: int) -> None:
    sums, lengths = ContentSums(5), [*LENGTHS[:3], 2 * PAGE]
    source = SimpleNamespace(path=Path("model"), size_bytes=PAGE + sum(LENGTHS), is_doubtful=False)
    sums.compare(source, range(4), memory, PAGE, lengths)
    _libc.view(memory + sum(LENGTHS), 1)[0] ^= 4  # behind the end
    source.is_doubtful = True
    sums.compare(source, range(4), memory, PAGE, lengths)
    _libc.view(memory + sum(LENGTHS) - 1, 1)[0] ^= 4
    with pytest.raises(ModelFileError, match="changed while it was in use"):
        sums.compare(source, [3], memory + STARTS[3], PAGE + STARTS[3], lengths[3:])
    source.is_doubtful = False
    sums.compare(source, range(4), memory, PAGE, lengths)


@pytest.mark.parametrize("place", [0, 3 * PAGE, 7 * PAGE - 1, 8 * PAGE + 122])
def test_a_byte_that_changed_is_found(memory: int, place: int) -> None:
    sums = ContentSums(5)
    sums.agree(range(4), memory, LENGTHS)
    _libc.view(memory + place, 1)[0] ^= 4
    assert not sums.agree(range(4), memory, LENGTHS)


def test_each_bit_of_each_page_counts() -> None:
    """The highest ones of a word too, wherever the page is in its chunk."""
    sums, length = ContentSums(1), 64 * PAGE
    memory = _libc.map_anonymous(length)
    content = _libc.view(memory, length)
    sums.agree([0], memory, [length])
    missed = []
    for place in range(7, length, PAGE):
        for bit in range(8):
            content[place] = 1 << bit
            if sums.agree([0], memory, [length]):
                missed.append((place // PAGE, bit))
        content[place] = 0
    _libc.unmap(memory, length)
    assert not missed


@pytest.mark.parametrize(
    ("place", "other", "length"),
    [(0, PAGE, PAGE), (0, 8, 8), (8, PAGE, 8), (24, PAGE + 8, 8), (16, PAGE - 16, 16)],
)
def test_what_changed_places_is_found(memory: int, place: int, other: int, length: int) -> None:
    """Pages, and words within one and across two."""
    sums, content = ContentSums(5), bytes(_libc.view(memory + place, length))
    sums.agree([0], memory, [2 * PAGE])
    _libc.copy(memory + other, memory + place, length)
    _libc.view(memory + other, length)[:] = content
    assert not sums.agree([0], memory, [2 * PAGE])
