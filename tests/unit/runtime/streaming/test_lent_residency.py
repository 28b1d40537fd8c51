"""Lent residency: when memory is lent, when it is taken back, and what is given back to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from edge_run.base.errors import Cancelled
from edge_run.base.units import MIB
from edge_run.runtime.decoding import compute_buffer
from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.streaming import lent_residency
from edge_run.runtime.streaming.lent_residency import CellRoom, IdleBuffer, LentResidency, WorkRoom
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import CellCount, Cells, CellTensor
from edge_run.tiers.kv.loans import Loans

SIZE = 16 * MIB
LENT = 12 * MIB


class FakeWeights:
    """Notes how many loans it has."""

    most_loans, least_loans, loan_bytes = 6, 0, 2 * MIB

    def __init__(self) -> None:
        self.n_loans = 0
        self.check: Callable[[], None] = lambda: None

    def borrow(self, n_loans: int) -> None:
        if n_loans < self.n_loans:
            self.check()
        self.n_loans = n_loans


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Memory that is taken for llama.cpp's, at its address."""
    address = _libc.map_anonymous(SIZE)
    _libc.advise_working_memory(address, SIZE, is_sparse=True)
    monkeypatch.setattr(compute_buffer.ggml, "compute_buffer", lambda node: (address + 32, SIZE - 64) if node else None)
    monkeypatch.setattr(compute_buffer, "touched_page_bytes", lambda: _libc.PAGE)
    yield address
    _libc.unmap(address, SIZE)


def seen() -> ComputeBuffer:
    found = ComputeBuffer()
    assert not found.note(0)
    assert found.note(1)
    return found


def touch(address: int, length: int) -> None:
    _libc.view(address, length)[:] = b"\1" * length


def lending(weights: FakeWeights, buffer: ComputeBuffer, **options: object) -> LentResidency:
    loans = Loans(LENT, weights.loan_bytes, weights.most_loans)
    return LentResidency(loans, weights, IdleBuffer(buffer, LENT), **options)  # type: ignore[arg-type]


def test_only_whole_pages_of_the_buffer_count(buffer: int) -> None:
    assert seen().size_bytes == SIZE - 2 * _libc.PAGE


def test_what_is_dropped_takes_nothing_and_its_neighbours_stay(buffer: int) -> None:
    found = seen()
    touch(buffer, SIZE)
    assert found.resident_bytes() == found.size_bytes
    found.drop()
    assert found.resident_bytes() == 0
    assert _libc.view(buffer, 33)[32] == 1
    touch(buffer + MIB, 3 * _libc.PAGE)
    assert found.resident_bytes() == 3 * _libc.PAGE


def test_what_is_touched_is_counted_in_pages_once_and_only_inside(buffer: int) -> None:
    ranges = [(buffer + MIB, 10), (buffer + MIB + 20, 10), (buffer + MIB + _libc.PAGE - 1, 2), (buffer - MIB, 100)]
    in_a_row = 2 + 1  # one more, as another buffer may begin elsewhere in a page
    assert seen().touched_bytes(ranges) == in_a_row * _libc.PAGE
    assert seen().touched_bytes([(buffer - MIB, 100 * MIB)]) == seen().size_bytes


def test_it_is_lent_for_single_tokens_and_taken_back_for_more(buffer: int) -> None:
    weights, found = FakeWeights(), seen()
    lent = lending(weights, found)
    for _ in range(3):
        touch(buffer, SIZE)
        lent.before_pass(32)
        assert weights.n_loans == 0
        assert found.resident_bytes() == found.size_bytes, "prefill batches keep what they have"
        lent.before_pass(1)
        assert weights.n_loans == 6
        assert found.resident_bytes() == 0
        touch(buffer + MIB, MIB)
        lent.before_pass(1)
        assert found.resident_bytes() == MIB, "what a pass of one token touches stays"
    assert lent.loans.times_granted == 3


def test_passes_that_verify_guesses_leave_the_buffer_idle_too(buffer: int) -> None:
    weights = FakeWeights()
    lent = LentResidency(Loans(LENT, 2 * MIB, 6), weights, IdleBuffer(seen(), LENT, narrow_tokens=8))
    for width, n_loans in ((1, 6), (8, 6), (3, 6), (9, 0), (8, 6)):
        lent.before_pass(width)
        assert weights.n_loans == n_loans, width


def test_the_weights_of_a_draft_model_hold_room_until_they_rest(buffer: int) -> None:
    weights = FakeWeights()
    lent = LentResidency(Loans(LENT, 2 * MIB, 6), weights, IdleBuffer(seen(), 0))
    lent.hold_draft(8 * MIB)
    lent.before_pass(1)
    assert weights.n_loans == (LENT - 8 * MIB) // (2 * MIB)
    lent.rest_draft()
    lent.rest_draft()
    lent.before_pass(1)
    assert weights.n_loans == 6
    assert lent.before_drafting(1, 2), "it has no keys and values of its own to be counted"
    assert weights.n_loans == (LENT - 8 * MIB) // (2 * MIB), "taken back before anything is guessed"


