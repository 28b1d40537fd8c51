"""How commands end: output that is full or that nobody reads, signals, and what a demo leaves behind."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from kit_models import GREEDY, KIT, PROMPT
from program import WAIT_S, ending, next_line
from served import wait_for

COMMAND = [sys.executable, "-m", "edge_run"]
HANGING = """
import functools, importlib, sys, time
from edge_run.cli.app import main
from edge_run.runtime.server import serving

def hang(*given):
    print("hangs", file=sys.stderr, flush=True)
    time.sleep(600)

serving.CLOSING_S = 0.1
module, names = sys.argv[1].split(":")
*owners, name = names.split(".")
setattr(functools.reduce(getattr, owners, importlib.import_module(module)), name, hang)
main(sys.argv[2:])
"""  # what reads a drive never returns
THREAD_LEFT = """
import sys, threading
from edge_run.cli import app

def leave(*given):
    threading.Thread(target=threading.Event().wait).start()
    return 130

app._run = leave
app.main([])
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.usefixtures("known_models")
def test_full_standard_output_is_one_line(environment: dict[str, str]) -> None:
    chat = ["chat", KIT, "-n", "3", "--prompt-cache", "off"]
    for words in ([KIT, "-p", "x", "-n", "3"], [KIT, "-p", "x", "-n", "3", "--json"], ["--help"], chat):
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [*COMMAND, *words], input="hi\n", stdout=full, stderr=PIPE, text=True, env=environment, check=False
            )
        assert result.returncode == 5
        hint = r".*\n> " if words is chat else ""
        assert re.fullmatch(rf"{hint}edge-run: standard output.*No space left.*\n", result.stderr)


@pytest.mark.usefixtures("known_models")
def test_output_that_nobody_reads_ends_quietly(environment: dict[str, str]) -> None:
    words = [*COMMAND, KIT, "-p", PROMPT, "-n", "2000", *GREEDY, "-c", "2048"]
    with subprocess.Popen(words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment) as process:
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 141


@pytest.mark.usefixtures("known_models")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_run(environment: dict[str, str], number: int, code: int) -> None:
    words = [*COMMAND, KIT, "-p", PROMPT, *GREEDY, "-c", "2048"]
    with subprocess.Popen(words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment) as process:
        first = process.stdout.read(5)
        process.send_signal(number)
        rest, notices = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert b"Traceback" not in notices
    if number == signal.SIGINT:
        assert first + rest
        assert re.match(rb"Stopped\.\n\d+ tokens at ", notices)
    else:
        assert notices == b""


@pytest.mark.usefixtures("known_models")
def test_a_signal_ends_a_run_in_the_background_of_its_terminal(environment: dict[str, str]) -> None:
    """As `kill %1`, or `timeout`, which puts what it runs in a group of its own: the system stopped the run instead."""
    words = [*map(str, COMMAND), str(KIT), "-p", PROMPT, *map(str, GREEDY), "-c", "2048"]
    shell = (
        "import fcntl, os, signal, subprocess, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        f"run = subprocess.Popen({words!r}, stdout=subprocess.PIPE, preexec_fn=os.setpgrp)\n"
        "run.stdout.read(5)\n"
        "run.send_signal(signal.SIGTERM)\n"
        "try:\n"
        "    sys.exit(run.wait(60))\n"
        "finally:\n"
        "    run.kill()\n"
    )
    near, far = pty.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-c", shell], stdin=far, stderr=PIPE, env=environment, start_new_session=True, check=False
        )
    finally:
        os.close(near)
        os.close(far)
    assert result.returncode == 143, result.stderr


def test_demo_streams_and_leaves_nothing_behind(run, tmp_path: Path) -> None:
    result = run("demo", "--size", "120MiB", "--memory", "168MiB", "-n", 3, "--no-mmap")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("It was a dark evening, and the old man at the door")
    assert "\x1b" not in result.stderr
    for told in ("1. Growing", "pinned", "window", "in all", "is read again", "3 tokens at", "of the physical limit"):
        assert told in result.stderr
    assert list((tmp_path / "home" / ".cache" / "edge-run").iterdir()) == []


def test_demo_that_is_stopped_leaves_nothing_behind_and_can_be_kept(run, environment, tmp_path: Path) -> None:
    cache = tmp_path / "home" / ".cache" / "edge-run"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with ending(subprocess.Popen([*COMMAND, "demo"], stdout=PIPE, stderr=PIPE, env=environment)) as process:
            wait_for(lambda: any(cache.glob("*/*")))
            process.send_signal(number)
            assert b"Traceback" not in process.communicate(timeout=WAIT_S)[1]
        assert process.returncode == code
        assert list(cache.iterdir()) == []
    kept = run("demo", "--size", "9MiB", "--memory", "1GiB", "-n", 2, "--keep", "--no-mmap")
    assert "holds all 9 MiB" in kept.stderr
    words = re.search(r"Kept: edge-run (\S+) (.*)", kept.stderr)
    assert run(words[1], *words[2].split(), "-p", "x", "-n", 1).returncode == 0
    shutil.rmtree(cache)


@pytest.mark.usefixtures("known_models")
@pytest.mark.parametrize(
    ("hanging", "code"),
    [
        ("edge_run.runtime.server.serving:read_entry", 130),
        ("edge_run.runtime.server.serving:read_folder", 130),
        ("edge_run.cli.commands.serve:open_file", 0),  # it serves by then, and ends as it is told to
    ],
)
def test_ctrl_c_ends_a_server_whose_drive_hangs(environment: dict[str, str], hanging: str, code: int) -> None:
    """Its thread was waited for at the end, and with it the drive."""
    pytest.importorskip("uvicorn")
    words = ["--models", str(KIT.parent)] if hanging.endswith("folder") else [str(KIT)]
    script = [sys.executable, "-c", HANGING, hanging, "serve", *words, "--port", "0"]
    with subprocess.Popen(script, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment) as process:
        try:
            assert b"hangs\n" in iter(process.stderr.readline, b"")
            process.send_signal(signal.SIGINT)
            _, notices = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == code
    assert b"Traceback" not in notices


@pytest.mark.usefixtures("known_models")
def test_whoever_insists_ends_a_server_whose_model_does_not_close(environment: dict[str, str]) -> None:
    """As where a read of its weights hangs, which closing it waits for: no Ctrl-C ended it quietly any more."""
    pytest.importorskip("uvicorn")
    hanging = "edge_run.runtime.engine.engine:Engine.close"
    script = [sys.executable, "-c", HANGING, hanging, "serve", str(KIT), "--port", "0"]
    process = subprocess.Popen(script, stdin=DEVNULL, stdout=PIPE, stderr=subprocess.STDOUT, env=environment)
    with ending(process):
        assert next_line(process).startswith(b"serving ")
        process.send_signal(signal.SIGINT)
        said = [next_line(process) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=WAIT_S)
    told = b"the model is not closed yet, which waits for its drive; Ctrl-C again ends the process\n"
    assert sorted(said) == [b"hangs\n", told]
    assert (process.returncode, rest) == (-signal.SIGINT, b"")


def test_a_thread_that_hangs_does_not_keep_the_process(environment: dict[str, str]) -> None:
    """As one of a library's pool, for which Python waits at its end."""
    script = [sys.executable, "-c", THREAD_LEFT]
    left = subprocess.run(script, env=environment, timeout=WAIT_S, capture_output=True, check=False)
    assert (left.returncode, left.stderr) == (130, b"")
