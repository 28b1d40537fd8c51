"""A batch on a Dask cluster: which worker is given the next request, and what becomes of those of one that is gone.

Dask carries tasks to workers, tells which are there, and shows them. What is decided here is what it cannot know: how
many requests a worker of its speed should have (`partition/batch_shares.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from distributed import CancelledError, Client, Future
from distributed.comm.addressing import resolve_address

from edge_run.base.error_codes import error_document, error_of
from edge_run.base.errors import EdgeRunError, MeshError
from edge_run.base.units import format_count
from edge_run.partition.batch_shares import AnswerPace, MachineLoad, next_machine, to_take_back
from edge_run.runtime.batches.answering import BatchResult, Place, refused
from edge_run.runtime.batches.cluster_host import GONE, ModelHost, answer, open_model
from edge_run.runtime.batches.input_file import BatchRequest
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.tasks import task_group

LOOK_S = 1.0  # between two looks at which workers are there
CONNECT_S = 10.0
MOST_LOST = 3  # workers that may die of one request; Dask allows as many

Say = Callable[[str], None]


@dataclass(eq=False)
class _ClusterWorker:
    """A worker whose model is open.

    asked: the requests that it has, and when it was given each; the newest last.
    returnable: those of them that may be taken back.
    is_lost: it is not there any more.
    is_broken: one of its tasks failed in a way that is none of ours, as for want of memory.
    """

    address: str
    most: int
    pace: AnswerPace
    n_asked: int = 0
    asked: dict[Future[Any], float] = field(default_factory=dict)
    returnable: set[Future[Any]] = field(default_factory=set)
    is_lost: bool = False
    is_broken: bool = False

    @property
    def load(self) -> MachineLoad:
        return MachineLoad(self.most, self.n_asked, self.pace.tokens_per_s, self.pace.requests_per_s)

    @property
    def newest(self) -> Future[Any] | None:
        """The newest request that may be taken back."""
        return next((one for one in reversed(self.asked) if one in self.returnable), None)

    def take(self) -> None:
        if not self.n_asked:
            self.pace.start(time.monotonic())
        self.n_asked += 1


class ClusterPlaces:
    """The places of the workers of a Dask cluster, which may come and go. Belongs to one event loop."""

    def __init__(self, client: Client, host: ModelHost, say: Say) -> None:
        self._client, self._host, self._say = client, host, say
        self._run, self._n_tasks = uuid.uuid4().hex, 0
        self._n_unfinished = self._n_waiting = 0  # requests without an answer, and those of them that have no worker
        self._workers: dict[str, _ClusterWorker] = {}
        self._left: list[_ClusterWorker] = []  # that are given nothing more
        self._joining: dict[str, Future[Any]] = {}
        self._failures: dict[str, EdgeRunError] = {}
        self._changed = anyio.Event()  # a place may be free

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, address: str, order: dict[str, Any], say: Say) -> AsyncIterator[ClusterPlaces]:
        """Have the workers of the scheduler at `address` open a model, and close it at the end.

        say: is told what happens to workers. Raises MeshError where there is no scheduler, or no more; and the error of
        a worker, where no worker can open the model.
        """
        client = await _connected(address)
        places = cls(client, ModelHost(order), say)
        try:
            async with task_group() as group:
                group.start_soon(places._watch, name="edge-run-workers")
                yield places
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CONNECT_S), contextlib.suppress(Exception):
                await client.unregister_worker_plugin(places._host.name)
            with anyio.CancelScope(shield=True), anyio.move_on_after(CONNECT_S):
                await client.close()  # pyright: ignore[reportGeneralTypeIssues] (an awaitable where the loop runs)

    async def take(self, n_unfinished: int) -> Place:
        """Wait for a place, and return it."""
        self._n_unfinished = n_unfinished
        return functools.partial(self._answer, await self._next_worker())

    async def _next_worker(self, earlier: _ClusterWorker | None = None) -> _ClusterWorker:
        """Wait until the next request should go to a worker; return that one, which has a place for it.

        earlier: the worker that had the request before, which is given it again only where there is no other.
        """
        while True:
            workers = [one for one in self._workers.values() if one is not earlier] or list(self._workers.values())
            at_least = 1 + sum(one.n_asked for one in self._workers.values())  # the file of requests may have grown
            n_unfinished = max(self._n_unfinished, at_least)
            number = next_machine(n_unfinished, [one.load for one in workers]) if workers else None
            if number is not None:
                workers[number].take()
                return workers[number]
            self._n_waiting += 1
            try:
                await self._changed.wait()
            finally:
                self._n_waiting -= 1

    async def _answer(self, worker: _ClusterWorker, request: BatchRequest) -> BatchResult:
        n_lost, is_returnable = 0, True
        while True:
            if worker.is_lost:  # since it was given the request
                worker.n_asked -= 1
            elif found := await self._ask(worker, request, is_returnable=is_returnable):
                return found
            else:
                n_lost += worker.is_lost or worker.is_broken
                is_returnable &= self._workers.get(worker.address) is not worker  # else it was taken back
            if n_lost == MOST_LOST:
                return refused(Refusal(500, f"{n_lost} workers of the cluster ended or failed with this request"))
            worker = await self._next_worker(worker)

    async def _ask(self, worker: _ClusterWorker, request: BatchRequest, *, is_returnable: bool) -> BatchResult | None:
        """Return the result; None where the worker cannot give one, and others may.

        is_returnable: it may be taken back.
        """
        future = self._submit("answer", worker.address, answer, self._host.name, msgspec.json.encode(request))
        worker.asked[future] = time.monotonic()
        if is_returnable:
            worker.returnable.add(future)
        found: dict[str, Any] | None = None
        try:
            found = await future
        except CancelledError:
            pass
        except Exception as error:
            worker.is_broken = True
            found = {"failure": error_document(MeshError(f"a task failed: {type(error).__name__}: {error}"))}
        finally:
            del worker.asked[future]
            worker.returnable.discard(future)
            worker.n_asked -= 1
            self._tell()
        if found is None:
            return None
        if "status" not in found:
            self._drop(worker, found)
            return None
        self._n_unfinished -= 1
        worker.pace.add(time.monotonic(), found["n_tokens"])
        return BatchResult(found["status"], found["body"], found["n_tokens"])

    def _submit(self, name: str, address: str, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Have a worker carry out a task. name: what the dashboard calls it."""
        self._n_tasks += 1
        key = (name, self._run, self._n_tasks)
        return self._client.submit(function, *arguments, key=key, workers=[address], pure=False)

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _watch(self) -> None:
        """Have workers that come open the model, and give the requests of those that go to others."""
        wanted: Future[Any] | None = None
        with contextlib.suppress(Exception):  # what a worker has against it, it says when it is asked
            await self._client.register_plugin(self._host, self._host.name)
        async with anyio.create_task_group() as group:
            while True:
                with _telling_of_the_scheduler():
                    present = set(await self._client.nthreads())
                for worker in [one for one in (*self._workers.values(), *self._left) if one.address not in present]:
                    await self._lose(worker)
                if not present and wanted is None:
                    self._say("the cluster has no worker; waiting for one")
                for address in self._failures.keys() - present:  # who comes to it again is another one
                    del self._failures[address]
                with _telling_of_the_scheduler():
                    if gone := [self._joining[one] for one in self._joining.keys() - present]:
                        await self._client.cancel(gone, force=True)
                    for address in present - self._workers.keys() - self._joining.keys() - self._failures.keys():
                        self._joining[address] = self._submit("open-model", address, open_model, self._host.name)
                        group.start_soon(self._join, address, name=f"edge-run-join-{address}")
                    if present and present <= self._failures.keys():
                        raise next(iter(self._failures.values()))
                    if not present and wanted is None:
                        wanted = self._client.submit(int, key=("wait-for-a-worker", self._run))  # for adaptive clusters
                    elif present:
                        wanted = None
                    await self._take_back()
                await anyio.sleep(LOOK_S)

    async def _join(self, address: str) -> None:
        """Have a worker open the model; then it has places."""
        try:
            found = await self._joining[address]
            if "most" in found:
                most = found["most"]
                self._workers[address] = _ClusterWorker(address, most, AnswerPace(4 * most))
                self._say(f"worker {address} answers, {most} requests at once")
                self._tell()
            elif found == GONE:  # its plugin was removed by another run that ended
                await self._client.register_plugin(self._host, self._host.name)
            else:
                self._fail(address, error_of(found["failure"]))
        except CancelledError:
            pass  # it is gone
        except Exception as error:
            self._fail(address, MeshError(f"{type(error).__name__}: {error}; is edge-run[cluster] installed there?"))
        finally:
            del self._joining[address]

    def _drop(self, worker: _ClusterWorker, found: dict[str, Any]) -> None:
        """Give a worker nothing more: its model was closed, which is opened again, or it has failed."""
        if self._workers.get(worker.address) is not worker:
            return
        self._left.append(self._workers.pop(worker.address))
        if "failure" in found:
            self._fail(worker.address, error_of(found["failure"]))

    def _fail(self, address: str, error: EdgeRunError) -> None:
        self._failures[address] = dataclasses.replace(error, message=f"worker {address}: {error.message}")
        self._say(f"worker {address} answers nothing: {error.message}")

    async def _take_back(self) -> None:
        """When no request is left to give, have those of slow workers answered by fast ones that have a place."""
        while not self._n_waiting:
            workers, now_s = list(self._workers.values()), time.monotonic()
            newest = [one.newest for one in workers]
            newest_s = [
                now_s - one.asked[it] if it is not None else None for one, it in zip(workers, newest, strict=True)
            ]
            number = to_take_back([one.load for one in workers], newest_s)
            if number is None:
                return
            changed = self._changed
            await self._client.cancel([newest[number]], force=True)
            await changed.wait()

    async def _lose(self, worker: _ClusterWorker) -> None:
        worker.is_lost = True
        self._left = [one for one in self._left if one.n_asked and not one.is_lost]
        self._workers = {address: one for address, one in self._workers.items() if not one.is_lost}
        self._say(f"worker {worker.address} is gone; {format_count(worker.n_asked, 'request')} of it go to others")
        with _telling_of_the_scheduler():
            await self._client.cancel(list(worker.asked), force=True)


@contextlib.contextmanager
def _telling_of_the_scheduler() -> Iterator[None]:
    """Raise MeshError where the scheduler does not answer in this block; errors of ours stay what they are."""
    try:
        yield
    except OSError as error:
        if isinstance(error, EdgeRunError):
            raise
        raise MeshError(f"dask: the scheduler is gone ({error}); the same command goes on later") from error


async def _connected(address: str) -> Client:
    """Return a client. TLS is what Dask's own configuration says. Raises MeshError."""
    try:
        resolve_address(address)  # a client whose address cannot be does not close well
        return await Client(address, asynchronous=True, set_as_default=False, timeout=CONNECT_S, name="edge-run-batch")
    except (OSError, ValueError) as error:
        raise MeshError(f"dask {address}: no scheduler answers ({str(error) or type(error).__name__})") from error
