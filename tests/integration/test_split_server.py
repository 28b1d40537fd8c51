"""A device and its server: real processes, real sockets, and servers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from edge_run import AsyncSplitModel, ConfigError, ModelFileError, NotSupported, ProtocolError, SplitModel
from edge_run.base.split import FrameReport
from edge_run.partition import latent_codec
from edge_run.runtime.split import protocol
from edge_run.runtime.split import server as server_module
from edge_run.runtime.split.bundle import read_bundle
from edge_run.runtime.split.protocol import ServerLink, pack_arrays, unpack_arrays
from edge_run.runtime.split.server import SplitServer
from mosquitto import free_port
from split_servers import served
from vision_models import make_pixels
from waiting import until

DEADLINE_S = 2.0
LATE_S = 1.5  # than that, at most, in one of a few rounds: a machine may stand still for a moment


@pytest.fixture(scope="module")
def server(head: Path) -> Iterator[int]:
    with served(head.parent) as (_, port):
        yield port


@contextlib.contextmanager
def connected(head: Path, server: int, **options: Any) -> Iterator[SplitModel]:
    """Open a split, and wait until it knows its server, which takes longer on a busy machine."""
    with SplitModel(head, f"127.0.0.1:{server}", threads=1, deadline_s=20, **options) as model:
        until(lambda: model.stats.bytes_per_s)
        yield model


def test_every_mode_answers(head: Path, server: int) -> None:
    pixels = make_pixels(4, seed=5)
    with SplitModel(head, threads=1) as model:
        wanted = [model.run(one).outputs["logits"] for one in pixels]
    spread = np.std(wanted)
    for mode, most in (("code 2", 0.2), ("code 1", 1.0), ("image", 3.0)):
        with connected(head, server, mode=mode) as model:
            assert model.problem == ""
            for one, right in zip(pixels, wanted, strict=True):
                frame = model.run(one)
                assert frame.report.mode == mode
                assert np.abs(frame.outputs["logits"] - right).max() < most * max(spread, 1)
            assert model.stats.frames == 4
            assert model.stats.local == 0


def test_what_the_server_answers_is_what_the_tail_gives(head: Path, server: int) -> None:
    """Codes cross the wire and nothing else does: the answer is bit for bit that of a tail run here."""
    from edge_run.runtime.split.onnx_session import open_session, run_session

    bundle = read_bundle(head)
    sessions = [open_session(str(head.parent / name), name, 1) for name in ("head.onnx", "tail.onnx")]
    (pixels,) = make_pixels(1, seed=7)
    latents = run_session(sessions[0], pixels[None])[0].reshape(bundle.codec.channels, -1)
    decoded, _ = bundle.codec.decode(bundle.codec.encode(latents, 1), bundle.positions)
    wanted = run_session(sessions[1], decoded.reshape(1, *bundle.code.latent))[0]
    with connected(head, server, mode="code 1") as model:
        assert np.array_equal(model.run(pixels).outputs["logits"], wanted)


def test_most_bytes_takes_a_lower_rate(head: Path, server: int) -> None:
    pixels = make_pixels(1, seed=3)[0]
    with connected(head, server, mode="code 2") as model:
        size = model.run(pixels).report.sent_bytes
    with connected(head, server, mode="code 2", most_bytes=size - 1) as model:
        report = model.run(pixels).report
        assert report.mode == "code 1"
        assert report.sent_bytes < size


def test_a_frame_that_no_rate_makes_small_enough_is_computed_here(head: Path, server: int) -> None:
    with connected(head, server, mode="code 0", most_bytes=1) as model:
        report = model.run(make_pixels(1, seed=3)[0]).report
        assert (report.mode, report.sent_bytes, report.lost_server) == ("local", 0, False)
        assert model.problem == ""


def test_a_server_that_refuses_is_there_and_asked_less_often(
    head: Path, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, body = make_pixels(1, seed=3)[0], SplitModel._body

    def damaged(*rest: Any) -> Any:
        code, mode = body(*rest)
        return code[:-1], mode

    with connected(head, server, mode="code 2") as model:
        monkeypatch.setattr(SplitModel, "_body", damaged)
        reports = [model.run(pixels).report for _ in range(10)]
        assert {(one.mode, one.lost_server) for one in reports} == {("local", False)}
        stats = model.stats
        assert (stats.refused, stats.server_losses, stats.has_server) == (3, 0, True)
        assert "server: refuses: code: " in stats.refusal
        assert model.problem == ""
        monkeypatch.undo()
        assert model.run(pixels).report.mode == "code 2"


@pytest.mark.parametrize("mode", ["code", "image"])
def test_server_killed_in_mid_stream(head: Path, mode: str) -> None:
    """Again and again: each frame is answered inside its deadline, locally from the next one on, and back later."""
    pixels = make_pixels(8, seed=2)
    with SplitModel(head, threads=1) as model:
        wanted = [model.run(one).outputs["logits"] for one in pixels]
    port, longest_s = free_port(), list[float]()
    with SplitModel(head, f"127.0.0.1:{port}", mode=mode, threads=1, deadline_s=DEADLINE_S) as model:
        for round_number in range(2):
            with served(head.parent, port) as (process, _):
                first: list[FrameReport] = []

                def is_served(first: list[FrameReport] = first) -> bool:
                    first[:] = [model.run(pixels[0]).report]
                    return first[0].mode.startswith(mode)

                until(is_served)
                answered, end_s = [*first], time.monotonic() + 30
                killer = threading.Timer(0.05 * (round_number + 1), process.kill)
                killer.start()
                while not any(report.mode == "local" for report in answered[-3:]):
                    assert time.monotonic() < end_s
                    number = len(answered) % len(pixels)
                    frame = model.run(pixels[number])
                    answered.append(frame.report)
                    assert frame.outputs["logits"].shape == (1, 4)
                    if frame.report.mode == "local":
                        assert np.array_equal(frame.outputs["logits"], wanted[number])
                killer.join()
                longest_s.append(max(report.seconds for report in answered))
        assert min(longest_s) < DEADLINE_S + LATE_S
        assert model.run(pixels[0]).report.mode == "local"


def test_a_server_that_hangs_costs_one_deadline(head: Path) -> None:
    pixels = make_pixels(1)[0]
    with (
        served(head.parent) as (process, port),
        SplitModel(head, f"127.0.0.1:{port}", mode="code 0", threads=1, deadline_s=DEADLINE_S) as model,
    ):
        for _ in range(3):
            until(lambda: model.run(pixels).report.mode == "code 0")
            os.kill(process.pid, signal.SIGSTOP)
            report = model.run(pixels).report
            assert report.lost_server
            assert report.mode == "local"
            again = model.run(pixels).report
            assert (again.mode, again.lost_server) == ("local", False), "it is not asked again"
            os.kill(process.pid, signal.SIGCONT)
            if report.seconds < DEADLINE_S + LATE_S:
                break
        assert report.seconds < DEADLINE_S + LATE_S
        until(lambda: model.stats.has_server)
        until(lambda: model.run(pixels).report.mode == "code 0")


def test_no_server_from_the_start(head: Path) -> None:
    with SplitModel(head, "127.0.0.1:9", threads=1, deadline_s=DEADLINE_S) as model:
        until(lambda: "Connection refused" in model.problem)
        assert model.run(make_pixels(1)[0]).report.mode == "local"


def test_a_server_of_another_training_is_none(head: Path, tmp_path: Path, server: int) -> None:
    other = shutil.copytree(head.parent, tmp_path / "other")
    text = json.loads((other / "code.json").read_text())
    text["cut"] = "another"
    (other / "code.json").write_text(json.dumps(text))
    with SplitModel(other / "head.onnx", f"127.0.0.1:{server}", threads=1) as model:
        until(lambda: "has no tail for" in model.problem)
        assert model.run(make_pixels(1)[0]).report.mode == "local"


def test_fuzzed_frames_are_refused_and_the_server_goes_on(head: Path, server: int) -> None:
    bundle = read_bundle(head)
    generator = np.random.default_rng(0)
    latent = generator.normal(size=(bundle.codec.channels, bundle.positions)).astype(np.float32)
    good = bundle.codec.encode(latent, 1)
    link = ServerLink(("127.0.0.1", server), 20)
    wanted = link.ask(protocol.ASK_CODE, good, 20).body
    refused = 0
    for _ in range(150):
        code = bytearray(good)
        kind = int(generator.integers(0, 4))
        if kind == 0:
            code[int(generator.integers(0, 7))] ^= int(generator.integers(1, 256))
        elif kind == 1:
            del code[int(generator.integers(0, len(code))) :]
        elif kind == 2:
            code = bytearray(generator.bytes(int(generator.integers(0, 300))))
        else:
            code[int(generator.integers(7, len(code)))] ^= int(generator.integers(1, 256))
        try:
            unpack_arrays(link.ask(protocol.ASK_CODE if kind else int(generator.integers(1, 3)), bytes(code), 20).body)
        except ProtocolError:
            refused += 1
    assert refused > 80
    assert link.ask(protocol.ASK_CODE, good, 20).body == wanted
    link.close()


def test_fuzzed_connections_do_not_stop_the_server(head: Path, server: int) -> None:
    generator = np.random.default_rng(1)
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", server), 30) as raw:
            raw.sendall(generator.bytes(int(generator.integers(0, 60))))
    with socket.create_connection(("127.0.0.1", server), 30) as raw:  # a length that would be 4 GiB
        raw.sendall(protocol.REQUEST.pack(protocol.ASK_CODE, 1, 9.0, 0xFFFFFFFF))
        raw.settimeout(30)
        received = b""
        while piece := raw.recv(65536):
            received += piece
        assert b"too large" in received
    with contextlib.closing(ServerLink(("127.0.0.1", server), 20)) as link:
        link.ask(protocol.ASK_PROBE, b"", 20)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's timers are read from /proc/net/tcp")
def test_a_device_that_vanishes_does_not_keep_its_place(server: int) -> None:
    """Without its power it says nothing, so the system asks: its timer of the server's end is that of keep-alives."""
    with socket.create_connection(("127.0.0.1", server), 30) as raw:
        raw.settimeout(30)
        assert raw.recv(4), "the hello"
        own = f":{raw.getsockname()[1]:04X}"

        def timer() -> str:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            found = (row[5] for row in rows if row[1].endswith(f":{server:04X}") and row[2].endswith(own))
            return next(found, "")  # what others open and close meanwhile may hide it from who reads

        until(lambda: timer().startswith("02:"))


