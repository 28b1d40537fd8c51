"""What computed leaves no threads behind that make the passes of another thread slow.

OpenMP keeps threads for each thread that ever computed, and counts them all: where they are more than the cores, each
barrier of a pass puts threads to sleep.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from edge_run import AsyncModel, Model
from edge_run.runtime.probing.kernels import measure_attention
from edge_run.runtime.probing.workload import ATTENTION
from in_child import in_child
from kit_models import streamed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")


def native_threads() -> set[int]:
    """Return the threads of this process that Python did not begin."""
    return set(map(int, os.listdir("/proc/self/task"))) - {one.native_id or 0 for one in threading.enumerate()}


def wait_until_gone(before: set[int]) -> None:
    """Wait until there are none but those of `before`; one that ends is Python's no more a moment before it is gone."""
    until_s = time.monotonic() + 60
    while more := native_threads() - before:
        assert time.monotonic() < until_s, more
        time.sleep(0.01)


@pytest.mark.parametrize("is_streamed", [False, True])
@in_child
def test_opening_a_model_leaves_none(kit: Path, grown: Path, is_streamed: bool) -> None:
    options: dict[str, Any] = streamed() if is_streamed else {"context_tokens": 256}
    before = native_threads()
    with Model(grown if is_streamed else kit, **{**options, "threads": 2}) as model:
        wait_until_gone(before)
        model.generate("Once", max_tokens=2, temperature=0).result()
        assert native_threads() - before, "a pass has them"
    if not is_streamed:
        anyio.run(leave_at_rest, kit)


async def leave_at_rest(path: Path) -> None:
    """Two models may be open, of which only one is asked."""
    before = native_threads()
    async with AsyncModel(path, context_tokens=256, threads=2) as model:
        await model.complete("Once", max_tokens=2, temperature=0)
        assert native_threads() - before, "a pass has them"
        await anyio.to_thread.run_sync(wait_until_gone, before)


@in_child
def test_measuring_leaves_none() -> None:
    before = native_threads()
    assert measure_attention(32, ATTENTION, threads=2) > 0
    wait_until_gone(before)
