"""The address of a server, how its failure comes out, and what it says before its model is open."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

pytest.importorskip("uvicorn")

from catalogues import Files
from edge_run.base.errors import ConfigError, ModelFileError
from edge_run.base.interrupt import Interrupt
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import serving
from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.catalogue.catalogue import Catalogue
from edge_run.runtime.server.catalogue.folder import ModelFolder
from edge_run.runtime.server.serving import ServeOptions, bind, serve_model


def test_an_address_is_taken_before_its_server_serves() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--host 127\.0\.0\.1 --port {port}: Address already in use; give"):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), 30):
            pass  # it waits, and is not refused


def test_what_ends_a_server_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(server: object, sockets: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(serving._Server, "serve", fail)
    catalogue: Any = Catalogue(ModelFolder(()), lambda path, interrupt: pytest.fail("nobody asks"))
    options = ServeOptions(access_for("localhost", "127.0.0.1"), 1, SamplingConfig())
    with bind("127.0.0.1", 0) as bound, pytest.raises(OSError, match=r"^the network is gone$"):
        anyio.run(serving._serve, catalogue, "nothing", bound, options, lambda line: None)


def test_a_server_that_fails_says_that_its_model_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said only where the server ended as it was told to, and the next Ctrl-C did nothing."""
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}

    class Hanging(Catalogue):
        async def __aexit__(self, *given: object) -> None:
            with anyio.CancelScope(shield=True), anyio.fail_after(60):
                await told.wait()
            await super().__aexit__(*given)

    async def fail(server: object, sockets: object) -> None:
        raise OSError("the network is gone")

    async def serve() -> None:
        nonlocal told
        told = anyio.Event()
        catalogue = Hanging(ModelFolder(()), lambda path, interrupt: pytest.fail("nobody asks"))
        await serving._serve(catalogue, "nothing", bound, options, lambda line: (said.append(line), told.set()))

    said, told = list[str](), anyio.Event()
    monkeypatch.setattr(serving._Server, "serve", fail)
    monkeypatch.setattr(serving, "CLOSING_S", 0.01)
    options = ServeOptions(access_for("localhost", "127.0.0.1"), 1, SamplingConfig())
    try:
        with bind("127.0.0.1", 0) as bound, pytest.raises(OSError, match=r"^the network is gone$"):
            anyio.run(serve)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    assert said == ["the model is not closed yet, which waits for its drive; Ctrl-C again ends the process"]


class Opening:
    """The opening of a model, as long as a test wants it. told: by the server, to who began it and to its manager."""

    def __init__(self) -> None:
        self.files, self.may_end, self.told = Files(), threading.Event(), list[str]()

    def open_file(self, path: Path, interrupt: Interrupt) -> Any:
        while not self.may_end.wait(0.01):
            interrupt.check()
        model = self.files(path)
        model.context_tokens, model.most_parallel = 64, 1
        return model

    async def serve(self, bound: socket.socket) -> None:
        manager: Any = SimpleNamespace(
            ready=lambda line: self.told.append("READY"), stopping=lambda: self.told.append("STOPPING")
        )
        options = ServeOptions(access_for("127.0.0.1", "127.0.0.1"), 1, SamplingConfig(), drain_s=0, manager=manager)
        await serve_model(Path("/secret/a.gguf"), self.open_file, bound, options, self.told.append)


