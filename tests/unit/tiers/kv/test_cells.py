"""Where keys and values lie: what so many cells take is never less than what is touched, and pages in use are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_run.tiers.kv.cells import CellCount, Cells, CellTensor, StreamCount

PAGE = 64
tensors = st.builds(
    CellTensor,
    address=st.integers(0, 1000),
    n_cells=st.integers(1, 80),
    cell_bytes=st.integers(1, 200),
    n_rows=st.sampled_from((1, 1, 2, 7)),
)


def bytes_of(tensor: CellTensor, cells: range) -> set[int]:
    """The addresses of the bytes of `cells`."""
    rows = (tensor.address + row * tensor.row_bytes for row in range(tensor.n_rows))
    return {row + cell * tensor.cell_bytes + i for row in rows for cell in cells for i in range(tensor.cell_bytes)}


@given(tensor=tensors, n_cells=st.integers(0, 100))
def test_no_fewer_pages_are_counted_than_are_touched(tensor: CellTensor, n_cells: int) -> None:
    touched = {address // PAGE for address in bytes_of(tensor, range(min(n_cells, tensor.n_cells)))}
    counted = tensor.touched_bytes(n_cells, PAGE)
    assert len(touched) * PAGE <= counted
    assert counted % PAGE == 0
    assert counted <= len(touched) * PAGE + 2 * PAGE * tensor.n_rows, "a page at each end of a row is not known"


@given(several=st.lists(tensors, max_size=4), n_cells=st.integers(0, 100), more=st.integers(0, 50))
def test_more_cells_take_no_less(several: list[CellTensor], n_cells: int, more: int) -> None:
    cells = Cells(several, PAGE)
    assert cells.bytes_for(n_cells) <= cells.bytes_for(n_cells + more)
    assert cells.bytes_for(n_cells) == sum(tensor.touched_bytes(n_cells, PAGE) for tensor in several)
    assert cells.bytes_for(0) == 0


def test_tensors_that_are_alike_are_counted_once_and_not_before_each_pass() -> None:
    alike = [CellTensor(1000 * i, 80, 16) for i in range(64)]
    assert len(Cells([*alike, CellTensor(0, 80, 8)], PAGE)._kinds) == 2


@given(tensor=tensors, n_cells=st.integers(0, 100))
def test_unused_are_all_whole_pages_in_which_no_cell_in_use_has_a_byte(tensor: CellTensor, n_cells: int) -> None:
    used = {address // PAGE for address in bytes_of(tensor, range(min(n_cells, tensor.n_cells)))}
    whole = bytes_of(tensor, range(tensor.n_cells))
    found = set()
    for address, length in tensor.unused(n_cells, PAGE):
        assert address % PAGE == length % PAGE == 0
        pages = set(range(address // PAGE, (address + length) // PAGE))
        assert length > 0
        assert not pages & found, "given back twice"
        found |= pages
    assert not found & used
    assert all(page * PAGE + i in whole for page in found for i in range(PAGE)), "not only cells lie there"
    if tensor.n_rows == 1:
        own = {
            page for page in {address // PAGE for address in whole} if {page * PAGE, page * PAGE + PAGE - 1} <= whole
        }
        assert found == own - used


@given(tensor=tensors, n_streams=st.integers(1, 5), lengths=st.lists(st.integers(0, 80), min_size=5, max_size=5))
def test_streams_are_equal_parts(tensor: CellTensor, n_streams: int, lengths: list[int]) -> None:
    """They cover the memory of all once, and take no more than is said of as many cells of all together."""
    whole = CellTensor(tensor.address, tensor.n_cells * n_streams, tensor.cell_bytes, tensor.n_rows)
    cells = Cells([whole], PAGE, n_streams)
    parts = [stream.tensors[0] for stream in cells.streams]
    assert [part.n_cells for part in parts] == [tensor.n_cells] * n_streams
    found = [address for part in parts for address in sorted(bytes_of(part, range(part.n_cells)))]
    assert found == sorted(bytes_of(whole, range(whole.n_cells)))
    used = [min(length, tensor.n_cells) for length in lengths[:n_streams]]
    taken = sum(stream.bytes_for(n) for stream, n in zip(cells.streams, used, strict=True))
    assert tensor.n_rows > 1 or taken <= cells.bytes_for(sum(used))


def test_tokens_in_streams_are_counted_for_each() -> None:
    count = StreamCount(90, 3)
    assert count.sequence_tokens == 30
    count.expect([0, 0, 2])
    count.add(3)
    count.expect([2])
    count.add(1)
    assert (count.tops, count.top, count.used) == ([2, 0, 2], 4, 4)
    count.note([2, 0, 1])
    assert (count.tops, count.used) == ([2, 0, 1], 3)


def test_tokens_of_a_text_take_a_cell_each() -> None:
    count = CellCount(100)
    count.add(30)
    count.add(1)
    assert (count.used, count.top) == (31, 31)
    count.cut(20)
    assert (count.used, count.top) == (20, 20)
    count.add(200)
    assert (count.used, count.top) == (100, 100)
    count.cut(0)
    assert (count.used, count.top) == (0, 0)


def test_guesses_that_come_true_may_lie_as_high_as_all_that_were_verified() -> None:
    count = CellCount(100, 8)
    count.add(30)
    count.fork(30)
    count.add(8)
    count.cut(32)
    assert (count.used, count.top) == (32, 38)
    count.add(3)
    assert (count.used, count.top) == (35, 38), "in the cells of the others"
    count.cut(25)
    assert (count.used, count.top) == (25, 33)
    count.cut(0)
    count.add(10)
    assert count.top == 10


def test_what_remains_of_several_sequences_may_lie_anywhere() -> None:
    count = CellCount(100, 8)
    count.add(60)
    count.fork(0)
    count.add(10)
    count.lower(70)
    count.cut(10)
    assert (count.used, count.top) == (10, 70)


def test_room_is_for_all_sequences_together() -> None:
    count = CellCount(20, 2)
    count.add(15)
    assert count.has_room(7)
    assert not count.has_room(8)
    count.lower(10)
    assert count.has_room(12)
