"""The address space of weights: chunks on a grid, frames that move between them, nothing readable that is not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.units import round_up
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace, MappedSpan, MoveRefused
from edge_run.tiers.chunk_states import NEW_FRAME
from mapped import PAGE, advice_at, content, is_readable, mapped

CHUNK = 4 * PAGE


def fill(address_space: AddressSpace, chunk: int, value: int) -> bytes:
    """Write `value` all over the chunk, and return what is there then."""
    place = address_space.place(chunk)
    data = bytes([value]) * place.length
    _libc.view(place.address, place.length)[:] = data
    return data


def read(address_space: AddressSpace, chunk: int) -> bytes:
    place = address_space.place(chunk)
    return content(place.address, place.length)


def mappings_of(address_space: AddressSpace) -> int:
    """How many mappings of the process lie in the address space."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split()[0].split("-"))
        count += any(start < span.stop and span.start < stop for span in address_space.spans)
    return count


@pytest.mark.parametrize("shift_pages", [0, 1, 3])
def test_chunks_cover_every_span_once_on_the_grid(shift_pages: int) -> None:
    with mapped([10 * CHUNK + 5, PAGE, 3 * CHUNK], CHUNK, shift_bytes=shift_pages * PAGE) as address_space:
        covered = {span.shard: span.start for span in address_space.spans}
        for chunk in range(address_space.n_chunks):
            place = address_space.place(chunk)
            assert place.address == covered[place.shard]
            covered[place.shard] += place.length
            assert place.file_offset == place.address - address_space.spans[place.shard].base
            assert place.is_whole == (place.length == CHUNK) == (chunk not in address_space.unmovable)
            assert not place.is_whole or place.file_offset % CHUNK == 0, "on the grid of the file, as packed blocks are"
        assert all(covered[span.shard] == span.stop for span in address_space.spans)
        assert address_space.total_bytes(range(address_space.n_chunks)) == sum(
            s.stop - s.start for s in address_space.spans
        )


def test_memory_is_given_back_where_the_kernel_has_room_for_no_further_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    with mapped([4 * CHUNK], CHUNK) as address_space:
        address_space.map(1, NEW_FRAME)
        fill(address_space, 1, 7)

        def refuse(*_: object, **__: object) -> int:
            raise OSError(errno.ENOMEM, "too many mappings")

        with monkeypatch.context() as full:
            full.setattr(_libc, "map_anonymous", refuse)
            address_space.unmap([1])
        place = address_space.place(1)
        assert _libc.resident_bytes(place.address, place.length) == 0


def test_chunks_of_a_range_are_those_that_hold_a_byte_of_it() -> None:
    with mapped([10 * CHUNK, 2 * CHUNK], CHUNK) as address_space:
        first, second = address_space.spans
        assert list(address_space.chunks_of(first.start, 1)) == [0]
        assert list(address_space.chunks_of(first.start + CHUNK - 1, 2)) == [0, 1]
        assert list(address_space.chunks_of(first.start + CHUNK, 2 * CHUNK)) == [1, 2]
        assert list(address_space.chunks_of(first.stop - 1, 1)) == [9]
        assert list(address_space.chunks_of(second.start, 2 * CHUNK)) == [10, 11]
        assert list(address_space.chunks_of(second.start, 0)) == [10], "an empty tensor lies somewhere too"
        assert address_space.span_of(second.stop - 1) is second


def test_what_is_outside_is_an_error_and_not_some_chunk() -> None:
    """A weight that lies elsewhere (a buffer of its own) must not be taken for one of ours."""
    with mapped([4 * CHUNK], CHUNK) as address_space:
        (span,) = address_space.spans
        for address, length in ((span.start - 1, 1), (span.stop, 1), (span.stop - 1, 2)):
            with pytest.raises(ValueError, match="in no mapping"):
                address_space.chunks_of(address, length)
        with pytest.raises(ValueError, match="in no mapping"):
            address_space.span_of(span.stop)


