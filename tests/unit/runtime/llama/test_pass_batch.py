"""The tokens of a pass, as llama.cpp finds them."""

from __future__ import annotations

import pytest

from edge_run.base.protocols import BatchToken
from edge_run.runtime.llama.pass_batch import PassBatch

TREE = [BatchToken(7, 0, 0, False, (1, 2)), BatchToken(8, 1, 1, True), BatchToken(9, 1, 2, True, (0,))]


def found(batch: PassBatch) -> list[BatchToken]:
    """What llama.cpp reads, number by number."""
    arrays = batch.handle
    sequences = [[arrays.seq_id[i][j] for j in range(arrays.n_seq_id[i])] for i in range(arrays.n_tokens)]
    return [
        BatchToken(arrays.token[i], arrays.pos[i], first, bool(arrays.logits[i]), tuple(others))
        for i, (first, *others) in enumerate(sequences)
    ]


def test_a_pass_is_what_it_was_filled_with_last() -> None:
    with PassBatch(4, 3) as batch:
        for tokens in TREE, [BatchToken(1, 5, 0, True)], [*TREE, BatchToken(2, 9, 0)], []:
            batch.fill(tokens)
            assert found(batch) == tokens


def test_what_has_no_room_is_not_written() -> None:
    """It is refused before (`batch_limits.py`); should it come here, no array of llama.cpp's is left."""
    with PassBatch(2, 2) as batch:
        batch.fill(TREE[1:2])
        for tokens in TREE, [BatchToken(7, 0, 0, False, (1, 2))]:
            with pytest.raises(ValueError, match="same size"):
                batch.fill(tokens)
            assert batch.handle.n_tokens == 1


def test_it_is_freed_once() -> None:
    batch = PassBatch(2, 1)
    batch.close()
    batch.close()
    assert batch.handle is None
