"""Which of the models of a folder is open, who waits until it is another one, and what cannot be opened."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from catalogues import FOUND, Files, catalogue_of
from edge_run.base.errors import (
    BudgetError,
    Cancelled,
    KernelError,
    ModelFileError,
    ModelFileMissing,
    TierReadError,
)
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.server.catalogue import catalogue
from edge_run.runtime.server.catalogue.catalogue import Catalogue, spare_collections
from edge_run.runtime.server.catalogue.folder import ModelEntry, ModelFolder
from edge_run.runtime.server.refusals import Refusal

pytestmark = pytest.mark.anyio


async def use(catalogue: Catalogue, name: str, until: anyio.Event | None = None) -> None:
    async with catalogue.hold(catalogue.asked(name)) as found:
        assert found.entry.name == name
        if until:
            await until.wait()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for sets no event
        await anyio.sleep(0.001)


async def test_a_model_is_opened_when_it_is_asked_for_and_closed_for_another_one() -> None:
    files = Files()
    async with catalogue_of(files) as catalogue:
        assert [catalogue.state(name) for name in "ab"] == ["unloaded", "unloaded"]
        for name in "aab":
            await use(catalogue, name)
            assert files.open == {name}
            assert catalogue.state(name) == "loaded"
        assert files.opened == ["a", "b"]


async def test_who_asks_for_another_one_waits_for_those_that_are_answered() -> None:
    files, done = Files(), anyio.Event()
    async with catalogue_of(files) as catalogue:
        async with anyio.create_task_group() as group:
            group.start_soon(use, catalogue, "a", done)
            await anyio.wait_all_tasks_blocked()
            await until(lambda: catalogue.state("a") == "loaded")
            group.start_soon(use, catalogue, "b")
            await anyio.wait_all_tasks_blocked()
            assert files.open == {"a"}
            done.set()
        assert files.opened == ["a", "b"]


async def test_what_cannot_be_opened_gives_its_own_requests_an_error() -> None:
    files = Files()
    async with catalogue_of(files) as catalogue:
        for _ in range(2):
            with pytest.raises(ModelFileError, match="it is broken"):
                await use(catalogue, "broken")
        assert catalogue.state("broken") == "failed"
        await use(catalogue, "a")
        with pytest.raises(Refusal, match="no model of this name"):
            catalogue.asked("c")


async def test_names_as_clients_write_them() -> None:
    async with catalogue_of(Files()) as catalogue:
        for name in ("b", "b:latest", "b.gguf"):
            assert catalogue.asked(name).name == "b"
        assert catalogue.asked(None).name == "a"
        await use(catalogue, "b")
        assert catalogue.asked("").name == "b", "the open one"


async def test_a_model_is_closed_after_a_while_where_that_was_asked_for() -> None:
    files = Files()
    async with catalogue_of(files) as catalogue:
        async with catalogue.hold(catalogue.asked("a")):
            catalogue.keep_open(0.0)
            assert files.open
        await until(lambda: not files.open)
        await use(catalogue, "a")
        catalogue.keep_open(1000.0)
        assert catalogue.open
        assert catalogue.open.expires_at
        catalogue.keep_open(None)
        assert files.open


async def test_one_timer_runs_and_for_ever_is_not_a_date() -> None:
    files = Files()
    async with catalogue_of(files) as catalogue:
        for seconds in (1000.0, 2000.0, 1e12, float("inf"), 3000.0):
            await use(catalogue, "a")
            catalogue.keep_open(seconds)
            assert catalogue.open
            assert bool(catalogue.open.expires_at) == (seconds < 1e9)
        await anyio.wait_all_tasks_blocked()
        timers = [task for task in anyio.get_running_tasks() if task.name == "edge-run-close-model"]
        assert len(timers) == 1
        await use(catalogue, "b")
        await anyio.wait_all_tasks_blocked()
        assert not [task for task in anyio.get_running_tasks() if task.name == "edge-run-close-model"]


async def test_an_error_that_is_told_again_keeps_nothing_of_those_it_was_told() -> None:
    async with catalogue_of(Files()) as catalogue:
        found = []
        for _ in range(3):
            with pytest.raises(ModelFileError) as caught:
                await use(catalogue, "broken")
            found.append(caught.value)
        assert len(set(map(id, found))) == 3
        kept = catalogue.known.failure("broken")
        assert kept
        assert (kept.__traceback__, kept.__context__, kept.__cause__) == (None, None, None)


async def test_clients_are_not_told_where_models_lie() -> None:
    entry = ModelEntry("a", Path("/home/me/models/a.gguf"))

    def opens(path: Path, interrupt: Interrupt) -> Any:
        raise ModelFileError(f"{path}: it is broken")

    async with catalogue_of(opens_with(opens), ModelFolder((entry,))) as catalogue:
        with pytest.raises(ModelFileError, match=r"^a\.gguf: it is broken$"):
            await use(catalogue, "a")


async def test_clients_are_not_told_where_the_model_lies_that_answers() -> None:
    entry = ModelEntry("a", Path("/home/me/models/a.gguf"))
    async with catalogue_of(Files(), ModelFolder((entry,))) as catalogue:
        for error in (ModelFileError(f"{entry.path}: changed"), TierReadError(f"{entry.path}: no", errno=5)):
            with pytest.raises(type(error), match=r"^a\.gguf: (changed|no)$") as caught:
                async with catalogue.hold(entry):
                    raise error
            assert vars(caught.value) == {**vars(error), "message": str(caught.value)}


async def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    files, done = Files(), anyio.Event()
    async with catalogue_of(files) as catalogue, anyio.create_task_group() as group:
        group.start_soon(use, catalogue, "a", done)
        await until(lambda: bool(files.open))
        with anyio.move_on_after(0.01):
            await use(catalogue, "b")
        done.set()
        await use(catalogue, "a")
        assert files.opened == ["a"]


async def test_reading_again_closes_what_is_gone() -> None:
    files, now = Files(), [FOUND]
    with anyio.fail_after(60):
        async with Catalogue(FOUND, files, lambda: now[0]) as catalogue:
            await use(catalogue, "a")
            now[0] = ModelFolder((ModelEntry("b", Path("b.gguf")),))
            await catalogue.read_again()
            await until(lambda: not files.open)
            assert [entry.name for entry in catalogue.known.entries] == ["b"]
            with pytest.raises(Refusal):
                catalogue.asked("a")


async def test_who_waits_for_a_file_is_told_that_it_is_gone() -> None:
    files, now, done = Files(), [FOUND], anyio.Event()

    async def wait(catalogue: Catalogue) -> None:
        with pytest.raises(ModelFileMissing, match=r"^b: its file is gone$"):
            await use(catalogue, "b")
        done.set()

    with anyio.fail_after(60):
        async with Catalogue(FOUND, files, lambda: now[0]) as catalogue, anyio.create_task_group() as group:
            group.start_soon(use, catalogue, "a", done)
            await until(lambda: bool(files.open))
            group.start_soon(wait, catalogue)
            await anyio.wait_all_tasks_blocked()
            now[0] = ModelFolder((ModelEntry("a", Path("a.gguf")),))
            await catalogue.read_again()


@pytest.mark.parametrize("opens", [True, False])
async def test_a_file_that_became_another_one_while_it_was_opened_is_opened_anew(opens: bool) -> None:
    files, begun, go_on = Files(), threading.Event(), threading.Event()
    now = [ModelFolder((ModelEntry("a", Path("a.gguf"), size_bytes=1),))]
    tries = list[int]()

    def slowly(path: Path, interrupt: Interrupt | None = None) -> Any:
        tries.append(1)
        if len(tries) == 1:
            begun.set()
            assert go_on.wait(60)
            if not opens:
                raise ModelFileError("a.gguf: it was cut short")
        return files(path, interrupt)

    async def first(catalogue: Catalogue, is_over: anyio.Event) -> None:
        with contextlib.suppress(ModelFileError):
            async with catalogue.hold(catalogue.asked("a")):
                pass
        is_over.set()

    with anyio.fail_after(60):
        found_now = opens_with(slowly)
        async with Catalogue(now[0], found_now, lambda: now[0]) as catalogue, anyio.create_task_group() as group:
            group.start_soon(first, catalogue, is_over := anyio.Event())
            await anyio.to_thread.run_sync(begun.wait)
            now[0] = ModelFolder((ModelEntry("a", Path("a.gguf"), size_bytes=2),))
            await catalogue.read_again()
            go_on.set()
            await is_over.wait()
            async with catalogue.hold(catalogue.asked("a")) as found:
                assert found.entry.size_bytes == 2
            assert len(tries) == 2


async def test_any_error_while_opening_is_that_models_own() -> None:
    def opens(path: Path, interrupt: Interrupt) -> Any:
        raise ValueError if path.stem == "a" else BudgetError("the budget is too small")

    async with catalogue_of(opens_with(opens)) as catalogue:
        with pytest.raises(KernelError, match=r"^a: ValueError\(\)$"):
            await use(catalogue, "a")
        with pytest.raises(BudgetError, match="the budget is too small"):
            await use(catalogue, "b")


def opens_with(function: Any) -> Any:
    function.open = ()
    return function


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collects a part of what is old at a time, not all at once")
def test_what_waits_is_looked_through_rarely() -> None:
    before, full = gc.get_threshold(), list[object]()

    def note(phase: str, info: dict[str, int]) -> None:
        if (phase, info["generation"]) == ("start", 2):
            full.append(info)

    gc.callbacks.append(note)
    try:
        spare_collections()
        full.clear()
        waiting = [[] for _ in range(200_000)]
        assert (len(waiting), len(full)) == (200_000, 0)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)  # what is frozen stays so, as by `conftest.py`


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_end_of_the_server_does_not_wait_for_an_opening(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to end; one that hangs at a drive, and does not hear that, is left after a while."""
    monkeypatch.setattr(catalogue, "ENDING_S", 0.1)
    began, answers, ended, said = threading.Event(), threading.Event(), threading.Event(), list[str]()

    def opens(path: Path, interrupt: Interrupt) -> Any:
        began.set()
        while hangs or not interrupt.is_set:
            if answers.wait(0.01):
                break
        ended.set()
        raise Cancelled("the opening was stopped")

    with anyio.fail_after(60):
        async with Catalogue(FOUND, opens, lambda: FOUND, said.append) as found, anyio.create_task_group() as group:
            group.start_soon(use, found, "a")
            await until(began.is_set)
            group.cancel_scope.cancel()
    assert ended.is_set() is not hangs
    assert not said, "it is not broken"
    answers.set()


