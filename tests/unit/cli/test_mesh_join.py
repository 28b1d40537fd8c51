"""What `mesh join` does with what happens: the list of members first, whatever waits to be measured."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edge_run.cli.mesh.join as join_module
from edge_run.base.errors import ConfigError, NotTrusted
from edge_run.base.interrupt import Interrupt, go_on
from edge_run.base.mesh import Joined, Lost, Member
from edge_run.cli.app import _run
from edge_run.cli.mesh.join import _cluster, _take_part
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.members.cluster import Cluster, invitation_line, read_cluster, write_cluster
from edge_run.devices.members.identity import brief_lock, device_key
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.mesh.changes import invited_to
from mesh_lists import let_in, make_cluster

GIVEN: dict[str, Any] = {
    "broker": None, "listen": (), "authority": None, "port": 4321, "replace": False, "name": None,
}  # fmt: skip


class Ended(Exception):
    pass


class Node:
    """A node whose list of members changes while the first link is measured, and, at the end, without a word."""

    is_connected = True

    def __init__(self) -> None:
        self.cluster: Any = SimpleNamespace(version=1)
        self.link, self.did = self, list[str]()
        first = [Joined(Member(node, node, "1", {})) for node in "bcd"]
        self.waits = [first, [], [Lost("b", "it left"), Lost("e", "it left")], Ended()]

    def wait(self, *, timeout_s: float, check: Callable[[], None]) -> tuple[Any, ...]:
        check()
        found = self.waits.pop(0)
        if isinstance(found, Exception):
            raise found
        if not found:
            self.cluster = SimpleNamespace(version=3)
        return tuple(found)

    def measure(self, node: str, *, timeout_s: float, check: Callable[[], None]) -> None:
        check()
        self.did.append(f"measure {node}")
        self.cluster = SimpleNamespace(version=2)

    def report_links(self) -> None: ...

    def check_member(self) -> None:
        self.did.append("check")


def test_a_new_list_counts_before_the_next_measurement_and_without_an_event() -> None:
    node, said = Node(), list[str]()
    terminal: Any = SimpleNamespace(say=said.append)

    def let_in(cluster: Any) -> None:
        node.did.append(f"let in by {cluster.version}")

    with pytest.raises(Ended):
        _take_part(node, terminal, node.cluster, let_in, go_on)  # type: ignore[arg-type]
    assert node.did == [
        "measure b", "let in by 2", "check", "measure c", "measure d", "let in by 3", "check"
    ]  # fmt: skip
    assert said == ["+ b (b)", "+ c (c)", "+ d (d)", "- b (b): it left"], "not of one that was never told of"


def test_whose_invitations_have_ended_is_looked_at_without_a_new_list(monkeypatch: pytest.MonkeyPatch) -> None:
    node, told = Node(), list[Any]()
    node.waits = [[], [], Ended()]
    monkeypatch.setattr(join_module, "INVITED_S", -1.0)
    with pytest.raises(Ended):
        _take_part(node, SimpleNamespace(say=str), node.cluster, told.append, go_on)  # type: ignore[arg-type]
    assert len(told) == 2


def test_who_was_removed_ends() -> None:
    node = Node()

    def check() -> None:
        raise NotTrusted("this device was removed")

    node.check_member = check  # type: ignore[method-assign]
    with pytest.raises(NotTrusted):
        _take_part(node, SimpleNamespace(say=str), node.cluster, lambda cluster: None, go_on)  # type: ignore[arg-type]
    assert node.did == ["measure b"]


def test_ctrl_c_is_heard_between_two_looks_and_not_wherever_the_interpreter_is() -> None:
    """A KeyboardInterrupt in a wait could leave a lock half released."""
    node, interrupt = Node(), Interrupt()

    def wait(*, timeout_s: float, check: Callable[[], None]) -> tuple[Any, ...]:
        signal.raise_signal(signal.SIGINT)
        node.did.append("goes on")
        check()
        raise AssertionError("it was not asked to end")

    node.wait = wait  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), interrupt.hearing_signals():
        _take_part(node, SimpleNamespace(say=str), node.cluster, lambda cluster: None, interrupt.check)  # type: ignore[arg-type]
    assert node.did == ["goes on"]


def test_a_flag_that_would_do_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs bring their number of threads."""
    assert _run(["mesh", "join", "--threads", "2"], Terminal()) == 2
    assert "--threads" in capsys.readouterr().err


def test_a_line_from_no_standard_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    assert _run(["mesh", "join", "-"], Terminal()) == 2
    assert "join line: does not begin with" in capsys.readouterr().err


def test_a_list_that_changes_while_this_device_joins_stays(tmp_path: Path) -> None:
    """As by `mesh remove`, which has the lock: what is to be remembered is added to the list that it leaves."""
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one", "two"])
    folder, founder, found = tmp_path / "one", device_key(tmp_path / "one"), list[Cluster]()
    newer = ListEditor(founder, cluster.listed, cluster.secret).remove(device_key(tmp_path / "two").node)
    joining = threading.Thread(target=lambda: found.append(_cluster(None, folder, GIVEN, Terminal())))
    with brief_lock(folder / "cluster.lock"):
        joining.start()
        joining.join(0.2)
        assert not found
        write_cluster(folder, cluster.adopt(newer, founder))
    joining.join(60)
    assert found == [read_cluster(folder)]
    assert (found[0].listed, found[0].port) == (newer, 4321)


def test_a_list_that_the_broker_keeps_is_not_taken_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one"])
    folder, founder = tmp_path / "one", device_key(tmp_path / "one")
    newer = let_in(ListEditor(founder, cluster.listed, cluster.secret), device_key(tmp_path / "two"), "two")
    write_cluster(folder, cluster.adopt(newer, founder))
    monkeypatch.setattr(join_module, "_come_in", lambda *_: cluster)
    line = invitation_line(invited_to(cluster, cluster.broker, bytes(32)))
    assert _cluster(line, folder, GIVEN, Terminal()).listed == newer


def test_a_line_of_another_founder_does_not_move_a_member_to_another_broker(tmp_path: Path) -> None:
    """Whoever knows the id of a cluster can make such a line; the device would tell that broker its password."""
    cluster, folder = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one", "two"], "127.0.0.1:1883"), tmp_path / "two"
    known, own = read_cluster(folder), invited_to(cluster, "mqtt://elsewhere", bytes(32))
    with pytest.raises(ConfigError, match="belongs to cluster"):
        _cluster(invitation_line(dataclasses.replace(own, founder=bytes(32))), folder, GIVEN, Terminal())
    assert read_cluster(folder) == known
    assert _cluster(invitation_line(own), folder, GIVEN, Terminal()).broker == "mqtt://elsewhere"
