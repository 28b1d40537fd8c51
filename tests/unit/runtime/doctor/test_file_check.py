"""What the doctor makes of files: the cache folder, a model, and what it is read from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_run.base.units import GIB, MIB
from edge_run.devices.host.findings import NOTE, OK, PROBLEM
from edge_run.devices.host.mount import Mount
from edge_run.runtime.doctor import file_check
from edge_run.runtime.doctor.file_check import left_over_drafts
from findings import state


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "cache"
    (found,) = file_check.check_cache_folder(folder)
    assert state(found) == OK
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(file_check, "LEAST_FREE_BYTES", 1 << 60)
    (found,) = file_check.check_cache_folder(folder)
    assert (state(found), "--cache-dir" in found.advice) == (NOTE, True)
    monkeypatch.undo()
    monkeypatch.setattr(file_check, "find_mount", lambda path: Mount("tmpfs", "tmpfs", "", ""))
    (found,) = file_check.check_cache_folder(folder)
    assert (state(found), "in memory" in found.finding) == (NOTE, True)
    (tmp_path / "file").touch()
    (found,) = file_check.check_cache_folder(tmp_path / "file" / "cache")
    assert (state(found), "Not a directory" in found.finding) == (PROBLEM, True)


def test_what_a_demo_left_behind(tmp_path: Path) -> None:
    (tmp_path / "demo-abc").mkdir()
    (tmp_path / "demo-abc" / "demo.gguf").write_bytes(bytes(2 * MIB))
    _, demo = file_check.check_cache_folder(tmp_path)
    assert state(demo) == NOTE
    assert (demo.finding.startswith(f"{tmp_path}/demo-abc: 2 MiB"), demo.advice) == (True, f"rm -r {tmp_path}/demo-abc")


def test_what_a_killed_program_left_beside_a_model_is_named_with_a_command_that_removes_just_that(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    left = folder / ".model.gguf.packed.2147483646-0123abcd-01234567.part"
    for path in (folder / "model.gguf", folder / ".model.part", left):
        path.touch()
        os.utime(path, (0, 0))
    (found,) = left_over_drafts(folder / "model.gguf")
    assert shlex.split(found.advice) == ["rm", "-r", str(left)]


def test_a_file_with_holes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"x" * MIB)
        file.seek(4 * MIB)
        file.write(b"x" * MIB)
        file.truncate(8 * MIB)
    (found,) = file_check.check_holes(path, 4096)
    assert state(found) == PROBLEM
    assert f"6 MiB of it were never written, the first at byte {MIB}" in found.finding
    path.write_bytes(b"x" * MIB)
    assert file_check.check_holes(path, 4096) == []


@pytest.mark.parametrize(
    ("file_system", "words"), [("nfs4", "over a network"), ("tmpfs", "takes memory"), ("ext4", "read directly")]
)
def test_what_the_model_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, words: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(file_check, "find_mount", lambda path: Mount("/dev/sda1", file_system, "", ""))
    monkeypatch.setattr(file_check, "_reads_directly", lambda path: True)
    (found,) = file_check.check_drive(path, tmp_path)
    assert words in found.finding
    monkeypatch.setattr(file_check, "_reads_directly", lambda path: False)
    (found,) = file_check.check_drive(path, tmp_path)
    assert state(found) == NOTE


@pytest.mark.parametrize("place", ["devices/pci/sda", "devices/pci/sda/sda1"])
@pytest.mark.parametrize("said", ["0", "1"])
def test_rotating_drives_and_their_partitions(
    tmp_path: Path, write: Callable[..., Path], place: str, said: str
) -> None:
    write("sys/devices/pci/sda/queue/rotational", f"{said}\n")
    (tmp_path / "sys" / place).mkdir(exist_ok=True)
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/8:1").symlink_to(tmp_path / "sys" / place)
    assert file_check.is_rotational(os.makedev(8, 1), tmp_path) is (said == "1")
    assert not file_check.is_rotational(os.makedev(0, 44), tmp_path)


def test_size_against_the_budget() -> None:
    alone = "its weights alone take {} of the budget of 2.00 GiB: {}"
    small, large = file_check.check_size(GIB, 2 * GIB), file_check.check_size(2 * GIB, 2 * GIB)
    assert small.finding == alone.format("1.00 GiB", "`edge-run plan` says whether all of it fits")
    assert large.finding == alone.format("2.00 GiB", "it will be streamed")
