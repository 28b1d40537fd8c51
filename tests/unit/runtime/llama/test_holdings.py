"""What the process is found to hold beside weights, whatever the kernel has swapped out meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edge_run.devices.host.memory import ProcessMemory
from edge_run.runtime.llama import holdings
from edge_run.runtime.llama.holdings import Holdings

KV, BUFFERS = 700, 300


@pytest.mark.parametrize("reported_bytes", [BUFFERS, 0])
@pytest.mark.parametrize(("swapped_before", "swapped_after"), [(0, 0), (40, 40), (0, 60), (40, 90), (40, 0)])
def test_what_is_swapped_out_comes_back_and_counts(
    swapped_before: int, swapped_after: int, reported_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process holds 100 before its context is made, of which 50 are graphs, after that."""
    before = ProcessMemory(100 - swapped_before, 100, swapped_before, 1000)
    after = ProcessMemory(150 + KV - swapped_after, 850, swapped_after, 1050)
    monkeypatch.setattr(holdings, "budgeted_memory", lambda: after)
    context = SimpleNamespace(kv_bytes=KV, untouched_bytes=0, buffer_bytes=reported_bytes)
    found = Holdings.since(before, context, 0, 0)  # type: ignore[arg-type]
    assert found.program_bytes + found.buffer_bytes == 150 + reported_bytes
    assert Holdings.now(0).program_bytes == 150 + KV
