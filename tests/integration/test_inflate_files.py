"""The file of a grown model: it is written as a whole, in little memory, or nothing of it is left."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_run.base.errors import ConfigError, ModelFileError, TierReadError
from edge_run.base.process_ids import process_scope
from edge_run.runtime.tools.inflate import inflate
from kit_models import KIT


def test_the_bytes_are_on_the_drive_before_the_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, synced = tmp_path / "big.gguf", list[tuple[bool, int]]()

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((target.exists(), 0 if stat.S_ISDIR(status.st_mode) else status.st_size))

    monkeypatch.setattr(os, "fsync", sync)
    inflate(KIT, target, 12_000_000)
    assert synced == [(False, target.stat().st_size), (True, 0)]


def test_memory_stays_small_and_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tracemalloc.start()
    big = inflate(KIT, tmp_path / "big.gguf", 200_000_000, progress=lambda done, total: told.append((done, total)))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 << 20
    assert {total for _, total in told} == {big.stat().st_size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] >= big.stat().st_size - 32


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_failure_leaves_the_old_file_alone(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "big.gguf"
    target.write_bytes(b"old")

    def fail(done_bytes: int, _total_bytes: int) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        if done_bytes > 10_000_000:
            raise error

    with pytest.raises((TierReadError, KeyboardInterrupt), match=r"No space left|^$"):
        inflate(KIT, target, 20_000_000, progress=fail, is_overwritten=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("how", ["replace", "write"])
def test_a_source_that_changes_while_it_is_grown_is_refused(tmp_path: Path, how: str) -> None:
    """Else the result would have weights of two files, and nobody would be told."""
    source, target, other = tmp_path / "kit.gguf", tmp_path / "big.gguf", tmp_path / "other.gguf"
    for path in (source, other):
        shutil.copyfile(KIT, path)

    def change(_done_bytes: int, _total_bytes: int) -> None:
        if how == "write":
            os.utime(source, ns=(0, 0))
        elif other.exists():
            other.replace(source)

    with pytest.raises(ModelFileError, match="changed while it was in use"):
        inflate(source, target, 20_000_000, progress=change)
    assert not target.exists()


def test_full_disk_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 << 20))
    with pytest.raises(TierReadError, match="19 MiB are needed, the disk has 10 MiB free") as caught:
        inflate(KIT, tmp_path / "big.gguf", 20_000_000)
    assert caught.value.found_bytes == 10 << 20
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".big.gguf.{os.getpid()}-{process_scope()}-01234567.part"
    left.touch()
    os.utime(left, (0, 0))
    inflate(KIT, tmp_path / "big.gguf", 20_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["big.gguf"]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    target, link = tmp_path / "drive" / "big.gguf", tmp_path / "big.gguf"
    link.symlink_to(target)
    assert inflate(KIT, link, KIT.stat().st_size) == target
    assert link.is_symlink()
    assert target.is_file()


def test_a_file_that_is_there_is_kept_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    target, link = tmp_path / "big.gguf", tmp_path / "link.gguf"
    target.write_bytes(b"mine")
    link.symlink_to(target)
    for path in (target, link):
        with pytest.raises(ConfigError, match="exists; choose another name"):
            inflate(KIT, path, KIT.stat().st_size)
    assert target.read_bytes() == b"mine"
    assert inflate(KIT, link, KIT.stat().st_size, is_overwritten=True) == target
    assert link.is_symlink()
    assert target.read_bytes() == KIT.read_bytes()
    with pytest.raises(ConfigError, match="is the model to grow itself"):
        inflate(target, link, 20_000_000, is_overwritten=True)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("missing/big.gguf", "its folder is not there"),
        (".", "is there, and is no file"),
        ("small.gguf", "is the model to grow itself"),
        ("pipe", "is there, and is no file"),
    ],
)
def test_impossible_targets_are_refused(tmp_path: Path, target: str, why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    small = Path(shutil.copy(KIT, tmp_path / "small.gguf"))
    with pytest.raises(ConfigError, match=why):
        inflate(small, tmp_path / target, 20_000_000)
    assert small.read_bytes() == KIT.read_bytes()
    assert (tmp_path / "pipe").is_fifo()


INTERRUPTED_IMPORT = """
import os, signal, sys

class Presser:
    def find_spec(self, name, path, target=None):
        if name == "numpy.random._pickle":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Presser())
from edge_run.cli import main
main(sys.argv[1:])
"""


def test_ctrl_c_while_numpy_is_imported_is_not_lost(tmp_path: Path) -> None:
    """Its compiled modules may swallow what is raised meanwhile."""
    words = [sys.executable, "-c", INTERRUPTED_IMPORT, "inflate", KIT, tmp_path / "grown.gguf", "--size", "20MiB"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert list(tmp_path.iterdir()) == []
