"""Tasks that belong together: the first that fails cancels the others, and its failure is what is raised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import anyio
from anyio.abc import TaskGroup

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Have a group of tasks in this block, and wait for them at its end. Raises what failed first, not as a group."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failures:
        first = _first_of(failures)
        raise first from first.__cause__


def _first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first failure that is none of several."""
    first = failures.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
