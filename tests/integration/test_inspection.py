"""The process that opens a model file first, and what is remembered of its findings."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import edge_run
from edge_run import KernelError, Model, ModelFileError
from edge_run.base.units import MIB
from edge_run.runtime.inspection import cache as inspection_cache
from edge_run.runtime.inspection import launcher
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.tiers._libc import PAGE
from mutations import Entry, deadly, parse
from program import WAIT_S, Program, begin
from tiny_models import make_model
from waiting import until

OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# What is known of a file


def open_and_close(path: Path, cache: Path) -> None:
    Model(path, **OPTIONS, cache_folder=cache).close()


def test_what_is_known_and_broken_is_found_out_again(llama: Path, cache: Path) -> None:
    open_and_close(llama, cache)
    (known,) = cache.glob("inspected/*")
    sound = known.read_bytes()
    flipped = sound[:100] + bytes(byte ^ 255 for byte in sound[100:104]) + sound[104:]
    for broken in (b"", sound[:-9], b"\x1f\x8b" + b"x" * 100, b"{}", flipped):
        known.write_bytes(broken)
        open_and_close(llama, cache)
        assert known.stat().st_size == pytest.approx(len(sound), rel=0.05)


def test_a_plan_asks_for_less_than_an_opening(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vocabulary is loaded and nothing computed for a plan; what an opening found out serves later plans."""

    def found() -> Inspection:
        (known,) = cache.glob("inspected/*")
        return Inspection.from_json(gzip.decompress(known.read_bytes()).decode())

    edge_run.plan(llama, **OPTIONS, cache_folder=cache)
    looked_at = found()
    open_and_close(llama, cache)
    tried = found()
    assert (looked_at.is_tried, tried.is_tried) == (False, True)
    learnt = {"is_tried", "load_s", "program_bytes", "narrow_bytes"}
    same = {field.name for field in dataclasses.fields(Inspection)} - learnt
    assert {name: getattr(looked_at, name) for name in same} == {name: getattr(tried, name) for name in same}
    # The buffer begins anywhere in a page, so that each of its parts may touch a page more or less.
    assert abs(looked_at.narrow_bytes - tried.narrow_bytes) <= 8 * PAGE
    assert abs(looked_at.program_bytes - tried.program_bytes) < 24 * MIB
    monkeypatch.setattr(inspection_cache, "ask_child", None)
    edge_run.plan(llama, **OPTIONS, cache_folder=cache)


def test_a_file_in_anothers_place_is_noticed(llama: Path, tmp_path: Path, cache: Path) -> None:
    """Even one of the same size and date, and alike for the first 64 KiB."""
    path = tmp_path / "model.gguf"
    parts = parse(llama.read_bytes())
    parts.entries.insert(0, Entry("test.padding", 8, b"x" * (1 << 17)))
    path.write_bytes(parts.write())
    status = path.stat()
    open_and_close(path, cache)
    deadly(path, tmp_path / "other.gguf")
    os.utime(tmp_path / "other.gguf", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(tmp_path / "other.gguf", path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    with pytest.raises(ModelFileError, match="ended over it"):
        open_and_close(path, cache)


def test_a_folder_that_cannot_keep_what_is_known(llama: Path, cache: Path) -> None:
    cache.mkdir()
    (cache / "inspected").write_text("a file")
    open_and_close(llama, cache)
    assert {path.name for path in cache.iterdir()} == {"inspected"}
    open_and_close(llama, cache / "inspected")


def test_processes_that_find_out_the_same_at_once(llama: Path, cache: Path) -> None:
    script = "import sys; from edge_run import Model; Model(sys.argv[1], cache_folder=sys.argv[2]).close()"
    program = Program(["-c", str(llama), str(cache)], source=script)
    processes = [begin(program, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    endings = [(process.communicate(timeout=WAIT_S)[1], process.returncode) for process in processes]
    assert endings == [("", 0)] * 3
    assert len(list(cache.glob("inspected/*"))) == 1
    assert {path.name for path in cache.iterdir()} == {"inspected", "micro-batch"}


# The process that opens a file first


@pytest.mark.parametrize(
    ("start", "is_opened", "message"),
    [
        ("import nothing_of_that_name", True, "does not start: ModuleNotFoundError: No module named"),
        ("import os; os.kill(os.getpid(), 9)", False, "ended from outside.*free some"),
    ],
)
def test_a_child_that_does_not_start(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog, start: str, is_opened: bool, message: str
) -> None:
    """The file is opened all the same where the child's end says nothing about it."""
    monkeypatch.setattr(launcher, "_START", start)
    if is_opened:
        open_and_close(llama, cache)
        assert re.search(message, caplog.text)
    else:
        with pytest.raises(KernelError, match=message):
            open_and_close(llama, cache)


@pytest.mark.parametrize("executable", ["", "/usr/bin/blender", "/nowhere/python3"])
def test_a_program_that_is_not_python(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    open_and_close(llama, cache)
    assert "it is opened all the same" in caplog.text


HANGS = """
    import sys
    from edge_run import Model
    from edge_run.runtime.inspection import launcher as inspector_call
    inspector_call._START = '''import sys; sys.path[:] = sys.argv[1:]
    import os, time
    from pathlib import Path
    from edge_run.runtime.inspection import inspector
    from edge_run.tiers.gguf import read_gguf
    from edge_run.tiers.stub import Stubs

    def hang(path, config, is_tried):
        with Stubs(read_gguf(path).shards):
            Path(os.environ["CHILD"]).write_text(str(os.getpid()))
            time.sleep(100)

    inspector.inspect_here = hang
    from edge_run.runtime.inspection.child import main; main()'''
"""
OPENS = "Model(sys.argv[1], cache_folder=sys.argv[2])"
RUNS = "from edge_run.cli import main; main([sys.argv[1], '--cache-dir', sys.argv[2], '-p', 'x'])"


def start(how: str, llama: Path, cache: Path) -> tuple[subprocess.Popen[str], Path]:
    """Return a process whose child hangs in opening a file, and the child's folder in /proc."""
    words, place = [sys.executable, "-c", textwrap.dedent(HANGS) + how, str(llama), str(cache)], cache.parent / "child"
    environment = {**os.environ, "CHILD": str(place)}
    parent = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: place.exists() and place.read_text() != "", 110.0)
    return parent, Path("/proc", place.read_text())


@pytest.mark.parametrize("how", [OPENS, RUNS], ids=["library", "command line"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_its_parent_and_leaves_nothing(
    llama: Path, cache: Path, number: signal.Signals, how: str
) -> None:
    parent, child = start(how, llama, cache)
    if how == RUNS and number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as a terminal does
    else:
        parent.send_signal(number)
    _, notices = parent.communicate(timeout=WAIT_S)
    if how == RUNS:
        assert (parent.returncode, notices) == ({2: 130, 15: 143, 9: -9}[number], "")
    until(lambda: not child.exists(), 60)
    assert not cache.exists()
