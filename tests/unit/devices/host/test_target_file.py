"""What a tool writes: a failing disk is told as that, a failing model as that, and nobody reads more than before."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from edge_run.base.errors import ConfigError, ModelFileMissing, TierReadError
from edge_run.devices.host.target_file import opened, written


def write(target: Path, source: Path) -> None:
    with written(target, 3, "3 B", source) as file:
        assert file.write(b"one") == 3
        assert file.tell() == 3


def test_nobody_reads_what_was_made_of_a_private_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.touch()
    modes = ((0o600, None, 0o600), (0o400, None, 0o600), (0o644, 0o600, 0o600), (0o644, 0o666, 0o644))
    for mode, before, wanted in modes:
        source.chmod(mode)
        target.unlink(missing_ok=True)
        if before is not None:
            target.touch()
            target.chmod(before)
        write(target, source)
        assert target.stat().st_mode & 0o777 == wanted


def test_a_target_that_appears_meanwhile_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.touch()
    for is_replacing, wanted in ((False, b"mine"), (True, b"one")):
        error = nullcontext() if is_replacing else pytest.raises(ConfigError, match="target: exists; choose another")
        with error, written(target, 3, "3 B", source, is_replacing=is_replacing) as file:
            file.write(b"one")
            target.write_bytes(b"mine")
        assert target.read_bytes() == wanted
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_that_cannot_be_read_is_no_disk_that_cannot_be_written(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.touch()
    with (
        pytest.raises(ModelFileMissing, match=r"gone: cannot be opened \(No such file or directory\)"),
        written(target, 3, "3 B", source),
        opened(tmp_path / "gone"),
    ):
        pass
    with pytest.raises(IsADirectoryError, match=str(tmp_path)), written(target, 3, "3 B", source):
        tmp_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.touch()
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: real(Path("/dev/full"), mode, buffering=0))
    with pytest.raises(TierReadError, match=r"target: writing 3 B failed: No space left on device"):
        write(target, source)
    monkeypatch.undo()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TierReadError, match=r"target: writing 3 B failed: Input/output error"):
        write(target, source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
