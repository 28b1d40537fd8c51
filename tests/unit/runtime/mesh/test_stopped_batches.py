"""What devices of a mesh are told after a batch that was stopped: all must hold the same afterwards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from edge_run.base.protocols import BatchToken, Capabilities
from edge_run.runtime.mesh.decoder import MeshDecoder
from edge_run.runtime.mesh.messages import Decode, Operate


def told_after(sequences: tuple[int, ...], *, can_rewind: bool) -> list[Operate]:
    """Return what the other devices are told once a batch of `sequences`, each with 5 tokens, was taken back."""
    local, run = mock.MagicMock(), mock.MagicMock(is_broken_off=False)
    local.capabilities = Capabilities(64, 16, 3, 4, can_rewind=can_rewind)
    local.rewind.side_effect = lambda sequence, position: position
    unused: Any = None
    decoder = MeshDecoder(unused, local, run, 0)
    decoder._stop(Decode(tuple(BatchToken(1, 5, sequence) for sequence in sequences)))
    return [call.args[0] for call in run.tell.call_args_list]


@pytest.mark.parametrize(
    ("sequences", "can_rewind", "emptied"),
    [((0, 2), False, [0, 1, 2]), ((2,), False, []), ((0, 2), True, [])],
    ids=["several", "one", "no state"],
)
def test_a_batch_of_several_that_had_begun_to_move_state_empties_all(
    sequences: tuple[int, ...], can_rewind: bool, emptied: list[int]
) -> None:
    """A device that was in the middle of it has; one that was done with it, or had not begun, has not."""
    assert told_after(sequences, can_rewind=can_rewind) == [Operate("rewind", (one, 0)) for one in emptied]
