"""The first of several tasks that fails is what is raised; what is done for a client ends when it leaves."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from edge_run.base.errors import Cancelled, TierReadError
from edge_run.runtime.server.tasks import task_group, until_client_leaves


async def _fail() -> None:
    try:
        raise OSError("the drive")
    except OSError as error:
        raise TierReadError("cannot be read") from error


async def _stay() -> Any:
    await anyio.sleep_forever()


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


def test_what_is_done_for_a_client_ends_when_it_leaves() -> None:
    async def leave() -> Any:
        return {"type": "http.disconnect"}

    async def main() -> None:
        async with until_client_leaves(leave) as client:
            client.group.start_soon(anyio.sleep_forever)
            try:
                await anyio.sleep_forever()
            finally:
                raise Cancelled("as a pass ends that nobody waits for")
        assert client.is_over

    anyio.run(main)


def test_what_is_done_for_a_client_that_stays_is_finished_or_fails() -> None:
    async def main(does_fail: bool) -> None:
        async with until_client_leaves(_stay) as client:
            client.group.start_soon(anyio.sleep_forever)
            if does_fail:
                await _fail()
        assert not client.is_over

    anyio.run(main, False)
    with pytest.raises(TierReadError, match="cannot be read"):
        anyio.run(main, True)
