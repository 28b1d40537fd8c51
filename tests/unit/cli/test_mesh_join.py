"""What `mesh join` does with what happens: the list of members first, whatever waits to be measured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import NotTrusted
from edge_run.base.interrupt import Interrupt, go_on
from edge_run.base.mesh import Joined, Lost, Member
from edge_run.cli.app import _run
from edge_run.cli.mesh.join import _take_part
from edge_run.cli.shared.terminal import Terminal


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
    assert said == ["+ b (b)", "+ c (c)", "+ d (d)", "- b: it left"], "not of one that was never told of"


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
    with pytest.raises(KeyboardInterrupt), interrupt.hearing_ctrl_c():
        _take_part(node, SimpleNamespace(say=str), node.cluster, lambda cluster: None, interrupt.check)  # type: ignore[arg-type]
    assert node.did == ["goes on"]


def test_a_line_from_no_standard_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    assert _run(["mesh", "join", "-"], Terminal()) == 2
    assert "join line: does not begin with" in capsys.readouterr().err
