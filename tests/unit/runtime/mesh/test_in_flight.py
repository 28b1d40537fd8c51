"""Batches that were begun and not finished: what each is said to have taken, and how long it is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edge_run.base.protocols import BatchToken, Logits
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.mesh import in_flight
from edge_run.runtime.mesh.activation_coding import ActivationCoder
from edge_run.runtime.mesh.device_group import LEAST_DEADLINE_S, MOST_READING_S, PATIENCE, Attempt, DeviceGroup
from edge_run.runtime.mesh.in_flight import BatchesInFlight
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Decode
from edge_run.runtime.mesh.rates import MeshRates
from edge_run.runtime.mesh.run_events import RunEvents
from fake_mesh import Hub

PASS_S = 0.05


class InTurns:
    """Devices that compute a batch when it is begun, by a clock of their own."""

    is_split, hops, most_in_flight = False, 2, 1

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.now_s = 100.0

    def perform(self, command: Decode, token_s: float, *, is_again: bool = False) -> Logits:
        self.now_s += PASS_S
        self.spent = {"a": PASS_S}
        return np.zeros((1, 4), np.float32)


def test_a_batch_that_waits_to_be_finished_takes_no_longer_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a loss, where devices take turns, and as many batches are begun as devices had in flight before."""
    rates, devices = MeshRates(), InTurns()
    monkeypatch.setattr(in_flight, "time", SimpleNamespace(monotonic=lambda: devices.now_s))
    batches = BatchesInFlight(MeshLog(), rates, cast("Any", devices))
    batches.most = 3
    for position in range(3):
        batches.begin(Decode((BatchToken(1, position, 0, True),)))
    for _ in range(3):
        batches.finish()
    assert rates.token_s == pytest.approx(PASS_S)
    assert rates.hop_s == pytest.approx(0.0)


def test_a_drive_that_is_said_to_be_slow_without_end_is_not_waited_for_without_end() -> None:
    mesh = Hub().join("a")
    engine: Any = SimpleNamespace(width=512, layout=SimpleNamespace(units=[SimpleNamespace(entry_bytes=4096)]))

    def deadline_s(reading_s: float, n_tokens: int, token_s: float) -> float:
        attempt = Attempt(MeshPlan(("a", "b", "a"), 1, 0.5, {}), 1, 1, reading_s)
        group = DeviceGroup(mesh, engine, RunEvents(mesh), attempt, ActivationCoder("exact", {}))
        return group._deadline_s(n_tokens, token_s)

    for n_tokens, token_s in ((1, 0.01), (1000, 0.01), (10, 3.0)):
        computing_s = deadline_s(0.0, n_tokens, token_s)
        assert computing_s == max(LEAST_DEADLINE_S, PATIENCE * max(0.5, token_s) * (1 + 0.1 * n_tokens))
        assert deadline_s(1e9, n_tokens, token_s) == pytest.approx(computing_s + MOST_READING_S)
        assert deadline_s(60.0, n_tokens, token_s) > computing_s + 60.0, "as much as devices say, where that can be"
