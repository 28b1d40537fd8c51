"""Lent residency: when memory is lent, when it is taken back, and what is given back to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import pytest

from edge_run.base.units import KIB, MIB
from edge_run.runtime.decoding import compute_buffer
from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.graph.flow import Flow, Storage
from edge_run.runtime.slices import lent_residency
from edge_run.runtime.slices.lent_residency import MARGIN_BYTES, LentResidency, lendable_bytes
from edge_run.tiers import _libc

SIZE = 16 * MIB


class FakeWeights:
    """Notes what is kept and given up, as `Weights` is asked to."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.check: Callable[[], None] = lambda: None

    def pin(self, chunks: Collection[int]) -> None:
        assert not self.kept
        self.kept = set(chunks)

    def unpin(self, chunks: Collection[int]) -> None:
        self.check()
        assert self.kept == set(chunks)
        self.kept = set()


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Memory that is taken for llama.cpp's, at its address."""
    address = _libc.map_anonymous(SIZE)
    _libc.prepare_for_weights(address, SIZE, is_sparse=True)
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
    assert seen().touched_bytes(ranges) == 2 * _libc.PAGE
    assert seen().touched_bytes([(buffer - MIB, 100 * MIB)]) == seen().size_bytes


def test_what_a_narrow_graph_does_not_touch_may_be_lent(buffer: int) -> None:
    flow = Flow((Storage(0, MIB, buffer + 2 * MIB), Storage(None, 64 * KIB, buffer + 8 * MIB)), (), ())
    assert lendable_bytes(seen(), flow) == SIZE - 2 * _libc.PAGE - MIB - 64 * KIB - MARGIN_BYTES
    assert lendable_bytes(seen(), Flow((Storage(0, 12 * MIB, buffer),), (), ())) == 0, "too little"
    assert lendable_bytes(ComputeBuffer(), flow) == 0, "nothing was seen"


def test_it_is_lent_for_single_tokens_and_taken_back_for_more(buffer: int) -> None:
    weights, found = FakeWeights(), seen()
    lent = LentResidency(found, weights, (3, 4), 12 * MIB)  # type: ignore[arg-type]
    for _ in range(3):
        touch(buffer, SIZE)
        lent.before_pass(32)
        assert not weights.kept
        assert found.resident_bytes() == found.size_bytes, "prefill batches keep what they have"
        lent.before_pass(1)
        assert weights.kept == {3, 4}
        assert found.resident_bytes() == 0
        touch(buffer + MIB, MIB)
        lent.before_pass(1)
        assert found.resident_bytes() == MIB, "what a pass of one token touches stays"
    assert lent.times_lent == 3


def test_a_stop_while_taking_back_leaves_it_lent(buffer: int) -> None:
    weights, stops = FakeWeights(), [True]

    def stop() -> None:
        if stops:
            raise InterruptedError

    weights.check = stop
    lent = LentResidency(seen(), weights, (3,), 12 * MIB)  # type: ignore[arg-type]
    lent.before_pass(1)
    with pytest.raises(InterruptedError):
        lent.before_pass(2)
    assert lent.is_lent
    stops.clear()
    lent.before_pass(2)
    assert not lent.is_lent


def test_nothing_is_lent_of_what_is_not_known(buffer: int) -> None:
    """A pass that ended before its first node may have had another buffer."""
    found, weights = seen(), FakeWeights()
    lent = LentResidency(found, weights, (3,), 12 * MIB)  # type: ignore[arg-type]
    touch(buffer, SIZE)
    found.forget()
    lent.before_pass(1)
    assert lent.is_over
    assert not weights.kept
    assert seen().resident_bytes() == found.resident_bytes() + SIZE - 2 * _libc.PAGE, "nothing was dropped"


def test_lending_ends_where_narrow_passes_take_more_than_was_left_to_them(buffer: int) -> None:
    """Once is no more than another layout of the same tensors; again and again it is what a pass needs."""
    weights, ended = FakeWeights(), []
    end = lambda: ended.append(True)  # noqa: E731
    lent = LentResidency(seen(), weights, (3,), 12 * MIB, on_end=end)  # type: ignore[arg-type]
    lent.before_pass(1)
    touch(buffer, 8 * MIB)
    lent.before_pass(1)
    assert seen().resident_bytes() == 0, "given back"
    touch(buffer + 8 * MIB, MIB)
    lent.before_pass(1)
    assert weights.kept
    for _ in range(lent_residency.MOST_EXCESSES):
        touch(buffer, 8 * MIB)
        lent.before_pass(1)
    assert not weights.kept
    assert ended == [True]
    lent.before_pass(1)
    assert not weights.kept
