"""`edge-run split serve` and `split run`: what they print, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from program import Result, ending, next_line, run_program
from split_servers import served
from vision_models import make_pixels


def test_commands(head: Path, tmp_path: Path) -> None:
    for number, pixels in enumerate(make_pixels(3)):
        Image.fromarray(pixels.transpose(1, 2, 0)).save(tmp_path / f"{number}.jpg")
    (tmp_path / "broken.jpg").write_bytes(b"broken")

    def run(*arguments: str) -> Result:
        return run_program("split", "run", head, "-t", 1, *arguments)

    images = [part for number in range(3) for part in ("--image", str(tmp_path / f"{number}.jpg"))]
    with served(head.parent) as (_, port):
        done = run(*images, "--server", f"127.0.0.1:{port}", "--mode", "code 1", "--deadline", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["mode"] for line in done.stdout.splitlines()] == ["code 1"] * 3
    done = run(*images, "--server", "127.0.0.1:9")
    assert done.stdout.count("local") == 3
    assert "computing here" in done.stderr
    for arguments, exit_code in (
        (["--image", str(tmp_path / "broken.jpg")], 3),
        (["--image", str(tmp_path / "none.jpg")], 3),
        ([], 2),
        (["--dir", str(tmp_path / "none")], 2),
        ([*images, "--mode", "fast"], 2),
        ([*images, "--server", "host:port"], 2),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (exit_code, 1), done.stderr


def test_a_port_that_is_taken_is_refused(head: Path) -> None:
    with served(head.parent) as (_, port):
        done = run_program("split", "serve", head.parent / "tail.onnx", "--port", port)
    assert (done.returncode, done.stderr.count("\n")) == (7, 1), done.stderr


def unheard(is_full: bool) -> int:
    """Open what cannot be written: a device that is full, or a pipe that nobody reads."""
    if is_full:
        return os.open("/dev/full", os.O_WRONLY)
    reads, writes = os.pipe()
    os.close(reads)
    return writes


@pytest.mark.parametrize(("is_full", "code"), [(False, 141), (True, 5)])
def test_a_port_that_cannot_be_said_ends_the_server(head: Path, is_full: bool, code: int) -> None:
    command = [sys.executable, "-m", "edge_run", "split", "serve", str(head.parent / "tail.onnx"), "--port", "0"]
    with open(unheard(is_full), "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    said = "edge-run: standard output: cannot be written (No space left on device)\n" if is_full else ""
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_server_quietly(head: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "edge_run", "split", "serve", str(head.parent / "tail.onnx"), "--port", "0"]
    with ending(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process:
        assert next_line(process)
        process.send_signal(number)
        _, complaints = process.communicate(timeout=100)
    assert (process.returncode, complaints) == (code, "")
