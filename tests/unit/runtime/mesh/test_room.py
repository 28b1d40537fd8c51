"""The room of a device after a shortage: the next plan is another one, by what the device was to have."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError
from edge_run.base.fields import Document
from edge_run.base.units import GIB
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.members.member_list import canonical
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_room import room_bound
from edge_run.runtime.fetch.transfer import Transfer
from edge_run.runtime.mesh.failover import LessRoom
from edge_run.runtime.mesh.fetch import MeshFetch
from edge_run.runtime.worker.files import WorkerFiles
from fake_mesh import Hub

WORKS = (UnitWork(GIB, 0, GIB),) * 8
KNOWN = DeviceSpec("b", 16 * GIB, 1e9, 1e9, most_weight_bytes=93 * GIB, least_kept_bytes=1)
PLAN = MeshPlan(("a",) * 4 + ("b",) * 4, 1, 1.0, {})


def test_memory_that_was_taken_is_missing_as_the_ledger_says(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as refusal:
        Ledger(tmp_path, lambda promised_bytes: GIB).grant(4 * GIB, "some.gguf", 0)
    missing = 4 * GIB - refusal.value.found_bytes
    assert missing > GIB
    assert room_bound(KNOWN, PLAN, WORKS, refusal.value).within(KNOWN).memory_bytes == 4 * GIB - missing
    reads = MeshPlan(PLAN.owners, 1, 1.0, {"b": GIB})
    assert room_bound(KNOWN, reads, WORKS, refusal.value).within(KNOWN).memory_bytes == 16 * GIB - missing


def test_a_full_drive_takes_off_what_was_to_be_fetched_whatever_it_offered() -> None:
    full = TierReadError("full", errno=errno.ENOSPC, needed_bytes=4 * GIB, found_bytes=GIB)
    bound = room_bound(KNOWN, PLAN, WORKS, full)
    assert bound.within(KNOWN).most_weight_bytes == GIB
    assert bound.within(KNOWN).memory_bytes == KNOWN.memory_bytes
    has_it = DeviceSpec("b", GIB, 1e9, 1e9)
    assert bound.within(has_it) == has_it, "it got the file meanwhile"


@pytest.mark.parametrize(
    "error", [BudgetError("out of memory"), TierReadError("full", errno=errno.ENOSPC, needed_bytes=1)]
)
def test_where_little_is_missing_the_next_plan_is_another_one(error: EdgeRunError) -> None:
    less = room_bound(KNOWN, PLAN, WORKS, error).within(KNOWN)
    assert min(less.memory_bytes, less.most_weight_bytes or 0) == 4 * GIB - GIB // 4


def test_a_drive_that_is_full_of_keys_and_values_keeps_them_in_memory() -> None:
    less = room_bound(KNOWN, PLAN, WORKS, TierReadError("full", errno=errno.ENOSPC)).within(KNOWN)
    assert (less.least_kept_bytes, less.memory_bytes) == (0, KNOWN.memory_bytes)


def test_a_drive_that_fills_while_layers_come_leaves_its_device_in_the_run() -> None:
    hub = Hub()
    mesh = hub.join("a")
    files = WorkerFiles(hub.join("b"), [], ModelConfig(), 0)
    sink: Any = SimpleNamespace(what="piece", model="m", length=lambda number: GIB)
    files._transfer = transfer = Transfer(sink, range(4), ["a"])
    transfer.done_bytes = GIB
    transfer.end_with(TierReadError("caf\udce9: cannot keep it there", errno=errno.ENOSPC))
    assert canonical(files.status), "a name that is no text would keep it from being told"
    fetch = MeshFetch(mesh, len(WORKS), lambda text: None, lambda: None)
    fetch.note("b", {"missing_bytes": [GIB] * len(WORKS), "most_weight_bytes": 93 * GIB})

    def give(orders: dict[str, Document]) -> dict[str, Document]:
        is_first = orders["b"]["order"] == "fetch"
        return {"b": {"wanted_bytes": 4 * GIB, "is_over": False} if is_first else {"fetch": files.status}}

    refusal = fetch.run(PLAN, {}, give)
    assert isinstance(refusal, LessRoom)
    assert room_bound(KNOWN, PLAN, WORKS, refusal.error).within(KNOWN).most_weight_bytes == GIB
