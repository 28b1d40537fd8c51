"""What becomes of a request whose worker is lost, or fails in a way that nobody foresaw."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("starlette")
from edge_run.partition.batch_shares import AnswerPace
from edge_run.runtime.batches.input_file import BatchRequest

if TYPE_CHECKING:
    from edge_run.runtime.batches.cluster import ClusterPlaces, _ClusterWorker

# Dask takes long to load: not where others only collect these tests.
pytestmark = pytest.mark.skipif(
    not find_spec("distributed"), reason="needs distributed: pip install 'edge-run[cluster]'"
)

REQUEST = BatchRequest("a", "/v1/completions", {"prompt": "x"})
ANSWER = {"status": 200, "body": b"{}", "n_tokens": 3}


class Client:
    """Tasks end as `ends` says: a result, or an error; by the worker's address."""

    def __init__(self, ends: dict[str, Any]) -> None:
        self.ends = ends

    def submit(self, function: Any, *arguments: object, workers: list[str], **_: Any) -> asyncio.Future[Any]:
        future, end = asyncio.get_running_loop().create_future(), self.ends[workers[0]]
        if isinstance(end, Exception):
            future.set_exception(end)
        else:
            future.set_result(end)
        return future


def places_of(ends: dict[str, Any], said: list[str]) -> tuple[ClusterPlaces, list[_ClusterWorker]]:
    from edge_run.runtime.batches.cluster import ClusterPlaces, _ClusterWorker
    from edge_run.runtime.batches.cluster_host import ModelHost

    places = ClusterPlaces(Client(ends), ModelHost({}), said.append)  # type: ignore[arg-type]
    workers = [_ClusterWorker(address, 1, AnswerPace(4)) for address in ends]
    places._workers, places._n_unfinished = {one.address: one for one in workers}, 1
    return places, workers


def test_a_task_that_fails_costs_its_worker_and_not_the_run() -> None:
    said: list[str] = []

    async def main() -> None:
        places, workers = places_of({"w0": MemoryError("no more"), "w1": ANSWER}, said)
        workers[0].take()
        assert (await places._answer(workers[0], REQUEST)).status == 200
        assert [*places._workers] == ["w1"]
        assert [one.n_asked for one in workers] == [0, 0]

    anyio.run(main)
    assert said == ["worker w0 answers nothing: a task failed: MemoryError: no more"]


def test_a_request_that_no_worker_survives_has_an_end() -> None:
    from edge_run.runtime.batches.cluster import MOST_LOST

    async def main() -> None:
        places, workers = places_of({f"w{number}": RuntimeError("odd") for number in range(MOST_LOST + 1)}, [])
        workers[0].take()
        assert (await places._answer(workers[0], REQUEST)).status == 500
        assert len(places._workers) == 1

    anyio.run(main)


def test_a_worker_that_was_lost_before_it_was_asked_does_not_count_against_the_request() -> None:
    from edge_run.runtime.batches.cluster import MOST_LOST

    async def main() -> None:
        places, workers = places_of({f"w{number}": ANSWER for number in range(MOST_LOST + 1)}, [])
        *gone, last = workers
        for worker in gone:
            worker.is_lost = True
        given = iter([*gone[1:], last])

        async def next_worker(earlier: _ClusterWorker) -> _ClusterWorker:
            worker = next(given)
            worker.take()
            return worker

        places._next_worker = next_worker  # type: ignore[method-assign]
        gone[0].take()
        assert (await places._answer(gone[0], REQUEST)).status == 200
        assert [one.n_asked for one in workers] == [0] * len(workers)

    anyio.run(main)


def test_a_request_is_taken_back_once_and_goes_to_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes 15 times as long as the others would begin anew again and again."""
    from edge_run.runtime.batches import cluster

    now_s, asked = 0.0, list[str]()
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def main() -> None:
        nonlocal now_s
        places, workers = places_of({"w0": None, "w1": None}, [])
        for worker in workers:
            worker.pace.start(-2.0)
            worker.pace.add(0.0, 3)

        def submit(function: Any, *arguments: object, workers: list[str], **_: Any) -> asyncio.Future[Any]:
            asked.append(workers[0])
            future = asyncio.get_running_loop().create_future()
            running.append(future)
            return future

        async def cancel(futures: list[asyncio.Future[Any]], force: bool) -> None:
            from distributed import CancelledError

            for future in futures:
                future.set_exception(CancelledError())

        running = list[asyncio.Future[Any]]()
        places._client.submit, places._client.cancel = submit, cancel  # type: ignore[method-assign, assignment]
        workers[0].take()
        answer = asyncio.create_task(places._answer(workers[0], REQUEST))
        for _ in range(5):
            await asyncio.sleep(0.01)
            await places._take_back()
            now_s += 7.0
        await asyncio.sleep(0.01)
        running[-1].set_result(ANSWER)
        assert (await answer).status == 200
        assert [one.n_asked for one in workers] == [0, 0]

    anyio.run(main)
    assert asked == ["w0", "w1"]


def test_the_end_of_the_scheduler_is_told_wherever_it_is_found() -> None:
    """Also where a worker is being given up, whose requests are taken back."""

    async def main() -> None:
        said = list[str]()
        places, _ = places_of({"a": {}}, said)

        async def nthreads() -> dict[str, int]:
            return {}

        async def cancel(futures: list[object], force: bool) -> None:
            raise OSError("Timed out trying to connect")

        client: Any = places._client
        client.nthreads, client.cancel = nthreads, cancel
        try:
            await places._watch()
        except Exception as error:  # of the tasks, too: a group
            found = error
            while hasattr(found, "exceptions"):
                found = found.exceptions[0]
            assert "the scheduler is gone" in str(found)
        else:
            pytest.fail("the batch goes on")

    asyncio.run(main())


def test_a_terminal_that_is_gone_is_not_told_as_a_scheduler_that_is() -> None:
    def say(what: str) -> None:
        raise BrokenPipeError(what)

    async def nothing(*_: object) -> tuple[()]:
        return ()

    async def main() -> None:
        places, _ = places_of({}, [])
        client: Any = SimpleNamespace(nthreads=nothing, register_plugin=nothing)
        places._client, places._say = client, say
        ended: list[Exception] = []
        try:
            await places._watch()
        except Exception as error:  # a group of one
            ended.extend(getattr(error, "exceptions", [error]))
        assert [type(error) for error in ended] == [BrokenPipeError]

    anyio.run(main)


def test_requests_that_came_after_the_count_get_a_place_too() -> None:
    async def main() -> None:
        places, workers = places_of({"w0": ANSWER}, [])
        workers[0].most = 2
        workers[0].take()
        with anyio.fail_after(60):
            await places.take(0)
        assert workers[0].n_asked == 2

    anyio.run(main)
