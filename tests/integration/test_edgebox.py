"""The box that benchmarks run in (`benchmarks/edgebox.py`): it limits what it says, counts it, and leaves nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_run.base.units import MIB
from waiting import until

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "edgebox.py"
READ_ALL = (
    "import sys; file = open(sys.argv[1], 'rb', 0); buffer = bytearray(1 << 20)\nwhile file.readinto(buffer): pass"
)

InBox = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def edgebox() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("edgebox", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["edgebox"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_box(edgebox: ModuleType) -> InBox:
    """Runs a Python program in a box; skips, with the reason, where none can be made."""

    def run(
        flags: list[str], program: str, *arguments: object, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *flags, "--", sys.executable, "-c", program, *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode == edgebox.NO_BOX:
            pytest.skip(done.stderr.strip())
        return done

    return run


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A file of 48 MiB, which the kernel has in its cache."""
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(48 * MIB))
    return path


def figures_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what the box counted."""
    figures: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return figures


@pytest.mark.root
def test_memory_beyond_the_limit_ends_the_command(in_box: InBox) -> None:
    done = in_box(["--memory", "60M"], "bytearray(200 << 20)")
    assert done.returncode == 128 + signal.SIGKILL
    figures = figures_of(done)
    assert figures["oom_kills"] >= 1
    assert figures["exit"] == -signal.SIGKILL
    assert figures["limit_bytes"] == 60 * MIB
    assert 50 * MIB < figures["peak_bytes"] <= 60 * MIB


@pytest.mark.root
@pytest.mark.alone
def test_a_file_that_was_cached_is_read_again_and_charged(in_box: InBox, blob: Path) -> None:
    done = in_box(["--memory", "40M", "--cold", str(blob)], READ_ALL, blob)
    assert done.returncode == 0, done.stderr
    figures = figures_of(done)
    assert figures["read_bytes"] >= 48 * MIB
    assert 30 * MIB < figures["peak_bytes"] <= 40 * MIB, "the page cache is charged, and limited"
    assert figures["oom_kills"] == 0


@pytest.mark.root
@pytest.mark.alone
def test_reads_are_as_slow_as_is_asked(in_box: InBox, blob: Path) -> None:
    done = in_box(["--disk-mbps", "40", "--cold", str(blob)], READ_ALL, blob)
    assert 48 * MIB / 40e6 * 0.9 < figures_of(done)["wall_s"] < 10


@pytest.mark.root
def test_cores(in_box: InBox) -> None:
    last = max(os.sched_getaffinity(0))
    done = in_box(["--cores", str(last)], "import os; print(os.sched_getaffinity(0))")
    assert done.stdout.strip() == f"{{{last}}}"


@pytest.mark.root
def test_what_the_command_leaves_behind_ends_with_the_box(in_box: InBox, edgebox: ModuleType) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid)"
    left = int(in_box([], program).stdout)

    def has_ended() -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{left}/stat").read_text().rpartition(") ")[2].startswith("Z")
        return True

    def are_of_running_boxes() -> bool:  # those of other tests, which come and go meanwhile
        groups = (Path(folder).name for folder, _, _ in os.walk(edgebox.GROUPS))
        boxes = [name.removeprefix("edgebox-") for name in groups if name.startswith("edgebox-")]
        return all(Path("/proc", box).exists() for box in boxes)

    until(has_ended, 50)
    until(are_of_running_boxes, 50, lambda: "groups of boxes that have ended")


def test_boxes_at_once_share_the_read_ahead_and_the_last_restores_it(edgebox: ModuleType, tmp_path: Path) -> None:
    setting, state = tmp_path / "read_ahead_kb", tmp_path / "state"
    setting.write_text("8192")
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(edgebox.shared_setting(setting, state, 128))
        second.enter_context(edgebox.shared_setting(setting, state, 128))
        first.close()
        assert setting.read_text() == "128", "the other box still runs"
        with edgebox.shared_setting(setting, state, 128):
            second.close()
            assert setting.read_text() == "128"
        assert setting.read_text() == "8192"


def test_the_read_ahead_that_a_killed_box_left_is_not_taken_for_the_usual_one(
    edgebox: ModuleType, tmp_path: Path
) -> None:
    setting, state = tmp_path / "read_ahead_kb", tmp_path / "state"
    setting.write_text("128")
    state.write_text("8192")  # what the killed one had found
    with edgebox.shared_setting(setting, state, 256):
        assert setting.read_text() == "256"
    assert setting.read_text() == "8192"


@pytest.mark.root
def test_the_read_ahead_of_the_disk_is_set(in_box: InBox, edgebox: ModuleType, tmp_path: Path) -> None:
    program = "import sys; print(open(sys.argv[1]).read())"
    in_box([], "")  # skips where there is no box
    if (disk := edgebox.disk_of(tmp_path)) is None:
        pytest.skip("no block device holds the test's folder")
    setting = Path(f"/sys/dev/block/{disk}").resolve() / "queue" / "read_ahead_kb"
    usual = int(setting.read_text())  # set to the same, so that no box beside this test is disturbed
    done = in_box([f"--readahead-kb={usual}"], program, setting, folder=tmp_path)
    assert int(done.stdout) == usual


@pytest.mark.root
def test_a_command_that_is_not_there(in_box: InBox) -> None:
    in_box([], "")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--", "no-such-command"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 125
    assert "no-such-command" in done.stderr


def test_without_root_the_reason_is_said(
    edgebox: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert edgebox.main(["--memory", "1G", "--", "true"]) == edgebox.NO_BOX
    assert capsys.readouterr().err == "edgebox: a box takes root, as control groups and the disk's settings do\n"


def test_groups_of_version_2(edgebox: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written to the kernel's files, and read from them, in a folder that looks like them."""
    monkeypatch.setattr(edgebox, "GROUPS", tmp_path)
    made = edgebox.GroupsV2("edgebox-1")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +io"
    made.group.mkdir()
    (made.group / "memory.swap.max").touch()
    made.limit(edgebox.Limits(1 << 30, 500_000_000, ("8:0",), 0.5))
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert {path.name: path.read_text() for path in made.group.iterdir()} == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "io.max": "8:0 rbps=500000000",
        "cpu.max": "5000 10000",
    }
    nothing = {"peak_bytes": None, "oom_kills": 0, "limit_hits": 0, "read_bytes": 0}
    assert made.figures() == nothing, "an older kernel, nothing read yet"
    (made.group / "memory.peak").write_text("1073700000\n")
    (made.group / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n")
    (made.group / "io.stat").write_text("8:0 rbytes=1000 wbytes=5 rios=3 wios=1\n8:16 rbytes=24 wbytes=0\n")
    assert made.figures() == {"peak_bytes": 1_073_700_000, "oom_kills": 1, "limit_hits": 7, "read_bytes": 1024}


def test_boxed_says_only_what_is_given(edgebox: ModuleType) -> None:
    command = edgebox.boxed(["true"], memory="1G", disk_mbps=500)
    assert command[2:] == ["--memory=1G", "--disk-mbps=500", "--", "true"]
