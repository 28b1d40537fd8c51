"""The examples in README.md and docs/ run as they stand, with the bundled model as `model.gguf`.

What speaks to a server finds one of the bundled model, on a port of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from known_device import know_device
from program import WAIT_S, Result, fresh_environment, run_program, run_source
from served import TEMPLATE, Served, served
from vision_models import make_bundle, make_images

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_TOKENS = 48
SERVER = "http://localhost:8080"
TYPED = "Once upon a time\n"
_OURS = re.compile(r"""(?:echo "(?P<text>[^"]*)" \| )?edge-run (?P<words>[^|&;<>$`*?(#]*)(?:#.*)?""")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    """Return the fenced blocks of `language` on all pages, as test parameters."""
    return [
        pytest.param(match[2], id=f"{page.stem}-{number}")
        for page in PAGES
        for number, match in enumerate(_FENCE.finditer(page.read_text(encoding="utf-8")))
        if match[1] == language
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for all examples, in which the speeds of this device are known."""
    folder = tmp_path_factory.mktemp("cache")
    know_device(folder / "edge-run", KIT, folder)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split of a network, which the examples only read."""
    return make_bundle(tmp_path_factory.mktemp("split")).parent


@pytest.fixture
def folder(tmp_path: Path, cache: Path, bundle: Path) -> Path:
    """A home folder with what the examples name: the bundled model, a split of a network, and an image."""
    (tmp_path / "model.gguf").symlink_to(KIT)
    (tmp_path / "prompt.txt").write_text("Once upon a time there was a fox. " * 40, encoding="utf-8")
    (tmp_path / ".cache").symlink_to(cache)
    (tmp_path / "split").symlink_to(bundle)
    (tmp_path / "frame.jpg").symlink_to(make_images(tmp_path / "images", per_class=1) / "class0" / "000.jpg")
    return tmp_path


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The server that examples speak to."""
    with served(KIT, "-t", 1, "--chat-template", TEMPLATE, "-n", 2 * MOST_TOKENS) as server:  # JSON ends in time
        yield server


def on_its_port(source: str, request: pytest.FixtureRequest) -> str:
    """Return an example that speaks to the server where it listens here; others do without a server."""
    if SERVER not in source:
        return source
    server: Served = request.getfixturevalue("server")
    return source.replace(SERVER, server.url)


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """The environment of somebody who never configured anything, with this Python's programs first.

    Only the length of an answer is set, for examples that do not say it: the bundled model would fill its context.
    """
    return fresh_environment(
        folder,
        EDGE_RUN_PREDICT=str(MOST_TOKENS),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        OMP_WAIT_POLICY="passive",
    )


def run_line(line: str, folder: Path, environment: dict[str, str]) -> Result:
    """Run a line as a shell does; a command of ours, alone or after an `echo`, without a shell and begun already."""
    ours = _OURS.fullmatch(line)
    if ours is None:
        return subprocess.run(
            ["sh", "-c", line], input=TYPED, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=WAIT_S, check=False,
        )  # fmt: skip
    text = TYPED if ours["text"] is None else f"{ours['text']}\n"
    return run_program(*shlex.split(ours["words"]), environment=environment, folder=folder, text=text)


@pytest.mark.parametrize("source", blocks("python"))
def test_python_example(source: str, folder: Path, environment: dict[str, str], request: pytest.FixtureRequest) -> None:
    done = run_source(on_its_port(source, request), environment=environment, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("source", blocks("console"))
def test_console_example(
    source: str, folder: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    lines = [line[2:] for line in source.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        if line.startswith("make "):
            continue  # which sets up what this test runs in
        wanted = re.search(r"exit code (\d+)", line)
        done = run_line(on_its_port(line, request), folder, environment)
        code = int(wanted[1]) if wanted else 0
        if "edge-run doctor" in line:  # it finds what there is, and its code says whether that is a problem
            found = re.findall(r"^(\d+) problems?, \d+ notes?$", done.stdout, re.MULTILINE)
            assert len(found) == 1, done.stdout
            code = int(found[0] != "0")
        assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
        assert (done.stderr if wanted or "inflate" in line else done.stdout).strip(), line
