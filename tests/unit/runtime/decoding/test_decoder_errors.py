"""What the system refuses in any kind of pass is an error of ours: only these are told to a coordinator."""

from __future__ import annotations

import errno
import os
from unittest import mock

import pytest

from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.decoder import LocalDecoder

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
    for part in ("limits", "_driver", "_context", "_count", "_rows", "watcher"):
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
