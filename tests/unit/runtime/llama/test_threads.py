"""How many threads compute: as asked, or as many as there is time for."""

from __future__ import annotations

import pytest

from edge_run.devices.host.machine import Cores
from edge_run.runtime.llama import threads


@pytest.mark.parametrize(
    ("wanted", "cores", "found"),
    [(None, Cores(8, 4, 8.0), 4), (None, Cores(8, 4, 0.5), 1), (None, Cores(8, 4, 2.5), 2), (7, Cores(8, 4, 0.5), 7)],
)
def test_threads(wanted: int | None, cores: Cores, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert threads.compute_threads(wanted) == found
