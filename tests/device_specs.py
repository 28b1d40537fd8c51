"""Devices as the layer planner sees them, drawn at random."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import strategies as st

from edge_run.partition.mesh_plan import DeviceSpec

MB = 1_000_000


def takes_under(seconds: float, work: Callable[[], object]) -> bool:
    """Whether `work` takes less of a processor than that; one of a few times, as others want the processor too."""

    def taken_s() -> float:
        started_s = time.process_time()
        work()
        return time.process_time() - started_s

    return any(taken_s() < seconds for _ in range(5))


@st.composite
def specs(draw: st.DrawFn, most: int = 4) -> list[DeviceSpec]:
    count = draw(st.integers(1, most))
    return [
        DeviceSpec(
            node=f"n{i}",
            memory_bytes=draw(st.integers(20, 600)) * MB,
            compute_bytes_per_s=draw(st.integers(200, 20_000)) * MB,
            disk_bytes_per_s=draw(st.integers(50, 3_000)) * MB,
            hop_s=draw(st.sampled_from([0.0002, 0.001, 0.01, 0.1])),
            window_bytes=draw(st.integers(5, 40)) * MB,
        )
        for i in range(count)
    ]