def test_a_draft_model_does_not_come_back_where_a_limit_fell_or_weights_are_stopped(buffer: int) -> None:
    weights, fallen = FakeWeights(), [0]
    lent = LentResidency(Loans(LENT, 2 * MIB, 6), weights, IdleBuffer(seen(), 0))
    lent.lacking_bytes = lambda: fallen[0]
    lent.hold_draft(8 * MIB)
    lent.before_pass(1)
    fallen[0] = 6 * MIB
    assert lent.before_drafting(1, 2), "it is there"
    lent.rest_draft()
    lent.before_pass(1)
    assert weights.n_loans == 3
    assert not lent.before_drafting(1, 2)
    assert weights.n_loans == 3, "and nothing is given up for it"
    fallen[0] = 0

    def stop() -> None:
        raise Cancelled("stopped")

    lent.before_pass(1)
    weights.check = stop
    assert not lent.before_drafting(1, 2)
    weights.check = lambda: None
    lent.before_pass(1)
    assert weights.n_loans == 6, "nothing is kept for it meanwhile"
    assert lent.before_drafting(1, 2)
    assert weights.n_loans == 2


def test_a_stop_while_taking_back_leaves_it_lent(buffer: int) -> None:
    weights, stops = FakeWeights(), [True]

    def stop() -> None:
        if stops:
            raise InterruptedError

    weights.check = stop
    lent = lending(weights, seen())
    lent.before_pass(1)
    with pytest.raises(InterruptedError):
        lent.before_pass(2)
    assert (lent.loans.n_loans, weights.n_loans) == (6, 6)
    stops.clear()
    lent.before_pass(2)
    assert (lent.loans.n_loans, weights.n_loans) == (0, 0)


def test_nothing_is_lent_of_what_is_not_known(buffer: int) -> None:
    """A pass that ended before its first node may have had another buffer."""
    found, weights = seen(), FakeWeights()
    lent = lending(weights, found)
    touch(buffer, SIZE)
    found.forget()
    lent.before_pass(1)
    assert weights.n_loans == 0
    assert seen().resident_bytes() == found.resident_bytes() + SIZE - 2 * _libc.PAGE, "nothing was dropped"
    assert found.note(1)
    lent.before_pass(1)
    assert weights.n_loans == 6, "it is known again"


def test_lending_ends_where_narrow_passes_take_more_than_was_left_to_them(buffer: int) -> None:
    """Once is no more than another layout of the same tensors; again and again it is what a pass needs."""
    weights = FakeWeights()
    lent = lending(weights, seen())
    lent.before_pass(1)
    touch(buffer, 8 * MIB)
    lent.before_pass(1)
    assert seen().resident_bytes() == 0, "given back"
    touch(buffer + 8 * MIB, MIB)
    lent.before_pass(1)
    assert weights.n_loans
    for _ in range(lent_residency.MOST_EXCESSES):
        touch(buffer, 8 * MIB)
        lent.before_pass(1)
    assert weights.n_loans == 0
    lent.before_pass(1)
    assert weights.n_loans == 0


def test_keys_and_values_take_memory_as_they_are_written_and_give_it_back(buffer: int) -> None:
    """Keys are rows of 4 KiB, so that a token takes a page of them."""
    keys = CellTensor(buffer, n_cells=1024, cell_bytes=_libc.PAGE)
    cells, count, weights = Cells([keys], _libc.PAGE), CellCount(1024), FakeWeights()
    pool_bytes, weights.loan_bytes, weights.most_loans = cells.bytes_for(1024), 64 * _libc.PAGE, 1000
    loans = Loans(pool_bytes, weights.loan_bytes, weights.most_loans)
    lent = LentResidency(loans, weights, IdleBuffer(seen(), 0), CellRoom(cells), count)
    touch(buffer, 4 * MIB)  # llama.cpp cleared all of it
    lent.before_pass(1)
    assert _libc.resident_bytes(buffer, 4 * MIB) == 0, "nothing of that counts"
    assert weights.n_loans == 15
    touch(buffer, _libc.PAGE)
    lent.before_pass(500)
    assert weights.n_loans == 8
    touch(buffer, 501 * _libc.PAGE)
    lent.before_pass(1)
    assert _libc.resident_bytes(buffer, 4 * MIB) == 501 * _libc.PAGE, "what is written stays"
    count.cut(100)
    lent.before_pass(1)
    assert _libc.resident_bytes(buffer, 4 * MIB) == 100 * _libc.PAGE, "what was cut off is given back"
    assert weights.n_loans == 14
    lent.take_back()
    assert weights.n_loans == 0


