"""What the system refuses in any kind of pass is an error of ours: only these are told to a coordinator."""

from __future__ import annotations

import errno
import os
from unittest import mock

import pytest

from edge_run.base.errors import BudgetError, ContextFull, EdgeRunError, TierReadError
from edge_run.base.interrupt import Interrupt
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.progress import Step, Timeline

PASSES = {
    "decode": lambda decoder: decoder.decode([BatchToken(1, 0)]),
    "follow": lambda decoder: decoder.follow([BatchToken(1, 0)]),
    "place": lambda decoder: decoder.place([1], 0, lambda _: None),
    "tail_rows": lambda decoder: decoder.tail_rows(1),
    "map_graph": lambda decoder: decoder.map_graph(),
}


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE)), TierReadError),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), BudgetError),
        (MemoryError(), BudgetError),
    ],
)
def test_what_the_system_refuses_in_a_pass_is_an_error_of_ours(
    what: str, refused: Exception, told: type[EdgeRunError]
) -> None:
    decoder = LocalDecoder.__new__(LocalDecoder)
    decoder._has_logits = True
    for part in ("limits", "_driver", "_context", "count", "_rows", "watcher"):
        setattr(decoder, part, mock.MagicMock())
    parts = ("_lengths", "_run", "_fill", "_plain_pass")
    with (
        mock.patch.multiple(decoder, **dict.fromkeys(parts, mock.DEFAULT)) as doubles,
        mock.patch("edge_run.runtime.decoding.decoder.L"),
    ):
        for part in ("_run", "_fill", "_plain_pass"):
            doubles[part].side_effect = refused
        doubles["_lengths"].return_value = [0]
        with pytest.raises(told):
            PASSES[what](decoder)


@pytest.mark.parametrize("where", ["_prepare", "_note_forks"])
def test_a_batch_that_does_not_come_to_its_first_pass_is_at_hand_no_more(where: str) -> None:
    """Whoever asked how far it is heard of it until the next batch: where the drive had failed, or had no room."""
    decoder, timeline = LocalDecoder.__new__(LocalDecoder), Timeline()
    decoder._has_logits, decoder._timeline = True, timeline
    decoder._driver = mock.MagicMock(interrupt=Interrupt())
    for part in ("limits", "_rows"):
        setattr(decoder, part, mock.MagicMock())

    def begin(batch: list[BatchToken]) -> None:
        timeline.begin([Step("reading", len(batch), 1.0)])
        assert timeline.snapshot() is not None
        if where == "_prepare":
            raise TierReadError("the drive fails")

    decoder._prepare = begin  # type: ignore[assignment]
    refused = ContextFull("the context is full") if where == "_note_forks" else None
    with (
        mock.patch.multiple(decoder, _note_forks=mock.Mock(side_effect=refused), _run_passes=mock.DEFAULT),
        pytest.raises(ContextFull if refused else TierReadError),
    ):
        decoder.decode([BatchToken(1, 0)])
    assert timeline.snapshot() is None
