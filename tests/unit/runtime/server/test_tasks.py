"""The first of several tasks that fails is what is raised, however deep the groups lie in each other."""

from __future__ import annotations

import anyio
import pytest

from edge_run.base.errors import TierReadError
from edge_run.runtime.server.tasks import task_group


async def _fail() -> None:
    try:
        raise OSError("the drive")
    except OSError as error:
        raise TierReadError("cannot be read") from error


def test_the_first_failure_comes_as_itself() -> None:
    async def main() -> None:
        async with task_group() as outer, anyio.create_task_group() as inner:
            outer.start_soon(anyio.sleep_forever)
            inner.start_soon(_fail)

    with pytest.raises(TierReadError, match="cannot be read") as caught:
        anyio.run(main)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_block_may_cancel_its_tasks() -> None:
    async def main() -> None:
        async with task_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.cancel_scope.cancel()

    anyio.run(main)
