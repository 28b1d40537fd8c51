"""A command loads what it needs: how quickly it begins is decided by what is imported before it does anything."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = """
import sys
from edge_run.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(*sorted(sys.modules), file=sys.stderr)
    raise
"""
MESH = {"aiomqtt", "anyio", "asyncio", "cryptography", "ssl", "edge_run.devices.link", "edge_run.devices.mesh"}
ELSEWHERE = {
    "onnx",
    "onnxruntime",
    "torch",
    "jinja2",
    "multiprocessing",
    "dask",
    "distributed",
    "edge_run.runtime.split",
} | MESH
SLOW_AND_NEEDLESS = {"email", "importlib.metadata", "llama_cpp", "rich", "tomllib"} | ELSEWHERE
OTHER_COMMANDS = {f"edge_run.cli.{name}" for name in ("mesh", "split", "commands.bench", "commands.doctor")}
BEFORE_A_COMMAND = {"edge_run.base.config", "edge_run.base.results", "edge_run.runtime", "psutil", "shutil", "tempfile"}


def loaded(program: str, *arguments: str) -> set[str]:
    """Return the modules that a Python program had loaded when it ended well, and said on standard error."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "needless"),
    [
        pytest.param(["--version"], SLOW_AND_NEEDLESS | OTHER_COMMANDS | BEFORE_A_COMMAND | {"numpy"}, id="version"),
        pytest.param(["mesh", "init", "--help"], ELSEWHERE | {"numpy", "edge_run.cli.split"}, id="help of one command"),
        pytest.param(["plan", "KIT", "--no-probe"], SLOW_AND_NEEDLESS | OTHER_COMMANDS | {"numpy"}, id="plan"),
        pytest.param(
            ["run", "KIT", "-p", "Once", "-n", "2", "-t", "1", "-c", "64"],
            SLOW_AND_NEEDLESS | OTHER_COMMANDS | {"edge_run.cli.commands.plan"},
            id="run",
        ),
    ],
)
def test_a_command_loads_what_it_needs(
    arguments: list[str], needless: set[str], kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # without a configuration file, as on most devices
    found = loaded(LOADED, *(str(kit) if word == "KIT" else word for word in arguments))
    assert "edge_run.cli.app" in found
    assert not found & needless


def test_import_edge_run_loads_nothing_more() -> None:
    found = loaded("import sys, edge_run; print(*sys.modules, file=sys.stderr)")
    assert {name for name in found if name.partition(".")[0] == "edge_run"} == {"edge_run"}
    assert not found & SLOW_AND_NEEDLESS
    assert "numpy" not in found


PRESSED_EARLY = """
import os, signal, sys

class Presser:
    def find_spec(self, name, path, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presser())
from edge_run.cli import main
main(["--version"])
"""


def test_ctrl_c_while_the_program_is_imported_shows_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED_EARLY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
