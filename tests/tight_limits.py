"""Limits of tests on what strangers wrote: a second for each answer of another process, and so much memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import pytest

from edge_run.runtime.processes import cell


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Limits of one second in this block; the processes that it asks are started before, and may take longer."""
    with pytest.MonkeyPatch.context() as patch:
        for job in (cell.Cell.ask, cell.Cell.timed):
            patch.setattr(job, "__defaults__", (1.0,))
        yield


@contextlib.contextmanager
def growing_less_than(most_bytes: int) -> Iterator[None]:
    """Fail when this process, or a child that ended meanwhile, came to hold more than any before it.

    A child counts with what this process held when it started it, as it shares that until it runs its program.
    """
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    own_kib, children_kib = (resource.getrusage(one).ru_maxrss for one in who)
    yield
    own_after_kib, children_after_kib = (resource.getrusage(one).ru_maxrss for one in who)
    assert (own_after_kib - own_kib) << 10 < most_bytes
    assert children_after_kib <= max(children_kib, own_after_kib, most_bytes >> 10)
