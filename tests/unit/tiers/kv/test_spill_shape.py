"""What can be away: never more than really can, and what a plan has room for is enough for the run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_run.tiers.kv.cells import Cells, CellTensor
from edge_run.tiers.kv.spill_shape import SpillShape, piece_bytes

PAGE, N_CELLS = 64, 600
shapes = st.builds(
    lambda sizes, width, attentions, piece: SpillShape(
        Cells([CellTensor(37 * i, N_CELLS, size) for i, size in enumerate(sizes)], PAGE),
        [tuple(range(i, min(i + 2, len(sizes)))) for i in range(0, len(sizes), 2)],
        piece,
        width,
        attentions,
    ),
    sizes=st.lists(st.integers(8, 90), min_size=1, max_size=9),
    width=st.integers(1, 100),
    attentions=st.integers(1, 3),
    piece=st.sampled_from((64, 128, 1024)),
)


@given(shape=shapes, n_rows=st.integers(0, N_CELLS), shift=st.integers(0, PAGE - 1))
def test_no_more_is_complete_than_lies_in_whole_pieces(shape: SpillShape, n_rows: int, shift: int) -> None:
    """Wherever in a page a tensor begins, and though its first page may be shared."""
    for tensor, count in zip(shape.cells.tensors, shape.complete(n_rows), strict=True):
        start = -(-shift // PAGE) * PAGE + PAGE
        stop = (shift + n_rows * tensor.cell_bytes) // PAGE * PAGE
        assert 0 <= count <= max(0, stop - start) // shape.piece_bytes


@given(shape=shapes, n_tokens=st.integers(1, N_CELLS))
def test_the_least_that_a_context_takes(shape: SpillShape, n_tokens: int) -> None:
    least = shape.least_bytes(n_tokens)
    assert 0 <= least <= shape.cells.bytes_for(n_tokens)
    counts = shape.complete(n_tokens)
    windows = [shape.uses[i : i + shape.attentions] for i in range(len(shape.uses))]
    assert all(
        shape.at_once(counts) >= sum(counts[number] for use in window for number in use) for window in windows
    ), "what is read ahead has room"
    if len(shape.uses) <= shape.attentions:
        assert least == shape.cells.bytes_for(n_tokens), "all layers at once save nothing"


@given(shape=shapes, room=st.integers(0, 400_000), most=st.integers(1, N_CELLS))
def test_as_many_tokens_as_have_room(shape: SpillShape, room: int, most: int) -> None:
    n_tokens = shape.tokens_in(room, most)
    assert 0 <= n_tokens <= most
    assert n_tokens == 0 or shape.least_bytes(n_tokens) <= room


@given(shape=shapes, n_tokens=st.integers(1, N_CELLS - 1), share=st.floats(0, 1))
def test_what_a_token_reads(shape: SpillShape, n_tokens: int, share: float) -> None:
    full = shape.cells.bytes_for(n_tokens + 1)
    least = shape.held_bytes(n_tokens + 1, n_tokens)
    assert shape.read_at(n_tokens, full) == 0
    read = shape.read_at(n_tokens, round(least + share * (full - least)))
    assert 0 <= read <= shape.read_bytes(shape.complete(n_tokens))
    assert read <= full


@given(shape=shapes, lengths=st.lists(st.integers(0, N_CELLS), min_size=1, max_size=5))
def test_texts_in_streams_complete_no_fewer(shape: SpillShape, lengths: list[int]) -> None:
    """However many tokens each has, of as many in all."""
    n_streams = len(lengths)
    tensors = [CellTensor(one.address, N_CELLS * n_streams, one.cell_bytes) for one in shape.cells.tensors]
    joint = SpillShape(Cells(tensors, PAGE, n_streams), shape.uses, shape.piece_bytes, shape.width, shape.attentions)
    of_each = [shape.complete(length) for length in lengths]
    for number, promised in enumerate(joint.complete(sum(lengths))):
        assert 0 <= promised <= sum(counts[number] for counts in of_each)


def test_a_piece_is_about_a_block_of_the_widest_rows() -> None:
    cells = Cells([CellTensor(0, 9, 512), CellTensor(0, 9, 300)], 4096)
    assert piece_bytes(cells, 1 << 30) == 256 * 512
    assert piece_bytes(cells, 8192) == 8192
    assert piece_bytes(Cells([CellTensor(0, 9, 1)], 4096), 1 << 30) == 4096
    several = [CellTensor(0, 8 * 2048, 512)]
    assert piece_bytes(Cells(several, 4096, 8), 1 << 30) == 2048 // 16 * 512, "but of several texts it is a small part"
    assert piece_bytes(Cells([CellTensor(0, 9, 1 << 20)], 4096), 1 << 30) == 1 << 20
