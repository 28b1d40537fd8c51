"""The link of a device to its server: its limits of time, names that cannot be, and replies that make no sense."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from edge_run import NotSupported, SplitModel
from edge_run.runtime.split import connection, protocol
from edge_run.runtime.split.protocol import ServerLink
from edge_run.runtime.split.server import SplitServer
from vision_models import make_bundle, make_pixels


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle"))


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
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().rsplit(":", 1)[1])
        finally:
            process.kill()


def test_what_is_spent_before_the_server_is_asked_counts(head: Path, server: int) -> None:
    """Of a deadline of a second the head took half: the server gets what the device does not need of the rest."""
    limits = []

    def ask(kind: int, body: bytes, limit_s: float) -> None:
        limits.append(limit_s)
        raise protocol.LinkLost("gone")

    with SplitModel(head, f"127.0.0.1:{server}", mode="code 0", threads=1) as model:
        compute = model._compute_head
        model._connection.ask = ask  # type: ignore[assignment,union-attr,method-assign]
        model._compute_head = lambda pixels: (time.sleep(0.5), compute(pixels))[1]  # type: ignore[method-assign]
        for _ in range(2):
            model._chooser.computed("local", 0.3)
        assert model.run(make_pixels(1)[0]).report.lost_server
    assert limits[0] <= 1.0 - 0.5 - 0.3


@pytest.mark.parametrize("host", ["pi..local", "x" * 64 + ".local", "p\0i"])
def test_a_name_that_no_host_can_have(host: str, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda given: pytest.fail(f"the thread ended: {given}"))
    with SplitModel(head, host, threads=1) as model:
        assert model.problem.startswith(f"{host}:7447: ")
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
        end_s = time.monotonic() + 20
        while not model.stats.has_server:
            assert time.monotonic() < end_s
            time.sleep(0.02)
    assert next(made, None) is None
