"""Batches that were begun and not finished: what each is said to have taken."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest

from edge_run.base.protocols import BatchToken, Logits
from edge_run.runtime.mesh.in_flight import BatchesInFlight
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Decode
from edge_run.runtime.mesh.rates import MeshRates

PASS_S = 0.05


class InTurns:
    """Devices that compute a batch when it is begun."""

    is_split, hops, most_in_flight = False, 2, 1

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def perform(self, command: Decode, token_s: float, *, is_again: bool = False) -> Logits:
        time.sleep(PASS_S)
        self.spent = {"a": PASS_S}
        return np.zeros((1, 4), np.float32)


def test_a_batch_that_waits_to_be_finished_takes_no_longer_for_that() -> None:
    """As after a loss, where devices take turns, and as many batches are begun as devices had in flight before."""
    rates = MeshRates()
    batches = BatchesInFlight(MeshLog(), rates, cast("Any", InTurns()))
    batches.most = 3
    for position in range(3):
        batches.begin(Decode((BatchToken(1, position, 0, True),)))
    for _ in range(3):
        batches.finish()
    assert rates.token_s == pytest.approx(PASS_S, rel=0.5)
    assert rates.hop_s < PASS_S / 4
