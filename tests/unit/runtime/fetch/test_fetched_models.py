"""Room for fetched layers: what was allowed is kept to, what is used is left alone, the longest unused goes first."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import MeshError, TierReadError
from edge_run.devices.host.locks import locked
from edge_run.runtime.fetch import store as module
from edge_run.runtime.fetch.store import FetchedModel, FetchedModels
from edge_run.tiers.pieces import PIECE_BYTES, model_hash, piece_digest

COUNT = 8
SIZES = (COUNT * PIECE_BYTES,)


def digests(seed: int) -> bytes:
    return b"".join(piece_digest(bytes([seed, piece])) for piece in range(COUNT))


def open_model(models: FetchedModels, seed: int) -> FetchedModel:
    return models.open(model_hash(SIZES, digests(seed)), SIZES, digests(seed))


def fill(fetched: FetchedModel, pieces: range) -> None:
    for piece in pieces:
        fetched.partial.write(piece, os.urandom(PIECE_BYTES))
    fetched.partial.sync()


def held(fetched: FetchedModel) -> int:
    return COUNT - len(fetched.partial.missing(range(COUNT)))


def test_the_longest_unused_goes_first_and_what_is_used_stays(tmp_path: Path) -> None:
    models = FetchedModels(tmp_path, int(20.5 * PIECE_BYTES))
    for seed in (1, 2, 3):
        fetched = open_model(models, seed)
        fill(fetched, range(6))
        fetched.close()
        os.utime(fetched.partial.folder / "journal", (seed, seed))
    used = open_model(models, 1)
    fresh = open_model(models, 4)
    models.make_room(fresh, range(COUNT))
    assert used.partial.folder.exists()
    assert held(used) == 6
    assert not open_gone(tmp_path, 2)
    assert open_gone(tmp_path, 3)
    fill(fresh, range(COUNT))
    fresh.close()
    used.close()
    again = open_model(models, 3)
    assert held(again) == 6
    again.close()


def open_gone(folder: Path, seed: int) -> bool:
    return (folder / model_hash(SIZES, digests(seed))).exists()


def test_pieces_that_are_not_needed_now_are_given_up_before_it_is_refused(tmp_path: Path) -> None:
    models = FetchedModels(tmp_path, int(6.5 * PIECE_BYTES))
    fetched = open_model(models, 1)
    fill(fetched, range(5))
    models.make_room(fetched, range(3, 8))
    assert fetched.partial.missing(range(5)) == [0, 1, 2]
    fill(fetched, range(5, 8))
    with pytest.raises(TierReadError, match=r"--fetch 2 MiB: too small for 2 MiB"):
        models.make_room(fetched, range(COUNT))
    fetched.close()


def test_pieces_that_were_written_and_not_synced_before_a_kill_take_no_room_twice(tmp_path: Path) -> None:
    models = FetchedModels(tmp_path, int(6.5 * PIECE_BYTES))
    killed = open_model(models, 1)
    fill(killed, range(2))
    for piece in range(2, 6):
        killed.partial.write(piece, os.urandom(PIECE_BYTES))
    killed.close()
    with closing(open_model(models, 1)) as again:
        models.make_room(again, range(6))
        assert held(again) == 2
        fill(again, range(2, 6))


def test_a_model_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    models = FetchedModels(tmp_path, 1 << 30)
    fetched = open_model(models, 1)
    with pytest.raises(MeshError, match="another process"):
        open_model(models, 1)
    fetched.close()
    open_model(models, 1).close()


def test_who_makes_room_meanwhile_does_not_remove_what_is_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = FetchedModels(tmp_path, int(6.5 * PIECE_BYTES))
    old = open_model(models, 1)
    fill(old, range(5))
    old.close()
    fresh = open_model(models, 2)

    def after_another(path: Path) -> AbstractContextManager[None]:
        """Take the lock once another process, which had it before, has let it go."""
        monkeypatch.undo()
        models.make_room(fresh, range(6))
        return locked(path)

    monkeypatch.setattr(module, "locked", after_another)
    with closing(open_model(models, 1)) as again:
        assert held(again) == 0, "the pieces were removed"
    fresh.close()


def test_digests_are_kept_and_checked(tmp_path: Path) -> None:
    models = FetchedModels(tmp_path, 1 << 30)
    model = model_hash(SIZES, digests(1))
    assert models.known_digests(model, SIZES) is None
    open_model(models, 1).close()
    assert models.known_digests(model, SIZES) == digests(1)
    (tmp_path / model / "digests").write_bytes(digests(2))
    assert models.known_digests(model, SIZES) is None
    assert models.known_digests(model, (SIZES[0] + 1,)) is None


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEFT_FREE_BYTES", 1 << 60)  # more than any disk has
    models = FetchedModels(tmp_path, 1 << 30)
    fetched = open_model(models, 1)
    with pytest.raises(TierReadError, match="its disk has room for 0 B, 512 KiB are to be fetched"):
        models.make_room(fetched, range(2))
    fetched.close()


def test_folders_that_go_or_cannot_be_read_meanwhile_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that another worker removes, which makes room at the same time."""
    models = FetchedModels(tmp_path, 1 << 30)
    fetched = open_model(models, 1)
    gone, scandir = tmp_path / "gone", os.scandir
    gone.mkdir()

    def refuse(path: Any = ".") -> Any:
        if Path(path) == gone:
            raise FileNotFoundError(2, "No such file or directory", str(gone))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    models.make_room(fetched, range(COUNT))
    fetched.close()


def test_a_folder_without_locks_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that write to one model would read what the other has given up."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(MeshError, match=r"No locks available\); name one .* with cache_folder="):
        open_model(FetchedModels(tmp_path, 1 << 30), 1)


def test_nothing_stays_open_of_a_model_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the drive becomes read-only at that moment."""
    models, n_open = FetchedModels(tmp_path, 1 << 30), len(os.listdir("/proc/self/fd"))

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refuse)
        with pytest.raises(MeshError, match=r"cannot keep fetched weights there \(Read-only file system\)"):
            open_model(models, 1)
    assert len(os.listdir("/proc/self/fd")) == n_open
    open_model(models, 1).close()


def test_on_a_full_disk_the_longest_unused_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may have less room than was allowed."""
    models = FetchedModels(tmp_path, 1 << 30)
    old = open_model(models, 1)
    fill(old, range(6))
    old.close()
    fresh = open_model(models, 2)

    def disk_usage(folder: object) -> SimpleNamespace:
        n_free = 2 if old.partial.folder.exists() else COUNT
        return SimpleNamespace(free=module.LEFT_FREE_BYTES + n_free * PIECE_BYTES)

    monkeypatch.setattr(module.shutil, "disk_usage", disk_usage)
    models.make_room(fresh, range(COUNT))
    assert not old.partial.folder.exists()
    fresh.close()