def test_nothing_is_readable_before_it_is_furnished() -> None:
    with mapped([4 * CHUNK], CHUNK) as address_space:
        address_space.map(2, None)
        readable = [is_readable(address_space.place(chunk).address) for chunk in range(4)]
        assert readable == [False, False, True, False]
        assert read(address_space, 2) == bytes(CHUNK)


def test_a_frame_takes_its_bytes_along_and_leaves_nothing_readable() -> None:
    with mapped([4 * CHUNK], CHUNK) as address_space:
        address_space.map(0, NEW_FRAME)
        data = fill(address_space, 0, 7)
        address_space.map(3, 0)
        assert read(address_space, 3) == data
        assert not is_readable(address_space.place(0).address)
        address_space.map(3, 3)
        assert read(address_space, 3) == data, "to where it is already: nothing happens"


@pytest.mark.parametrize("are_of_one_mapping", [True, False])
def test_frames_in_a_row_move_together(are_of_one_mapping: bool) -> None:
    """Also those that came from here and there, and are not one mapping to the kernel."""
    with mapped([32 * CHUNK], CHUNK) as address_space:
        if are_of_one_mapping:
            address_space.map(0, NEW_FRAME, 4)
        else:
            for chunk, start in enumerate((9, 30, 12, 20)):
                address_space.map(start, NEW_FRAME)
                address_space.map(chunk, start)
        data = [fill(address_space, chunk, 3 + chunk) for chunk in range(4)]
        address_space.map(24, 0, 4)
        assert [read(address_space, 24 + i) for i in range(4)] == data
        assert not any(is_readable(address_space.place(chunk).address) for chunk in range(4))


def test_a_frame_stays_out_of_forks_and_core_dumps_wherever_it_moves() -> None:
    """A child process would double them, and a core dump would write them all."""
    with mapped([4 * CHUNK], CHUNK) as address_space:
        address_space.map(0, NEW_FRAME)
        address_space.map(2, 0)
        assert {"dc", "dd"} <= advice_at(address_space.place(2).address)


def test_a_frame_moves_between_shards() -> None:
    with mapped([2 * CHUNK, 2 * CHUNK], CHUNK) as address_space:
        address_space.map(1, NEW_FRAME)
        data = fill(address_space, 1, 9)
        address_space.map(2, 1)
        assert read(address_space, 2) == data


def test_moving_costs_no_memory() -> None:
    """A frame is moved, not copied: after a thousand moves one frame is resident."""
    with mapped([64 * CHUNK], CHUNK) as address_space:
        address_space.map(0, NEW_FRAME)
        fill(address_space, 0, 1)
        before = _resident_bytes()
        for step in range(1000):
            address_space.map((step + 1) % 64, step % 64)
        assert _resident_bytes() - before < 32 * CHUNK


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_vacated_ranges_merge() -> None:
    """Each mapping counts against vm.max_map_count: what frames leave behind must not add up."""
    with mapped([64 * CHUNK], CHUNK) as address_space:
        address_space.map(0, NEW_FRAME)
        for step in range(500):
            address_space.map((step * 7 + 7) % 64, step * 7 % 64)
        assert mappings_of(address_space) <= 3


def test_a_refused_move_leaves_no_hole_and_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped the target by then: a hole would go to malloc, and the next move would destroy it."""
    with mapped([4 * CHUNK], CHUNK) as address_space:
        address_space.map(0, NEW_FRAME)
        fill(address_space, 0, 5)

        def refuse(source: int, target: int, length: int) -> None:
            _libc.unmap(target, length)
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(_libc, "move_pages", refuse)
            with pytest.raises(OSError, match="Cannot allocate"):
                address_space.map(2, 0)
        assert mappings_of(address_space) == 1, "all of it mapped, none of it accessible"
        assert not is_readable(address_space.place(0).address)
        address_space.map(2, NEW_FRAME)
        assert read(address_space, 2) == bytes(CHUNK)


def test_of_several_moves_one_that_is_refused_leaves_no_frame_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those count as not made from then on: what stayed mapped would be memory that nobody knows of."""
    with mapped([16 * CHUNK], CHUNK) as address_space:
        address_space.map(0, NEW_FRAME, 4)
        for chunk in range(4):
            fill(address_space, chunk, 5)
        move, calls = _libc.move_pages, iter(range(9))

        def refuse(source: int, target: int, length: int) -> None:
            if next(calls) in (0, 2):  # that of all together, and the second one
                raise OSError(12, "Cannot allocate memory")
            move(source, target, length)

        with monkeypatch.context() as patch:
            patch.setattr(_libc, "move_pages", refuse)
            with pytest.raises(OSError, match="Cannot allocate"):
                address_space.map(8, 0, 4)
        assert not any(is_readable(address_space.place(chunk).address) for chunk in range(16))
        assert mappings_of(address_space) == 1