@asynccontextmanager
async def client_of(opening: Opening) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server whose model is opened. At the end of this block the server is told to end."""
    with anyio.fail_after(60), bind("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with anyio.create_task_group() as group, httpx.AsyncClient(base_url=url, timeout=60) as client:
            group.start_soon(opening.serve, bound)
            yield client
            os.kill(os.getpid(), signal.SIGTERM)


def test_who_needs_the_model_waits_while_it_is_opened_and_others_are_told_that_it_is() -> None:
    opening, slots = Opening(), list[Any]()

    async def run() -> None:
        async with client_of(opening) as client:
            told = await client.get("/health")
            assert (told.status_code, told.json()) == (503, {"status": "loading model"})
            assert (await client.get("/v1/models")).json()["data"][0]["status"] == {"value": "loading"}

            async def look() -> None:
                slots.extend((await client.get("/slots")).json())

            async with anyio.create_task_group() as looking:
                looking.start_soon(look)
                while not (await client.get("/edge-run/status")).json()["requests"]["waiting"]:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                assert (slots, opening.told) == ([], [])
                opening.may_end.set()
            assert (await client.get("/health")).status_code == 200
            assert opening.told == ["READY", f"serving a.gguf at {client.base_url}"]

    anyio.run(run)
    assert (slots[0]["n_ctx"], opening.files.open) == (64, set())


def test_a_server_that_is_told_to_end_while_its_model_is_opened_ends_and_is_never_ready() -> None:
    opening = Opening()

    async def run() -> None:
        async with client_of(opening) as client:
            await client.get("/health")

    anyio.run(run)
    assert opening.told == ["STOPPING"]


@pytest.mark.parametrize("read", ["read_entry", "read_folder"])
def test_a_drive_that_hangs_at_the_start_does_not_keep_the_server_from_ending(
    read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read in the event loop, which heard no Ctrl-C meanwhile."""
    opening, began, answers, gave_up = Opening(), threading.Event(), threading.Event(), list[str]()

    def hang(path: Path) -> Any:
        began.set()
        if not answers.wait(20):
            gave_up.append("nobody ended the server meanwhile")
        raise ModelFileError(f"{path}: its drive hung")

    async def run() -> None:
        options = ServeOptions(access_for("127.0.0.1", "127.0.0.1"), 1, SamplingConfig())
        serve = serving.serve_model if read == "read_entry" else serving.serve_folder
        with bind("127.0.0.1", 0) as bound:
            async with anyio.create_task_group() as group:
                group.start_soon(serve, Path("/secret"), opening.open_file, bound, options, opening.told.append)
                await anyio.to_thread.run_sync(began.wait, 60)
                group.cancel_scope.cancel()

    monkeypatch.setattr(serving, read, hang)
    try:
        anyio.run(run)
        assert gave_up == []
    finally:
        answers.set()


def test_whoever_insists_ends_the_process_while_a_model_that_is_closed_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody heard signals any more, and Python's own end waited for threads that nobody had told to end."""
    closing, answers, opening = threading.Event(), threading.Event(), Opening()
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    seen = list[object]()
    monkeypatch.setattr(serving, "CLOSING_S", 600)

    def hang() -> None:
        closing.set()
        answers.wait(60)

    def open_file(path: Path, interrupt: Interrupt) -> Any:
        model = Opening.open_file(opening, path, interrupt)
        model.close = hang
        return model

    async def run() -> None:
        async with client_of(opening) as client:
            opening.may_end.set()
            assert (await client.get("/v1/models")).status_code == 200
            while "READY" not in opening.told:  # noqa: ASYNC110 (nobody tells it)
                await anyio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.to_thread.run_sync(closing.wait, 60)
            seen.append(signal.getsignal(signal.SIGINT))
            os.kill(os.getpid(), signal.SIGINT)
            while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            seen.append(signal.getsignal(signal.SIGINT))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `client_of` sends it
            answers.set()

    opening.open_file = open_file  # type: ignore[method-assign]
    try:
        anyio.run(run)
    finally:
        answers.set()
        for one, handler in handlers.items():
            signal.signal(one, handler)
    assert seen[0] not in (signal.SIG_DFL, signal.default_int_handler)
    assert seen[1] == signal.SIG_DFL


def test_a_model_that_cannot_be_opened_ends_its_server_with_why() -> None:
    opening = Opening()

    def fail(path: Path, interrupt: Interrupt) -> Any:
        raise ModelFileError(f"{path}: it is broken")

    opening.open_file = fail  # type: ignore[method-assign]
    with bind("127.0.0.1", 0) as bound, pytest.raises(ModelFileError, match=r"^/secret/a\.gguf: it is broken$"):
        anyio.run(opening.serve, bound)
    assert opening.told == []
