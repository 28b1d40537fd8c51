"""Rows of logits: which of them take memory, and that none in use is given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_run.base.protocols import Logits
from edge_run.runtime.llama.logit_rows import LogitRows, idle_row_bytes
from edge_run.tiers import _libc

MOST, OWN, PAGES = 8, 6, 256
ROW_BYTES = PAGES * _libc.PAGE


@pytest.fixture
def own() -> Iterator[int]:
    """Memory that is taken for llama.cpp's, in which more follows after its rows."""
    address = _libc.map_anonymous((OWN + 1) * ROW_BYTES)
    _libc.advise_working_memory(address, (OWN + 1) * ROW_BYTES, is_sparse=True)
    _libc.view(address, (OWN + 1) * ROW_BYTES)[:] = b"\1" * (OWN + 1) * ROW_BYTES
    yield address
    _libc.unmap(address, (OWN + 1) * ROW_BYTES)


def lent(own: int) -> LogitRows:
    rows = LogitRows(MOST, ROW_BYTES // 4, OWN, lambda: own)
    rows.is_lent = True
    return rows


def held_rows(address: int, n_rows: int = OWN) -> int:
    return _libc.resident_bytes(address, n_rows * ROW_BYTES) // ROW_BYTES


def address_of(rows: Logits) -> int:
    return int(rows.__array_interface__["data"][0])


def test_those_of_llama_cpp_that_a_pass_does_not_write_are_freed(own: int) -> None:
    rows = lent(own)
    assert rows.needed_bytes(3) == 2 * ROW_BYTES
    assert held_rows(own) == 3
    assert _libc.view(own, ROW_BYTES)[0] == 1
    assert _libc.view(own + OWN * ROW_BYTES, 1)[0] == 1, "what is behind them is not llama.cpp's rows"
    rows.note_pass(5)
    assert rows.needed_bytes(5) == 4 * ROW_BYTES
    assert rows.needed_bytes(1) == 0


def test_rows_of_a_batch_stay_while_its_passes_run(own: int) -> None:
    rows = lent(own)
    taken = rows.take(6)
    taken[:] = 7
    assert rows.needed_bytes(2) == (1 + 5) * ROW_BYTES
    assert (taken == 7).all()


def test_a_batch_with_fewer_rows_gives_the_others_back(own: int) -> None:
    rows = lent(own)
    taken = rows.take(6)
    taken[:] = 7
    fewer = rows.take(2)
    assert (fewer == 7).all(), "they are the same memory"
    assert held_rows(address_of(taken), 6) == 2
    assert rows.needed_bytes(2) == (1 + 1) * ROW_BYTES
    assert rows.take(MOST + 1).shape == (MOST + 1, ROW_BYTES // 4)
    assert rows.needed_bytes(2) == (1 + 1) * ROW_BYTES, "more than there may be are memory of their own"


def test_what_nobody_has_lent_keeps_its_memory(own: int) -> None:
    rows = LogitRows(MOST, ROW_BYTES // 4, OWN, lambda: own)
    taken = rows.take(6)
    taken[:] = 7
    rows.take(1)
    assert held_rows(address_of(taken), 6) == 6
    rows.free()
    assert held_rows(address_of(taken), 6) == held_rows(own) == 0
    assert idle_row_bytes(OWN, ROW_BYTES // 4) == 2 * (OWN * ROW_BYTES - 2 * _libc.PAGE)


@pytest.mark.parametrize("vocabulary", [16, ROW_BYTES // 4])
def test_what_cannot_be_freed_counts_as_taken(vocabulary: int) -> None:
    rows = LogitRows(MOST, vocabulary, OWN)  # where llama.cpp's lie is not known
    rows.is_lent = True
    rows.take(6)
    rows.free()
    is_heap = vocabulary == 16
    assert idle_row_bytes(OWN, vocabulary) == (0 if is_heap else 2 * (OWN * ROW_BYTES - 2 * _libc.PAGE))
    held = (MOST - 1) * is_heap  # all of it, from the first batch on
    assert rows.needed_bytes(1) == held * 4 * vocabulary
    assert rows.needed_bytes(OWN) == (OWN - 1 + held) * 4 * vocabulary


def test_no_huge_pages_lie_under_rows_of_which_some_are_in_use(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = list[tuple[int, int]]()
    monkeypatch.setattr(_libc, "use_small_pages", lambda address, length: advised.append((address, length)))
    rows = lent(own)
    for n_outputs in (3, 1, 3):
        rows.needed_bytes(n_outputs)
        rows.note_pass(n_outputs)
    assert advised == [(own, OWN * ROW_BYTES)]
    rows.note_pass(OWN + 1)
    rows.needed_bytes(1)
    assert advised[1:] == [(own, (OWN + 1) * ROW_BYTES)], "llama.cpp has made room for one more"
    small = LogitRows(MOST, 1024, OWN, lambda: own)
    small.needed_bytes(1)
    assert len(advised) == 2, "what is not a mapping of its own would be cut into pieces that stay"
