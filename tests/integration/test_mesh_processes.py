"""A mesh of real processes, over a real mosquitto: the program as a user starts it, and faults under an answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mesh_faults
from edge_run.base.units import MIB
from mesh_processes import Mosquitto
from tiny_models import make_model

pytestmark = pytest.mark.skipif(not shutil.which("mosquitto"), reason="mosquitto is not installed")

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}


@pytest.mark.parametrize(("name", "seed"), [("granite", 10), ("qwen3moe", 5), ("mamba", 6), ("llama", 9)])
def test_faults_change_no_token(name: str, seed: int, folder: Path) -> None:
    """Seeds: the broker is away while one freezes and one starts anew; restarts of the broker; a thaw; two freezes."""
    path = make_model(name, folder)
    done = subprocess.run(
        [sys.executable, mesh_faults.__file__, str(path), "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**ENVIRONMENT, "PYTHONPATH": str(Path(mesh_faults.__file__).parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["identical"], found
    assert found["longest_token_s"] < 10


def edge_run(home: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "edge_run", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**ENVIRONMENT, "HOME": str(home), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_program_spreads_a_model_and_says_what_it_did(grown: Path, tmp_path: Path) -> None:
    """120 MB of weights; each device has room for a part of them, so that the plan needs both; one fetches its part."""
    files = ["--models", str(tmp_path), "--fetch", "1GiB"]
    homes = [tmp_path / name for name in ("here", "there")]
    for home in homes:
        home.mkdir()
    broker = Mosquitto(tmp_path)
    broker.start()
    worker = None
    try:
        line = edge_run(homes[0], "mesh", "init", "--broker", broker.url, "--json", "--show-line")["join_line"]
        worker = subprocess.Popen(
            [sys.executable, "-m", "edge_run", "mesh", "join", line, *files, "--memory", "400MiB"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**ENVIRONMENT, "HOME": str(homes[1]), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""},
        )
        asked = [str(grown), "-p", "Once upon a time", "-n", "12", "--temp", "0", "-c", "256", "-t", "1", "--json"]
        wanted = edge_run(homes[0], *asked)
        for _ in range(10):  # the worker may not be there yet
            found = edge_run(homes[0], *asked, "--mesh", "--memory", "230MiB")
            if found["mesh"]:
                break
        assert found["token_ids"] == wanted["token_ids"]
        assert wanted["mesh"] is None
        assert len(found["mesh"]["nodes"]) == 2, found["mesh"]
        assert sorted(b for node in found["mesh"]["nodes"] for b in node["blocks"]) == list(range(12))
        assert found["memory"]["peak_bytes"] <= found["memory"]["budget_bytes"]
        assert found["mesh"]["sent_bytes"] > 0
        fetched = sum(file.stat().st_blocks * 512 for file in homes[1].rglob("fetched/*/*.gguf"))
        assert fetched > 10 * MIB
    finally:
        if worker:
            worker.send_signal(signal.SIGTERM)
            worker.wait(15)
        broker.stop()
