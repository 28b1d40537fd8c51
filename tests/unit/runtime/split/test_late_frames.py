"""A frame whose time is over is lost, connections end with who has them, and a matrix may be multiplied by itself."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from edge_run.partition.cuts import Operation
from edge_run.partition.split_choice import Chooser, FrameCost
from edge_run.runtime.split import connection as split_connection
from edge_run.runtime.split.connection import ServerConnection
from edge_run.runtime.split.onnx_file import _multiply_adds
from edge_run.runtime.split.protocol import ASK_CODE, LinkLost, Reply, ServerLink


def test_no_time_is_left_once_it_is_ones_turn() -> None:
    connection: Any = ServerConnection.__new__(ServerConnection)
    connection._frames, connection._speaking = object(), threading.Lock()
    with pytest.raises(LinkLost, match="in time"):
        connection.ask(ASK_CODE, b"", 0.0)
    assert not connection._speaking.locked()


def test_a_frame_that_comes_to_nothing_leaves_a_connection_alone_that_was_made_since() -> None:
    """The thread found the loss first, and the server again, while the frame was still waiting."""

    class Link:
        is_open = True

        def ask(self, *_: object) -> Reply:
            if self is old:
                connection.lose("found by a probe")
                connection._frames = new
            raise LinkLost("too late")

        def close(self) -> None:
            self.is_open = False

    connection: Any = ServerConnection(("there", 1), "00", Chooser((), {}), threading.Lock())
    old, new = Link(), Link()
    connection._frames = old
    for asked, is_there in ((old, True), (new, False)):
        with pytest.raises(LinkLost, match="too late"):
            connection.ask(ASK_CODE, b"", 60.0)
        connection.lose("too late", was_asked=True)
        assert not asked.is_open or asked is new
        assert (connection._frames is new) == new.is_open == is_there
    assert connection.problem == "too late"


def test_while_a_frame_is_under_way_the_connection_of_the_probes_does_not_fall_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is silent makes room for others at a server that is full."""
    monkeypatch.setattr(split_connection, "STAY_S", 0.05)
    monkeypatch.setattr(split_connection, "PROBE_EVERY_S", 0.01)
    said, is_enough = list[tuple[bytes, float]](), threading.Event()

    class Link:
        def ask(self, kind: int, body: bytes, limit_s: float) -> Reply:
            said.append((body, limit_s))
            if len(said) == 3:
                is_enough.set()
            return Reply(b"", 0.0, 0.0, 0.0)

    connection: Any = ServerConnection(("there", 1), "00", Chooser((), {}), threading.Lock())
    frames = connection._frames = object()
    thread = threading.Thread(target=connection._watch, args=(Link(), frames))
    with connection._speaking:
        thread.start()
        assert is_enough.wait(20)
        connection._is_closed.set()
        thread.join()
    assert set(said) == {(b"", split_connection.PATIENT_LIMIT_S)}, "it may wait behind the frame, and measures nothing"


class SlowServer:
    """Answers each probe at once; the second connection waits until it `may_connect`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links: list[Any] = []
        self.may_connect, self.is_asked = threading.Event(), threading.Event()
        server = self

        class Link:
            def __init__(self, address: tuple[str, int], limit_s: float) -> None:
                server.links.append(self)
                self.hello, self.is_open = {"00": {"code": FrameCost(0.1, 9), "image": FrameCost(0.1, 9)}}, True
                if len(server.links) > 1:
                    server.is_asked.set()
                    assert server.may_connect.wait(60)

            def ask(self, kind: int, body: bytes, limit_s: float) -> Reply:
                return Reply(b"", 0.0, 0.0, 0.001)

            def close(self) -> None:
                self.is_open = False

        monkeypatch.setattr(split_connection, "ServerLink", Link)
        self.connection = ServerConnection(("there", 1), "00", Chooser((), {}), threading.Lock())

    def wait_until_over(self) -> None:
        self.may_connect.set()
        self.connection._thread.join(60)
        assert not self.connection._thread.is_alive()
        assert len(self.links) == 2
        assert not any(link.is_open for link in self.links)


def test_a_connection_that_is_made_after_it_was_closed_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_connection, "PROBE_LIMIT_S", 0.01)
    monkeypatch.setattr(split_connection, "CONNECT_LIMIT_S", 0.01)
    server = SlowServer(monkeypatch)
    server.connection.start(0.0)
    assert server.is_asked.wait(60)
    server.connection.close()
    server.wait_until_over()
    assert server.connection.problem == "closed"


def test_ctrl_c_while_the_server_is_waited_for_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(limit_s: float) -> None:
        assert server.is_asked.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(split_connection, "PROBE_LIMIT_S", 0.01)
    monkeypatch.setattr(split_connection, "CONNECT_LIMIT_S", 0.01)
    server = SlowServer(monkeypatch)
    monkeypatch.setattr(server.connection._tried, "wait", stop)
    with pytest.raises(KeyboardInterrupt):
        server.connection.start(5.0)
    server.wait_until_over()


def test_a_server_that_was_found_again_is_looked_for_at_once_when_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it was not there before."""
    monkeypatch.setattr(split_connection, "PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(split_connection, "MOST_BACKOFF_S", 0.08)
    server = SlowServer(monkeypatch)
    link, failures = split_connection.ServerLink, [LinkLost("not there")] * 4
    pauses = list[float]()

    def connect(address: tuple[str, int], limit_s: float) -> Any:
        if failures:
            raise failures.pop()
        pauses.append(server.connection._backoff_s)
        return link(address, limit_s)

    monkeypatch.setattr(split_connection, "ServerLink", connect)
    server.may_connect.set()
    server.connection.start(60.0)
    for _ in range(600):
        if pauses and server.connection._backoff_s == split_connection.FIRST_BACKOFF_S:
            break
        time.sleep(0.1)
    assert pauses == [split_connection.MOST_BACKOFF_S] * 2
    assert server.connection._backoff_s == split_connection.FIRST_BACKOFF_S
    server.connection.close()
    server.wait_until_over()


def test_an_address_is_told_as_it_is_given() -> None:
    with pytest.raises(LinkLost, match=r"^\[::1\]:1: "):
        ServerLink(("::1", 1), 5.0)


def test_the_square_of_a_matrix() -> None:
    square = Operation("MatMul", ("x",), ("y",))
    assert _multiply_adds(square, {"x": (4, 4), "y": (4, 4)}) == 64
