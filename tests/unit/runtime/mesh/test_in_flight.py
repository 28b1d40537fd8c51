"""Batches that were begun and not finished: what each is said to have taken, how long it is waited for, what fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.partition.mesh_ring import Hop
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.mesh import coordinator, in_flight
from edge_run.runtime.mesh.activation_coding import ActivationCoder
from edge_run.runtime.mesh.decoder import MeshDecoder
from edge_run.runtime.mesh.device_group import LEAST_DEADLINE_S, MOST_READING_S, PATIENCE, Attempt, DeviceGroup
from edge_run.runtime.mesh.in_flight import BatchesInFlight
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Command, Decode, Operate
from edge_run.runtime.mesh.rates import MeshRates
from edge_run.runtime.mesh.replay import LogReplay
from edge_run.runtime.mesh.run_events import RunEvents
from edge_run.runtime.mesh.transport import GRAPH_CHANGED, PassFailed
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


@pytest.mark.parametrize(("tail_cells", "widths"), [(4, [16, 16, 8]), (0, [40])], ids=["may", "cannot"])
def test_a_batch_is_begun_pass_by_pass_where_a_plan_with_groups_may_come(tail_cells: int, widths: list[int]) -> None:
    """It may while the batch is begun, as when a device has joined, and by that each tail is of one pass."""
    local, run, unused = mock.MagicMock(), mock.MagicMock(), cast("Any", None)
    local.capabilities = Capabilities(64, 16, 4, 4, can_rewind=True)
    run.in_flight.most, run.rates.token_s = 1, 0.0
    run.in_flight.finish.side_effect = lambda: np.zeros((0, 4), np.float32)
    MeshDecoder(unused, local, run, tail_cells).decode([BatchToken(1, position) for position in range(40)])
    assert [len(call.args[0].batch) for call in run.in_flight.begin.call_args_list] == widths


def test_no_plan_with_groups_is_made_while_answers_go_on_that_share_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass at a time would go through devices that were chosen for several."""
    turns, groups = MeshPlan(("a",), 1, 1.0, {}), MeshPlan(("a", "b", "a"), 1, 1.0, {}, 2, 0.1)
    monkeypatch.setattr(coordinator, "plan_pipeline", lambda *_: groups)
    plans: dict[tuple[bool, bool], MeshPlan | None] = {}
    for fits in (True, False):
        monkeypatch.setattr(coordinator, "plan_ring", lambda *_, fits=fits: turns if fits else None)
        for may_group in (True, False):
            found = coordinator._plan_over([], [], lambda a, b: Hop(0.0), 4, may_group=may_group)
            plans[fits, may_group] = found
    assert plans == {(True, True): groups, (True, False): turns, (False, True): groups, (False, False): groups}
    batches = BatchesInFlight(MeshLog(), MeshRates(), cast("Any", InTurns()))
    assert batches.may_group
    batches.begin(Decode((BatchToken(1, 0, 0, True),)))
    assert not batches.may_group
    batches.most = 2
    assert batches.may_group


@pytest.mark.parametrize("later", [Decode((BatchToken(1, 3, 0, True),)), Operate("branch", (0, 1))])
def test_of_passes_in_flight_the_graph_is_learnt_that_an_earlier_one_met(later: Command) -> None:
    """A device that is new to a run says so of it when the next command is given: it is not to blame."""
    log, done = MeshLog(), list[Command]()
    first = Decode(tuple(BatchToken(1, position) for position in range(3)))
    log.add(first)
    log.add(later)

    def perform(command: Command) -> None:
        done.append(command)
        if len(done) == 2:
            raise PassFailed("another graph", node="b", code=GRAPH_CHANGED, number=1)

    maps: Any = SimpleNamespace(unknown_shape=lambda batch: PassShape(len(batch), 0) if batch else None)
    LogReplay(log, maps, lambda text: None).run(perform, lambda error: first.batch, 2)
    assert done == [first, later, Operate("learn", PassShape(3, 0)), first, later]