def test_a_draft_models_cells_are_divided_before_it_guesses_and_left_alone_by_passes(buffer: int) -> None:
    """Its keys are rows of 4 KiB; the model's own keep all their memory, and of the buffer nothing is lent."""
    cells, weights = Cells([CellTensor(buffer, n_cells=1024, cell_bytes=_libc.PAGE)], _libc.PAGE), FakeWeights()
    weights.loan_bytes, weights.most_loans = 64 * _libc.PAGE, 1000
    loans = Loans(cells.bytes_for(1024), weights.loan_bytes, weights.most_loans)
    lent = LentResidency(loans, weights, IdleBuffer(seen(), 0), draft_cells=CellRoom(cells))
    assert lent.before_drafting(0, 100)
    assert weights.n_loans == 0, "before the first pass the pool is whole"
    lent.before_pass(1)
    assert weights.n_loans == 14
    assert lent.before_drafting(100, 600)
    assert weights.n_loans == 6
    touch(buffer, 600 * _libc.PAGE)
    lent.before_pass(1)
    assert weights.n_loans == 6
    assert _libc.resident_bytes(buffer, 4 * MIB) == 600 * _libc.PAGE, "it may be guessing now"
    assert lent.before_drafting(200, 300)
    assert _libc.resident_bytes(buffer, 4 * MIB) == 200 * _libc.PAGE
    assert weights.n_loans == 11


def test_there_is_no_room_for_guesses_where_weights_are_stopped_while_they_give_back(buffer: int) -> None:
    cells, weights = Cells([CellTensor(buffer, n_cells=1024, cell_bytes=_libc.PAGE)], _libc.PAGE), FakeWeights()
    weights.loan_bytes, weights.most_loans = 64 * _libc.PAGE, 1000
    loans = Loans(cells.bytes_for(1024), weights.loan_bytes, weights.most_loans)
    lent = LentResidency(loans, weights, IdleBuffer(seen(), 0), draft_cells=CellRoom(cells))
    lent.before_pass(1)

    def stop() -> None:
        raise Cancelled("stopped")

    weights.check = stop
    assert not lent.before_drafting(0, 900)
    assert weights.n_loans == loans.n_loans == 16
    weights.check = lambda: None
    lent.before_pass(1)
    assert weights.n_loans == 1


def test_a_limit_that_falls_takes_loans_back_and_then_what_weights_have_of_their_own(buffer: int) -> None:
    weights, taken, said = FakeWeights(), [0], list[str]()
    loans = Loans(LENT, weights.loan_bytes, weights.most_loans, least_loans=-3)
    lent = LentResidency(loans, weights, IdleBuffer(seen(), LENT))
    lent.lacking_bytes, lent.say = lambda: taken[0], said.append
    found = []
    for taken[0] in (0, 3 * MIB, 12 * MIB, 18 * MIB, 19 * MIB, 30 * MIB, 0):
        lent.before_pass(1)
        found.append(weights.n_loans)
    assert found == [6, 4, 0, -3, -3, -3, 6]
    assert len(said) == 1
    assert "19 MiB below" in said[0]
    assert "1 MiB more" in said[0]


def test_what_a_full_pool_lacks_without_a_fallen_limit_is_nobodys_news(buffer: int) -> None:
    weights, said = FakeWeights(), list[str]()
    lent = LentResidency(Loans(LENT, weights.loan_bytes, 6), weights, IdleBuffer(seen(), 2 * LENT))
    lent.say = said.append
    lent.before_pass(2)
    assert (lent.loans.lacking_bytes, said) == (LENT, [])


def test_work_is_kept_for_as_wide_as_a_pass_was_and_freed_where_rows_are_sliced(buffer: int) -> None:
    freed: list[bool] = []
    work = WorkRoom(narrow_tokens=4, kept_bytes=100, freed_bytes=10, free=lambda: freed.append(True))
    found = [(work.needed_bytes(width), len(freed)) for width in (1, 4, 64, 64, 20, 4, 1, 512, 1)]
    assert found == [
        (0, 0),
        (0, 0),
        (60 * 110, 0),
        (60 * 110, 0),
        (60 * 100 + 16 * 10, 1),
        (60 * 100, 2),
        (60 * 100, 2),
        (508 * 110, 2),
        (508 * 100, 3),
    ]


def test_work_that_no_pass_has_taken_yet_is_lent(buffer: int) -> None:
    weights = FakeWeights()
    weights.most_loans = 100
    work = WorkRoom(1, MIB, 0, lambda: None)
    lent = LentResidency(Loans(31 * MIB, 2 * MIB, 100), weights, IdleBuffer(seen(), 0), work=work)
    found = []
    for width in (1, 16, 1, 32, 1):
        lent.before_pass(width)
        found.append(weights.n_loans)
    assert found == [15, 8, 8, 0, 0]