async def test_a_model_that_does_not_close_is_named_to_those_who_wait_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, answers = Files(), threading.Event()
    async with catalogue_of(files) as found:
        await use(found, "a")  # opened without a limit that a busy machine may not keep
        monkeypatch.setattr(catalogue, "MOST_WAIT_S", 2.0)
        assert found.open is not None
        model, close = found.open.model, found.open.model.close
        monkeypatch.setattr(model, "close", lambda: (answers.wait(20), close()))
        try:
            with pytest.raises(Refusal, match=r"a is being closed, which waits for its drive"):
                await use(found, "b")
        finally:
            answers.set()


async def test_requests_for_the_only_model_wait_until_it_is_open_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "MOST_WAIT_S", 0.0)
    files, goes_on, used = Files(), threading.Event(), list[str]()

    def open_file(path: Path, interrupt: Interrupt) -> Any:
        assert goes_on.wait(30)
        return files(path)

    async def ask(made: Catalogue, name: str | None) -> None:
        async with made.hold(made.asked(name)) as found:
            used.append(found.entry.name)

    with anyio.fail_after(60):
        async with Catalogue(ModelFolder(FOUND.entries[:1]), open_file) as made, anyio.create_task_group() as group:
            for name in ("any other", None):
                group.start_soon(ask, made, name)
            group.start_soon(made.open_only)
            await until(lambda: made.state("a") == "loading")
            assert not made.is_usable
            assert not used
            goes_on.set()
            await until(lambda: len(used) == 2)
            assert made.is_usable
            assert made.asked("any other").size_bytes == 7, "as the open model says"
    assert (used, files.opened, files.open) == (["a", "a"], ["a"], set())


async def test_why_the_only_model_cannot_be_opened_is_told_with_its_folder_but_not_to_clients() -> None:
    def open_file(path: Path, interrupt: Interrupt) -> Any:
        raise ModelFileError(f"{path}: it is broken")

    async with Catalogue(ModelFolder((ModelEntry("a", Path("/secret/a.gguf")),)), open_file) as made:
        with pytest.raises(ModelFileError, match=r"^/secret/a\.gguf: it is broken$"):
            await made.open_only()
        with pytest.raises(ModelFileError, match=r"^a\.gguf: it is broken$"):
            await use(made, "a")


async def test_an_error_of_the_system_where_the_only_model_is_opened_comes_out_as_it_is() -> None:
    def open_file(path: Path, interrupt: Interrupt) -> Any:
        raise OSError("no more files can be open")

    async with Catalogue(ModelFolder(FOUND.entries[:1]), open_file) as made:
        with pytest.raises(OSError, match=r"^no more files can be open$"):
            await made.open_only()
        with pytest.raises(KernelError, match=r"^a: OSError\('no more files can be open'\)$"):
            await use(made, "a")
