"""The folder of a training: its room is there before it, and what was learned is kept where it cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_run.base.errors import TierReadError
from edge_run.base.units import MIB
from edge_run.runtime.split.bundle import CODE_FILE, HEAD_FILE, digest
from edge_run.runtime.split.result_folder import room_for_result

SIZES = {HEAD_FILE: 2 * MIB, CODE_FILE: MIB}
FULL_DISK = """
import contextlib, pathlib, sys
from edge_run.base.errors import TierReadError
from edge_run.runtime.split.result_folder import room_for_result
folder, is_taken, sizes = pathlib.Path(sys.argv[1]), sys.argv[2] == "True", {"head.onnx": 2 << 20, "code.json": 1 << 20}
files = {"head.onnx": bytes(2 << 20), "code.json": b"{}"}
with room_for_result(folder / "out", sizes, 0o600) as room:
    try:
        with (folder / "another's").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:
        pass
    if is_taken:
        (folder / "out" / "another's folder").mkdir(parents=True)
    with contextlib.suppress(TierReadError) if is_taken else contextlib.nullcontext():
        room.write(files)
(place,) = (folder / "edge-run").iterdir() if is_taken else [folder / "out"]
assert {path.name: path.read_bytes() for path in place.iterdir()} == files
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edge-run"


def fail(out: Path, content: bytes, why: str) -> None:
    """Write to a folder that another one has taken meanwhile, and see that this is said."""
    with room_for_result(out, SIZES, 0o600) as room:
        out.mkdir(exist_ok=True)
        (out / "another's").touch()
        with pytest.raises(TierReadError, match=why):
            room.write({HEAD_FILE: content})


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    files = {HEAD_FILE: b"head", CODE_FILE: b"{}"}
    with room_for_result(tmp_path / "new" / "out", SIZES, 0o600) as room:
        room.write(files)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "out").iterdir()} == files
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "new" / "out").iterdir())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_training_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    with room_for_result(tmp_path / "out", SIZES, 0o600):
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_disk_that_is_full_at_the_end_has_room(is_taken: bool, tmp_path: Path) -> None:
    """Also for the cache, which is on the same disk here, where another one has taken the folder meanwhile."""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m none "$1" && shift && exec "$@"', "sh"]
    try:
        can_mount = subprocess.run([*mount, str(tmp_path), "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        can_mount = False
    if not can_mount:
        pytest.skip("needs a mount: root, and `unshare`")
    done = subprocess.run(
        [*mount, str(tmp_path), sys.executable, "-c", FULL_DISK, str(tmp_path), str(is_taken)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


def test_the_cause_is_said_also_where_an_earlier_training_is_in_the_cache(tmp_path: Path, cache: Path) -> None:
    content = b"the same"
    first = cache / f"split-{digest(content)[:12]}"
    for kept in (first, first.with_name(f"{first.name}-2"), first.with_name(f"{first.name}-3")):
        why = rf"out: cannot be written \(Directory not empty\); what was learned is in {kept}: move it$"
        (tmp_path / "out" / "another's").unlink(missing_ok=True)
        fail(tmp_path / "out", content, why)
        assert (kept / HEAD_FILE).read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out"], "no draft is left"


@pytest.mark.parametrize("cause", ["no cache", "no home"])
def test_at_the_last_the_folder_for_temporary_files_keeps_it(
    cause: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if cause == "no cache":
        cache.parent.touch()
        told = r"; elsewhere neither \(Not a directory\)|; elsewhere neither \(File exists\)"
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        told = ""
    kept = tmp_path / f"edge-run-split-{digest(b'it')[:12]}"
    fail(tmp_path / "out", b"it", rf"Directory not empty\)({told}); what was learned is in {kept}: move it soon, ")
    assert (kept / HEAD_FILE).read_bytes() == b"it"


def test_where_nothing_can_be_written_that_is_said(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    (tmp_path / "nowhere").touch()
    fail(tmp_path / "out", b"it", "what was learned is lost: make room, and train again")