def test_what_is_no_server_is_said_to_be_none(head: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            with SplitModel(head, f"127.0.0.1:{port}", threads=1) as model:
                until(lambda: "no edge-run split server" in model.problem)
                assert model.run(make_pixels(1)[0]).report.mode == "local"
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # who waits for the next connection waits no more
            thread.join()


def test_arrays_come_back_and_broken_ones_are_refused() -> None:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(True), np.zeros((0, 4), dtype=np.int64)]
    data = pack_arrays(arrays)
    for one, back in zip(arrays, unpack_arrays(data), strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (back.dtype, back.shape, back.tobytes())
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            unpack_arrays(data[:cut])
    with pytest.raises(ProtocolError, match="too many"):
        unpack_arrays(data + b"x")
    with pytest.raises(ProtocolError, match="truncated"):
        unpack_arrays(b"\x01\x00\x03" + b"\xff" * 12)


@pytest.mark.parametrize("backend", ["asyncio"])
def test_tasks_share_an_async_model(head: Path, server: int, backend: str) -> None:
    async def main() -> list[Any]:
        found: list[Any] = []
        async with AsyncSplitModel(head, f"127.0.0.1:{server}", mode="code", threads=1, deadline_s=20) as model:

            async def one(pixels: Any) -> None:
                found.append(await model.run(pixels))

            async with anyio.create_task_group() as group:
                for pixels in make_pixels(5):
                    group.start_soon(one, pixels)
            assert model.stats.frames == 5
        return found

    assert len(anyio.run(main, backend=backend)) == 5


def test_a_network_whose_answers_cannot_be_sent_is_refused_at_the_start(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MOST_REPLY_BYTES", 20)
    with pytest.raises(NotSupported, match=r"tail\.onnx: answers a frame with 27 bytes, at most 20 are sent"):
        SplitServer([head.parent / "tail.onnx"], threads=1)


def test_a_connection_without_memory_does_not_end_the_others(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, receive, failures = SplitServer([head.parent / "tail.onnx"], threads=1), SplitServer._receive, [MemoryError]

    async def failing(*rest: Any) -> bytes:
        if failures:
            raise failures.pop()
        return await receive(*rest)

    def talk(port: int) -> None:
        address = ("127.0.0.1", port)
        with contextlib.closing(ServerLink(address, 30.0)) as link, pytest.raises(protocol.LinkLost):
            link.ask(protocol.ASK_PROBE, b"", 30.0)
        with contextlib.closing(ServerLink(address, 30.0)) as link:
            assert link.ask(protocol.ASK_PROBE, b"", 30.0).body == b""

    async def run() -> None:
        async with anyio.create_task_group() as group:

            def ready(port: int) -> None:
                ports.append(port)
                is_ready.set()

            ports, is_ready = list[int](), anyio.Event()
            group.start_soon(made.serve, "127.0.0.1", 0, ready)
            await is_ready.wait()
            await anyio.to_thread.run_sync(talk, ports[0])
            group.cancel_scope.cancel()

    monkeypatch.setattr(SplitServer, "_receive", failing)
    anyio.run(run)


def test_an_image_without_a_code_does_not_keep_a_split_from_opening(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_codec, "MOST_PAYLOAD_BYTES", 0)
    with SplitModel(head, threads=1) as model:
        assert model.run(make_pixels(1)[0]).report.mode == "local"


def test_refusals(head: Path, tmp_path: Path) -> None:
    for options, reason in (
        ({"mode": "code 9"}, "mode 'code 9'"),
        ({"deadline_s": 0}, "deadline 0"),
        ({"use_filter": True}, "without a filter"),
        ({"most_bytes": 0}, "most bytes 0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            SplitModel(head, **options)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="no such file"):
        SplitModel(tmp_path / "head.onnx")
    with SplitModel(head, threads=1) as model:
        with pytest.raises(ConfigError, match=r"shape \(3, 16, 16\)"):
            model.run(np.zeros((3, 8, 8), dtype=np.uint8))
        with pytest.raises(ProtocolError, match="no image"):
            model.run(b"no image at all")


@pytest.mark.parametrize("damage", ["changed", "not json", "half", "other format", "deep"])
def test_damaged_bundles_are_refused(head: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(head.parent, tmp_path / "copy")
    code = folder / "code.json"
    SplitModel(folder / "head.onnx", threads=1).close()  # it is whole before
    if damage == "changed":
        (folder / "head.onnx").write_bytes((folder / "tail.onnx").read_bytes())
    elif damage == "not json":
        code.write_text("{")
    elif damage == "half":
        code.write_text(code.read_text()[:-200])
    elif damage == "other format":
        code.write_text('{"format": "edge-run split 9"}')
    else:
        code.write_text("[" * 100_000)
    why = "is not the one that code.json describes" if damage == "changed" else r"code\.json: cannot be read"
    with pytest.raises(ModelFileError, match=why):
        SplitModel(folder / "head.onnx")
