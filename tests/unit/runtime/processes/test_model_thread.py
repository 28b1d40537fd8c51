"""The thread of a model: one and the same for all calls, first come first served, however tasks are cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from importlib.util import find_spec

import anyio
import anyio.to_thread
import pytest

from edge_run.runtime.processes import model_thread
from edge_run.runtime.processes.model_thread import ModelThread
from waiting import until

LIMIT_S = 60.0
TRIO = pytest.param("trio", marks=pytest.mark.skipif(find_spec("trio") is None, reason="trio is not installed"))
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", TRIO])


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "edge-run-model"}


@BACKENDS
def test_all_calls_have_the_same_thread_whatever_others_do_in_threads(backend: str) -> None:
    async def main() -> None:
        thread, seen = ModelThread(), list[int]()

        async def call() -> None:
            for _ in range(50):
                seen.append(await thread.run(threading.get_ident))

        async def others() -> None:
            for _ in range(50):
                assert await anyio.to_thread.run_sync(threading.get_ident) not in seen

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                for task in (call, others) * 3:
                    group.start_soon(task)
        assert len(seen) == 150
        assert len(set(seen)) == 1
        thread.close()

    anyio.run(main, backend=backend)


@BACKENDS
def test_calls_come_in_turn_and_errors_go_to_who_called(backend: str) -> None:
    async def main() -> None:
        thread, order = ModelThread(), list[int]()

        async def call(number: int) -> None:
            if number % 3:
                await thread.run(partial(order.append, number))
            else:
                with pytest.raises(ValueError, match=f"^{number}$"):
                    await thread.run(partial(fail, number))

        def fail(number: int) -> None:
            order.append(number)
            raise ValueError(number)

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(call, number)
        assert sorted(order) == list(range(20))
        assert backend == "trio" or order == sorted(order)  # trio begins tasks in any order
        thread.close()

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_call_that_has_begun_is_waited_for_and_one_that_has_not_is_none(backend: str) -> None:
    async def main() -> None:
        thread, done = ModelThread(), list[str]()
        has_begun, may_end = threading.Event(), threading.Event()

        def work() -> None:
            has_begun.set()
            assert may_end.wait(LIMIT_S)
            done.append("work")

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(thread.run, work, on_cancel=may_end.set))
                await anyio.to_thread.run_sync(has_begun.wait)
                never = partial(done.append, "never")
                group.start_soon(partial(thread.run, never, on_cancel=never))
                await anyio.sleep(0.01)
                group.cancel_scope.cancel()
            assert done == ["work"]
            assert await thread.run(lambda: "next") == "next"
        assert done == ["work"]
        thread.close()

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_thread_ends_with_its_owner_and_a_late_call_has_another_one(backend: str) -> None:
    async def main() -> None:
        thread = ModelThread()
        first = await thread.run(threading.get_native_id)
        thread.close()
        until(lambda: not threads() - before)
        assert await thread.run(threading.get_native_id) != first

    before = threads()
    anyio.run(main, backend=backend)
    gc.collect()
    until(lambda: not threads() - before)


def test_who_is_cancelled_again_and_again_waits_for_what_has_begun() -> None:
    async def main() -> None:
        thread, done = ModelThread(), list[str]()

        def work() -> None:
            has_begun.set()
            assert may_end.wait(LIMIT_S)
            done.append("work")

        task = asyncio.ensure_future(thread.run(work))
        await asyncio.to_thread(has_begun.wait)
        owed = asyncio.ensure_future(thread.run(partial(done.append, "owed"), is_owed=True))
        for _ in range(3):
            await asyncio.sleep(0.001)
            task.cancel()
            owed.cancel()
        assert not task.done()
        may_end.set()
        for one in (task, owed):
            with pytest.raises(asyncio.CancelledError):
                await one
        assert done == ["work", "owed"]
        thread.close()

    has_begun, may_end = threading.Event(), threading.Event()
    asyncio.run(main())


def test_a_thread_at_rest_is_told_once_until_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "REST_S", 0.01)
    rests = list[int]()

    async def main() -> None:
        thread = ModelThread(lambda: rests.append(threading.get_ident()))
        for n_rests in (1, 2):
            number = await thread.run(threading.get_ident)
            await anyio.to_thread.run_sync(until, lambda n_rests=n_rests: len(rests) == n_rests)
            await anyio.sleep(0.05)
            assert rests == [number] * n_rests
        thread.close()

    anyio.run(main)
