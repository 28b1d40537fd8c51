"""Parts of a context's memory, put where they belong: what is zeros there takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.tiers import _libc
from edge_run.tiers.kv.block_file import clear_part, copy_part, place_part
from edge_run.tiers.kv.layout import MemoryPart

PAGES, BEFORE = 64, 100


@pytest.fixture
def part() -> Iterator[MemoryPart]:
    """Memory that was never written to, and begins within a page; a page before and after it is of another kind."""
    length = (PAGES + 3) * _libc.PAGE
    start = _libc.map_anonymous(length, _libc.PROT_NONE)
    inside = start + _libc.PAGE
    _libc.map_anonymous(length - 2 * _libc.PAGE, at=inside)
    _libc.advise_working_memory(inside, length - 2 * _libc.PAGE, is_sparse=True)
    yield MemoryPart(inside + BEFORE, PAGES * _libc.PAGE)
    _libc.unmap(start, length)


def held_pages(part: MemoryPart) -> int:
    """The pages under `part` that take memory; those that were only read are the kernel's one page of zeros."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if "-" in key and not key.endswith(":"):
            start, stop = (int(text, 16) for text in key.split("-"))
            is_here = start <= part.address < stop
        elif is_here and key == "Rss:":
            return int(rest[0]) * 1024 // _libc.PAGE
    raise AssertionError("it is in no mapping")


def test_what_is_zeros_takes_no_memory(part: MemoryPart) -> None:
    content = bytes([1]) * (3 * _libc.PAGE) + bytes((PAGES - 4) * _libc.PAGE) + bytes([2]) * _libc.PAGE
    place_part(part, content)
    assert copy_part(part) == content
    assert held_pages(part) == 6
    place_part(part, content[::-1])
    assert copy_part(part) == content[::-1], "zeros over what was there"
    assert held_pages(part) == 8


def test_to_clear_takes_no_memory(part: MemoryPart) -> None:
    place_part(part, bytes([3]) + bytes(part.size_bytes - 1))
    clear_part(part)
    assert not any(copy_part(part))
    assert held_pages(part) <= 2
