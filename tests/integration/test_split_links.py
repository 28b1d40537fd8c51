"""The link of a device to its server: its limits of time, names that cannot be, and replies that make no sense."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from edge_run import ConfigError, ModelFileError, NotSupported, SplitModel
from edge_run.runtime.split import connection, protocol
from edge_run.runtime.split import model as split_model
from edge_run.runtime.split.protocol import ServerLink
from edge_run.runtime.split.server import SplitServer
from program import ending, next_line
from vision_models import make_bundle, make_pixels
from waiting import until


@pytest.fixture(scope="module")
def server(head: Path) -> Iterator[int]:
    words = [
        sys.executable,
        "-m",
        "edge_run",
        "split",
        "serve",
        str(head.parent / "tail.onnx"),
        "-t",
        "1",
        "--port",
        "0",
    ]
    with ending(subprocess.Popen(words, stdout=subprocess.PIPE, text=True)) as process:
        yield int(next_line(process).rsplit(":", 1)[1])


def test_what_is_spent_before_the_server_is_asked_counts(
    head: Path, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a deadline of a second the head took half: the server gets what the device does not need of the rest."""
    limits: list[float] = []
    now_s = [0.0]

    def ask(kind: int, body: bytes, limit_s: float) -> None:
        limits.append(limit_s)
        raise protocol.LinkLost("gone")

    def take_half_a_second(pixels: Any) -> Any:
        now_s[0] += 0.5
        return compute(pixels)

    with SplitModel(head, f"127.0.0.1:{server}", mode="code 0", threads=1) as model:
        compute = model._compute_head
        model._connection.ask = ask  # type: ignore[assignment,union-attr,method-assign]
        model._compute_head = take_half_a_second  # type: ignore[method-assign]
        monkeypatch.setattr(split_model, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
        monkeypatch.setattr(model._chooser, "_away_s", lambda mode: 0.01)  # whatever was measured
        for _ in range(2):
            model._chooser.computed("local", 0.3)
        assert model.run(make_pixels(1)[0]).report.lost_server
    assert limits[0] <= 1.0 - 0.5 - 0.3


@pytest.mark.parametrize("host", ["pi..local", "x" * 64 + ".local", "p\0i"])
def test_a_name_that_no_host_can_have(host: str, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda given: pytest.fail(f"the thread ended: {given}"))
    with SplitModel(head, host, threads=1) as model:
        until(lambda: model.problem.startswith(f"{host}:7447: "))
        assert model.run(make_pixels(1)[0]).report.mode == "local"
        assert model._connection is not None
        assert model._connection._thread.is_alive()
    server = SplitServer([head.parent / "tail.onnx"], threads=1)
    with pytest.raises(NotSupported, match="cannot be listened at"):
        anyio.run(server.serve, host, 0, print)


def test_the_link_outlives_what_nobody_expected(head: Path, server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([RuntimeError("odd")])

    def connect(address: tuple[str, int], limit_s: float) -> ServerLink:
        for error in made:
            raise error
        return ServerLink(address, limit_s)

    monkeypatch.setattr(connection, "ServerLink", connect)
    with SplitModel(head, f"127.0.0.1:{server}", threads=1) as model:
        until(lambda: model.stats.has_server)
    assert next(made, None) is None


@pytest.mark.parametrize("seconds", [(-9e5, 9e5), (9e5, -9e5), (float("nan"), 0.0), (0.0, 1e6)])
def test_seconds_that_cannot_be_are_no_reply(seconds: tuple[float, float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as device:
                device.sendall(protocol.make_hello({}))
                _, number, _, _ = protocol.REQUEST.unpack(device.recv(protocol.REQUEST.size))
                device.sendall(protocol.REPLY.pack(protocol.DONE, number, *seconds, 0))

        thread = threading.Thread(target=answer)
        thread.start()
        link = ServerLink(("127.0.0.1", listener.getsockname()[1]), 20)
        with contextlib.closing(link), pytest.raises(protocol.LinkLost, match="not to what was asked"):
            link.ask(protocol.ASK_PROBE, b"", 20)
        thread.join()


@pytest.mark.parametrize("threads", [-3, 0, 513])
def test_threads_that_cannot_be(head: Path, threads: int) -> None:
    for make in (SplitModel, lambda path, threads: SplitServer([path], threads)):
        with pytest.raises(ConfigError, match=f"threads {threads}: must be 1 to 512"):
            make(head, threads=threads)


def test_a_network_of_another_training_is_named(tmp_path: Path) -> None:
    head = make_bundle(tmp_path)
    head.write_bytes(head.read_bytes() + b"\0")
    with pytest.raises(ModelFileError, match=r"head\.onnx: is not the one that code\.json describes"):
        SplitModel(head, threads=1)
