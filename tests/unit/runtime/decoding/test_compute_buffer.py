"""What bytes that are written take of memory, by what the kernel says of its huge pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.units import MIB
from edge_run.runtime.decoding import compute_buffer
from edge_run.runtime.decoding.compute_buffer import ComputeBuffer, touched_page_bytes
from edge_run.tiers._libc import PAGE


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the kernel says it, empty at first."""
    monkeypatch.setattr(compute_buffer, "HUGE_PAGES", tmp_path)
    touched_page_bytes.cache_clear()
    yield tmp_path
    touched_page_bytes.cache_clear()


@pytest.mark.parametrize(
    ("enabled", "huge_bytes", "found"),
    [
        ("[always] madvise never", "2097152", 2 * MIB),
        ("[always] madvise never", "33554432", 32 * MIB),
        ("always [madvise] never", "33554432", PAGE),
        ("[always] madvise never", None, PAGE),
        (None, None, PAGE),
    ],
)
def test_what_is_mapped_when_a_byte_is_touched(
    kernel: Path, enabled: str | None, huge_bytes: str | None, found: int
) -> None:
    for name, text in (("enabled", enabled), ("hpage_pmd_size", huge_bytes)):
        if text is not None:
            (kernel / name).write_text(text + "\n")
    assert touched_page_bytes() == found


@given(
    offset=st.integers(0, PAGE - 1),
    ranges=st.lists(st.tuples(st.integers(0, 40 * PAGE), st.integers(1, 3 * PAGE)), min_size=1, max_size=12),
)
def test_what_is_touched_is_no_more_wherever_in_a_page_the_buffer_begins(
    offset: int, ranges: list[tuple[int, int]]
) -> None:
    def pages(base: int) -> int:
        return len({page for start, length in ranges for page in touched_pages(base + start, length)})

    def touched_pages(address: int, length: int) -> range:
        return range(address // PAGE, (address + length - 1) // PAGE + 1)

    buffer = ComputeBuffer()
    buffer._start, buffer._stop = 0, 64 * PAGE
    with mock.patch.object(compute_buffer, "touched_page_bytes", return_value=PAGE):
        assert buffer.touched_bytes(ranges) >= pages(offset) * PAGE
