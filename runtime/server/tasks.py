"""Tasks that belong together: the first that fails cancels the others, and its failure is what is raised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import anyio
from anyio.abc import TaskGroup
from starlette.types import Receive

from edge_run.base.errors import EdgeRunError
from edge_run.runtime.server.refusals import Refusal

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


class ClientTasks:
    """What is done for a client. group: for tasks beside the block. is_over: whether all of it was ended."""

    def __init__(self, group: TaskGroup) -> None:
        self.group, self.is_over = group, False

    def end(self) -> None:
        """Cancel the block and its tasks: the client has left, or needs no more."""
        self.is_over = True
        self.group.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def until_client_leaves(receive: Receive) -> AsyncIterator[ClientTasks]:
    """Cancel this block, and the tasks that it starts, when the client of a request whose body was read leaves.

    Raises what failed first, not as a group. What is refused or fails in the block once it is over is for nobody, and
    is not raised.
    """
    async with task_group() as group:
        client = ClientTasks(group)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.end()

        group.start_soon(watch, name="edge-run-watch-client")
        try:
            yield client
        except (EdgeRunError, Refusal):
            if not client.is_over:
                raise
        group.cancel_scope.cancel()