@pytest.mark.parametrize(
    ("target", "source", "count"),
    [
        pytest.param(2, 8, 1, id="from a ragged end"),
        pytest.param(2, 9, 1, id="from behind the last chunk"),
        pytest.param(8, 2, 1, id="to a ragged end"),
        pytest.param(9, 2, 1, id="to behind the last chunk"),
        pytest.param(-1, 2, 1, id="to before the first chunk"),
        pytest.param(1, 7, 2, id="from a row with a ragged end"),
        pytest.param(7, 1, 2, id="to a row with a ragged end"),
        pytest.param(1, 4, 2, id="from across a hole"),
        pytest.param(4, 1, 2, id="to across a hole"),
    ],
)
def test_a_move_that_is_not_from_whole_chunks_to_whole_chunks_is_refused(target: int, source: int, count: int) -> None:
    """The kernel would move what is not ours, and llama.cpp's code or the heap may lie right behind a model."""
    with mapped([10 * CHUNK - PAGE], CHUNK, hole=range(5 * CHUNK, 6 * CHUNK)) as address_space:
        assert address_space.unmovable == {8}
        for chunk in range(address_space.n_chunks):
            address_space.map(chunk, NEW_FRAME)
        data = [fill(address_space, chunk, chunk) for chunk in range(address_space.n_chunks)]
        with pytest.raises(MoveRefused, match="not whole chunks"):
            address_space.map(target, source, count)
        assert [read(address_space, chunk) for chunk in range(address_space.n_chunks)] == data, "nothing has moved"


def test_a_hole_in_a_mapping_parts_chunks_that_are_neighbours_by_number() -> None:
    """llama.cpp gives back the pages of tensors that it does not use, and keeps the last page of the file."""
    hole = range(2 * CHUNK + PAGE, round_up(5 * CHUNK, PAGE))
    with mapped([6 * CHUNK], CHUNK, hole=hole) as address_space:
        assert [address_space.is_followed_by(chunk, chunk + 1) for chunk in range(3)] == [True, True, False]
        assert [address_space.place(chunk).length for chunk in (2, 3)] == [PAGE, CHUNK]
        assert address_space.place(3).file_offset == 5 * CHUNK


def test_shards_are_never_followed_by_each_other() -> None:
    """Two mappings may touch by chance; a read across would take the wrong file's bytes."""
    with mapped([2 * CHUNK, 2 * CHUNK], CHUNK) as address_space:
        first = address_space.spans[0]
        touching = AddressSpace(
            (first, address_space.spans[1].__class__(1, first.stop, first.stop + CHUNK, first.stop)), CHUNK
        )
        assert not touching.is_followed_by(1, 2)


def test_large_chunks_lie_on_a_grid_of_addresses() -> None:
    """There a frame moves as one huge page."""
    spans = [MappedSpan(0, 5 * PAGE, 5 * PAGE + 4 * CHUNK_BYTES, 5 * PAGE)]
    address_space = AddressSpace(spans)
    places = [address_space.place(chunk) for chunk in range(address_space.n_chunks)]
    assert all(place.address % CHUNK_BYTES == 0 for place in places if place.is_whole)
    assert sum(place.length for place in places) == 4 * CHUNK_BYTES
