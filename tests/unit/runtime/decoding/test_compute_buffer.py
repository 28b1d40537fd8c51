"""What a byte that is written takes of memory, by what the kernel says of its huge pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.units import MIB
from edge_run.runtime.decoding import compute_buffer
from edge_run.runtime.decoding.compute_buffer import touched_page_bytes
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
