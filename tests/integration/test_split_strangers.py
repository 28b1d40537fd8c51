"""Strangers at a split server: those who say nothing, who never finish, who are many; devices are served meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from edge_run import ModelFileError, ProtocolError, SplitModel
from edge_run.runtime.split import connection as split_connection
from edge_run.runtime.split.bundle import read_bundle
from edge_run.runtime.split.images import ImageSize, read_image
from edge_run.runtime.split.protocol import ASK_IMAGE, ASK_PROBE, REQUEST, ServerLink
from program import Program, begin, ending, next_line
from vision_models import make_pixels

SERVE = """
import resource, sys
from edge_run.runtime.split import server as split_server
split_server.SILENCE_S, files = float(sys.argv[2]), int(sys.argv[3])
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
from edge_run.cli import main
main(["split", "serve", sys.argv[1], "-t", "1", "--port", "0"])
"""
MIB = 1 << 20
LONG_S = 60.0  # of a silence that is allowed where devices are served long before its end, on a busy machine too


class Server:
    """A server process; `silence_s` is what it allows."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), 30)
        connection.settimeout(5)
        return connection

    def serves_within(self, limit_s: float) -> bool:
        """Whether it serves in time, as devices do that ask again where it lets nobody in."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(ProtocolError), contextlib.closing(self.link(left_s)) as link:
                link.ask(ASK_PROBE, b"", left_s)
                return self.process.poll() is None
            time.sleep(0.1)
        return False

    def link(self, limit_s: float) -> ServerLink:
        return ServerLink(("127.0.0.1", self.port), limit_s)

    def serves_within_a_minute(self) -> bool:
        """Whether it serves, be it that it drops who asks a few times, as one that is silent for a moment."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                if self.serves_within(10):
                    return True
        return False

    @property
    def resident_mib(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) >> 10


@contextlib.contextmanager
def serving(head: Path, silence_s: float = 10.0, files: int = 0) -> Iterator[Server]:
    program = Program(["-c", str(head.parent / "tail.onnx"), str(silence_s), str(files)], source=SERVE)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with ending(begin(program, **how)) as process:
        yield Server(process, int(next_line(process).rsplit(":", 1)[1]))


@pytest.fixture(scope="module")
def server(head: Path) -> Iterator[Server]:
    with serving(head) as one:
        yield one


def is_dropped_within(connection: socket.socket, limit_s: float) -> bool:
    """Whether the other side ends a connection, after whatever it says before."""
    connection.settimeout(limit_s)
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                if not connection.recv(1 << 16):
                    return True
            except TimeoutError:
                return False
    return True


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield (connections := [])
        for connection in connections:
            stack.enter_context(connection)


def test_devices_are_served_beside_a_crowd_that_says_nothing(head: Path, crowd: list[socket.socket]) -> None:
    with serving(head, LONG_S) as server:
        for _ in range(100):
            crowd.append(server.connect())
        assert server.serves_within(LONG_S / 3)
        for _ in range(200):
            crowd.append(server.connect())
        assert server.serves_within(LONG_S / 3)


def test_who_says_nothing_is_dropped_and_who_never_finishes_too(head: Path) -> None:
    with serving(head, silence_s=0.5) as server:
        with server.connect() as silent:
            assert is_dropped_within(silent, 60)
        with server.connect() as slow:  # of a request's head
            slow.sendall(REQUEST.pack(ASK_PROBE, 1, 9.0, 10)[:5])
            assert is_dropped_within(slow, 60)
        with server.connect() as slow:  # of its body
            slow.sendall(REQUEST.pack(ASK_IMAGE, 1, 9.0, 100_000))
            started_s = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() < started_s + 60:
                    slow.send(b"a")
                    time.sleep(0.05)
            assert time.monotonic() - started_s < 60
        assert server.serves_within_a_minute()


def test_no_file_descriptors_left_is_no_end(head: Path, crowd: list[socket.socket]) -> None:
    with serving(head, silence_s=1.0, files=40) as server:
        for _ in range(120):
            crowd.append(server.connect())
        time.sleep(0.3)
        assert server.process.poll() is None
        assert server.serves_within_a_minute()


def test_bodies_that_never_end_take_bounded_memory(head: Path, crowd: list[socket.socket]) -> None:
    with serving(head) as server:
        assert server.serves_within_a_minute()
        before_mib = server.resident_mib
        block = bytes(MIB)
        for _ in range(24):
            connection = server.connect()
            crowd.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(REQUEST.pack(ASK_IMAGE, 1, 9.0, 16 * MIB))
                for _ in range(15):
                    connection.sendall(block)
        assert server.resident_mib - before_mib < 160
        assert server.serves_within(20)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "TGA", "ICNS"])
def test_kinds_of_images(head: Path, server: Server, kind: str) -> None:
    fingerprint = read_bundle(head.parent).codec.fingerprint
    target = io.BytesIO()
    Image.new("RGB", (32, 32)).save(target, kind)
    with contextlib.closing(ServerLink(("127.0.0.1", server.port), 30)) as link:
        if kind in ("JPEG", "PNG", "WEBP", "BMP"):
            assert link.ask(ASK_IMAGE, fingerprint + target.getvalue(), 20).body
        else:
            with pytest.raises(ProtocolError, match="no image"):
                link.ask(ASK_IMAGE, fingerprint + target.getvalue(), 20)


def test_an_image_made_to_take_memory_is_refused_before_it_is_decoded(head: Path, server: Server) -> None:
    fingerprint = read_bundle(head.parent).codec.fingerprint
    bomb = io.BytesIO()
    Image.new("1", (8000, 8000)).save(bomb, "PNG")
    assert len(bomb.getvalue()) < 20_000
    with contextlib.closing(ServerLink(("127.0.0.1", server.port), 30)) as link:
        before_mib = server.resident_mib
        with pytest.raises(ProtocolError, match=r"8000 x 8000 in .* bytes; at most"):
            link.ask(ASK_IMAGE, fingerprint + bomb.getvalue(), 20)
        assert server.resident_mib - before_mib < 20


def test_a_device_that_has_nothing_to_ask_keeps_its_connections(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_connection, "STAY_S", 0.2)
    with (
        serving(head, silence_s=3.0) as server,
        SplitModel(head, f"127.0.0.1:{server.port}", mode="code 1", threads=1, deadline_s=20) as model,
    ):
        for pause_s in (0.0, 4.0):  # no frame: the connection of the frames
            time.sleep(pause_s)
            assert model.run(make_pixels(1)[0]).report.mode == "code 1"
        end_s = time.monotonic() + 4.0  # many frames: the connection of the probes
        while time.monotonic() < end_s:
            assert model.run(make_pixels(1)[0]).report.mode == "code 1"
        assert model.stats.server_losses == 0


def test_a_file_of_any_size_is_not_read_for_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    os.truncate(tmp_path / "a.jpg", 1 << 40)
    with pytest.raises(ModelFileError, match=r"a\.jpg: has 1,099,511,627,776 bytes; an image has 536,870,912 at most"):
        read_image(tmp_path / "a.jpg", ImageSize(3, 16, 16))
