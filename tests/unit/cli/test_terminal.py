"""What goes to standard output and to standard error, where the two are not one terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from edge_run.cli.app import _run
from edge_run.cli.shared.terminal import Terminal, has_input
from program import fresh_environment, run_program
from routes import write_trace


@pytest.mark.parametrize(
    ("text", "cut"),
    [("x" * 100, "x" * 39), ("\u6a21" * 100, "\u6a21" * 19), ("\u00e9" * 100, "\u00e9" * 39), ("\u6a21", "\u6a21")],
    ids=["narrow", "wide", "accented", "short"],
)
def test_progress_fits_the_terminal_of_standard_error(text: str, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
    with open(master, "rb", buffering=0) as shown, open(slave, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        Terminal().show(text)
        assert shown.read(200).decode() == cut


@pytest.mark.parametrize("colours", ["FORCE_COLOR", "NO_COLOR"])
def test_without_standard_error_notices_go_nowhere(
    colours: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(colours, "1")
    monkeypatch.setattr(sys, "stderr", None)
    Terminal().say("a notice", "red")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "has_chat"), [(["run"], True), (["embed"], False), (["trace", "-o", "trace.csv"], False)]
)
def test_what_to_do_without_standard_input_is_what_the_command_can(
    words: list[str], has_chat: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert _run([*words, "model.gguf"], Terminal()) == 2
    said = capsys.readouterr().err
    assert "standard input is empty; give one with -p" in said
    assert ("to chat" in said) == has_chat


def test_json_of_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / os.fsdecode(b"caf\xe9.csv"))
    done = run_program("replay", trace, "--json", environment=fresh_environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "caf" in json.loads(done.stdout)["trace"]


READ_A_MESSAGE = """
import json
from edge_run.cli.shared.chat_loop import read_message
from edge_run.cli.shared.terminal import Terminal, has_input
print(json.dumps(read_message(Terminal())))
"""


@pytest.mark.parametrize(("kind", "codes"), [("xterm", b"\x1b[?2004h"), ("dumb", b"")])
def test_what_is_pasted_at_a_terminal_that_says_so_is_one_message(kind: str, codes: bytes) -> None:
    if "GNU" not in str(pytest.importorskip("readline").__doc__):
        pytest.skip("lines are edited by another library than GNU readline")
    ours, theirs = pty.openpty()
    command, environment = [sys.executable, "-c", READ_A_MESSAGE], {**os.environ, "TERM": kind}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        came = _read_to(ours, b"> ")
        os.write(ours, b"\x1b[200~one\r\ttwo\r\x1b[201~\r" if codes else b"one\r")
        said = _read_to(ours, b'"\r\n')
    os.close(ours)
    assert (b"\x1b[?2004h" in came) == bool(codes), "a terminal that knows no codes is sent none"
    assert (b'"one\\n\\ttwo"' if codes else b'"one"') in said


def _read_to(terminal: int, end: bytes) -> bytes:
    """Return what comes from a terminal until `end` does."""
    came = b""
    while end not in came:
        assert select.select([terminal], [], [], 60)[0], came
        came += os.read(terminal, 1 << 12)
    return came


@pytest.mark.parametrize(
    ("kind", "has_some"),
    [("pipe", True), ("empty pipe", False), ("ended pipe", False), ("file", True), ("read file", False),
     ("empty file", False), ("null", False), ("socket", True), ("empty socket", False), ("closed", False)],
)  # fmt: skip
def test_what_was_given_on_standard_input_is_seen_and_not_waited_for(
    kind: str, has_some: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as open_files:
        if "pipe" in kind:
            reading, writing = os.pipe()
            other: Any = open_files.enter_context(open(writing, "wb", buffering=0))
        elif "socket" in kind:
            one, another = socket.socketpair()
            reading, other = one.detach(), open_files.enter_context(another.makefile("wb", buffering=0))
            open_files.enter_context(another)
        else:
            (tmp_path / "file").write_text("" if "empty" in kind else "one\ntwo\n")
            reading = os.open("/dev/null" if kind == "null" else tmp_path / "file", os.O_RDONLY)
        if kind in ("pipe", "socket"):
            other.write(b"some")
        if kind == "ended pipe":
            other.close()
        if kind == "read file":
            os.read(reading, 4)
        stdin = open_files.enter_context(open(reading, encoding="utf-8"))
        if kind == "closed":
            stdin.close()
        assert has_input(stdin) == has_some
        terminal, said = Terminal(), list[str]()
        monkeypatch.setattr(sys, "stdin", stdin if kind != "closed" else None)
        monkeypatch.setattr(terminal, "say", lambda text, *style: said.append(text))
        terminal.say_unread("why")
        assert said == ["standard input was not read: why"] * has_some
        if kind == "file":
            terminal.say_unread("why", [tmp_path / "none", tmp_path / "file"])
            assert len(said) == 1, "the file that was read is what is open as standard input"
