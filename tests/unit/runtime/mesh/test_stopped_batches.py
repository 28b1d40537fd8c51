"""What devices of a mesh are told after a batch that was stopped: all must hold the same afterwards."""

from __future__ import annotations

import contextlib
import errno
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from edge_run.base.errors import BudgetError, EdgeRunError, MeshError, TierReadError
from edge_run.base.protocols import BatchToken, Capabilities
from edge_run.runtime.mesh.decoder import MeshDecoder
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Decode, Operate
from edge_run.runtime.mesh.run import MeshRun


def stopped(sequences: tuple[int, ...], able: Capabilities) -> mock.MagicMock:
    """Return the run in which a batch of `sequences`, each with 5 tokens, was taken back."""
    local, run = mock.MagicMock(), mock.MagicMock(is_broken_off=False)
    local.capabilities = able
    local.rewind.side_effect = lambda sequence, position: position
    unused: Any = None
    decoder = MeshDecoder(unused, local, run, 0)
    decoder._stop(Decode(tuple(BatchToken(1, 5, sequence) for sequence in sequences)))
    return run


@pytest.mark.parametrize(
    ("sequences", "can_rewind", "emptied"),
    [((0, 2), False, [0, 1, 2]), ((2,), False, []), ((0, 2), True, [])],
    ids=["several", "one", "no state"],
)
def test_a_batch_of_several_that_had_begun_to_move_state_empties_all(
    sequences: tuple[int, ...], can_rewind: bool, emptied: list[int]
) -> None:
    """A device that was in the middle of it has; one that was done with it, or had not begun, has not."""
    run = stopped(sequences, Capabilities(64, 16, 3, 4, can_rewind=can_rewind))
    told = [call.args[0] for call in run.tell.call_args_list]
    assert told == [Operate("rewind", (one, 0)) for one in emptied]


@pytest.mark.parametrize(("ring_tokens", "end"), [(0, 5), (16, 0)])
def test_a_text_is_read_anew_where_a_device_may_have_cells_in_another_order(ring_tokens: int, end: int) -> None:
    """One that had begun the batch empties its sequence, if that lay across the end of the ring."""
    run = stopped((0,), Capabilities(64, 16, 3, 4, can_rewind=True, ring_tokens=ring_tokens))
    run.log.rewind.assert_called_once_with(0, end)


def test_after_a_cut_that_was_broken_off_nothing_is_computed_after_what_is_not_there() -> None:
    """Whoever cuts does not know how far it went, and takes the text for as long as it was."""
    local, run, log, unused = mock.MagicMock(), mock.MagicMock(is_broken_off=False), MeshLog(), cast("Any", None)
    local.capabilities = Capabilities(64, 16, 1, 4, can_rewind=False)
    local.rewind.side_effect = lambda sequence, position: 0
    run.log = log
    decoder = MeshDecoder(unused, local, run, 0)
    log.add(Decode(tuple(BatchToken(1, position) for position in range(5))))
    run.tell.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        decoder.rewind(0, 4)
    run.tell.side_effect = None
    with pytest.raises(MeshError, match="ask once more"):
        decoder.begin([BatchToken(1, 5)])
    run.in_flight.begin.assert_not_called()
    assert decoder.rewind(0, 5) == 0
    decoder.begin([BatchToken(1, 0)])
    run.in_flight.begin.assert_called_once()


@pytest.mark.parametrize(
    ("error", "others", "is_recovered"),
    [
        (BudgetError("no room"), ["b"], True),
        (TierReadError("the drive is full", errno=errno.ENOSPC), ["b"], True),
        (TierReadError("the drive fails", errno=errno.EIO), ["b"], False),
        (BudgetError("no room"), [], False),
    ],
)
def test_a_batch_for_which_this_device_lacks_room_is_computed_by_another_plan(
    error: EdgeRunError, others: list[str], is_recovered: bool
) -> None:
    """As where another device does; alone, or where its drive fails, it is what the user is told."""
    local, run, unused = mock.MagicMock(), mock.MagicMock(is_broken_off=False), cast("Any", None)
    local.capabilities = Capabilities(64, 16, 1, 4, can_rewind=True)
    whole: Any = SimpleNamespace(_group=SimpleNamespace(others=others))
    run.can_recover, run.rates.token_s = lambda error: MeshRun.can_recover(whole, error), 0.0
    decoder = MeshDecoder(unused, local, run, 0)
    for step in ("begin", "finish"):
        getattr(run.in_flight, step).side_effect = [error, None]
        run.recover.reset_mock()
        arguments = ([BatchToken(1, 0)],) if step == "begin" else ()
        with contextlib.nullcontext() if is_recovered else pytest.raises(type(error)):
            getattr(decoder, step)(*arguments)
        assert run.recover.called == is_recovered
