"""The folder of a prompt cache: damaged, full, read-only, shared, or being removed by others."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import TierReadError
from edge_run.base.process_ids import process_scope
from edge_run.runtime.keeping import opening
from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.runtime.keeping.keeper import PromptKeeper
from edge_run.runtime.keeping.opening import open_keeper
from edge_run.runtime.keeping.store import ABOUT, LEFT_FREE_BYTES, PromptStore, erase, kept_bytes
from edge_run.runtime.keeping.writer import BlockWriter
from edge_run.tiers.kv.block_file import RowsVoid
from edge_run.tiers.kv.layout import KvLayout
from edge_run.tiers.kv.saving import SavingBlocks

DAY_S = 86400.0


def store_of(folder: Path, key: int = 0, library: str = "b1", file: str = "f") -> PromptStore:
    return PromptStore(
        folder, KeptIdentity(bytes([key] * 16), {"library": library, "path": "m", "file": file}), 1 << 20
    )


def keep(store: PromptStore, age_s: float = 0) -> Path:
    """A file of rows that was used so long ago."""
    path = store.path_of(bytes(16), 0)
    path.write_bytes(bytes(100))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of folders that cannot be listed, as after a power cut."""
    names, scandir = set[str](), os.scandir

    def refuse(path: Any = ".") -> Any:
        if os.path.basename(os.fspath(path)) in names:
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", lambda path=".": [entry.name for entry in refuse(path)])
    return names


def test_a_folder_that_cannot_be_read_is_passed_over(tmp_path: Path, unreadable: set[str]) -> None:
    store, said = store_of(tmp_path), list[str]()
    keep(store)
    broken = keep(store_of(tmp_path, 1)).parent
    unreadable.add(broken.name)
    store.clean(said.append)
    assert store.make_room(100)
    assert kept_bytes(tmp_path) == 100
    assert said == []


def test_on_a_disk_that_is_nearly_full_the_oldest_rows_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [store_of(tmp_path, number) for number in range(3)]
    files = [keep(store, age_s=10 * (3 - number)) for number, store in enumerate(stores)]

    def free(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=LEFT_FREE_BYTES + 50 + 100 * sum(not file.exists() for file in files))

    monkeypatch.setattr("shutil.disk_usage", free)
    assert not stores[2].make_room(100, needed=files), "what is needed stays"
    assert not stores[2].make_room(1000), "nor does anything go in vain"
    assert all(file.exists() for file in files)
    assert stores[2].make_room(100)
    assert [file.exists() for file in files] == [False, True, True]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error", "/x"), TierReadError("/x: no")])
def test_where_the_cache_cannot_be_opened_the_model_is_opened_without(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> PromptKeeper:
        raise error

    monkeypatch.setattr(opening, "_open", fail)
    engine: Any = SimpleNamespace(config=SimpleNamespace(keeps_prompts=True))
    said = list[str]()
    assert open_keeper(engine, said.append) is None
    assert said[0].startswith("prompt cache: off: ")
    assert "/x: " in said[0]


def test_what_another_llama_cpp_computed_stays_while_it_is_used(tmp_path: Path) -> None:
    """Two environments, or two machines, may share the folder."""
    ours, said = store_of(tmp_path), list[str]()
    used, unused = keep(store_of(tmp_path, 1, "b2")), keep(store_of(tmp_path, 2, "b2"), 8 * DAY_S)
    changed = keep(store_of(tmp_path, 3, "b1", "another"))
    ours.clean(said.append)
    assert used.exists()
    assert not unused.parent.exists()
    assert not changed.parent.exists()
    assert "200 B removed" in said[0]


def test_drafts_of_others_are_left_alone(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    folder = keep(store).parent
    living, left = folder / f".a.rows.{os.getppid()}-", folder / ".b.rows.2147483646-"
    paths = [Path(f"{one}{process_scope()}-01234567.part") for one in (living, left)]
    for path in paths:
        path.touch()
        os.utime(path, (0, 0))  # by a clock that was set meanwhile
    store.clean(print)
    assert [path.exists() for path in paths] == [True, False]


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("model.ckpt",),
        (ABOUT,),
        (ABOUT, "000000-00.rows", "notes.txt"),
        ("000000-00.rows", "results/000000-00.rows"),
        ("table.rows",),
    ],
)
def test_folders_of_other_programs_are_left_alone(names: tuple[str, ...], tmp_path: Path) -> None:
    """Their names are what `uuid4().hex` gives, and md5; our folder may be any folder, as that of all experiments."""
    folder = tmp_path / ("c" * 32)
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"format": 1}')
        os.utime(path, (0, 0))
    folder.mkdir(exist_ok=True)
    os.utime(folder, (0, 0))
    store, said = store_of(tmp_path), list[str]()
    kept = keep(store)
    store.clean(said.append)
    assert (said, kept_bytes(tmp_path)) == ([], 100)
    assert store.make_room((1 << 20) - 50), "room is made"
    assert not kept.exists()
    keep(store)
    assert erase(tmp_path) == 100
    assert not kept.parent.exists()
    assert folder.is_dir()
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("note", [None, b"", b"{", b"[" * 60000, b'"format"', b'{"format": 1}'])
def test_a_folder_of_ours_with_a_damaged_note_goes_once_nobody_can_be_making_it(
    note: bytes | None, tmp_path: Path
) -> None:
    store, said = store_of(tmp_path), list[str]()
    about = keep(store_of(tmp_path, 1)).with_name(ABOUT)
    if note is None:
        about.unlink()
    else:
        about.write_bytes(note)
    about.with_name(".000001-00.rows.17-01234567-89abcdef.part").touch()
    store.clean(said.append)
    assert about.parent.exists()
    os.utime(about.parent, (0, 0))
    store.clean(said.append)
    assert not about.parent.exists()
    assert said[0].startswith("prompt cache: 100 B removed")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Has all writing refused for a reason."""
    real, reason = os.open, [0]

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if reason[0] and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(reason[0], os.strerror(reason[0]))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    yield lambda number: reason.__setitem__(0, number)
    reason[0] = 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_what_is_kept_on_a_full_or_read_only_disk_is_read(
    tmp_path: Path, refused: Callable[[int], None], number: int
) -> None:
    path = keep(store_of(tmp_path, library="older"))
    refused(number)
    store = store_of(tmp_path)
    assert store.path_of(bytes(16), 0) == path
    assert store.why_no_writes == os.strerror(number)
    now_s = 0.0
    writer = BlockWriter(store, KvLayout([]), SavingBlocks(), lambda: now_s)
    assert (writer.failure, writer.is_resting) == (os.strerror(number), True)
    now_s = 1e6
    assert not writer.is_resting
    refused(0)
    assert store_of(tmp_path).why_no_writes == ""


def test_nothing_is_written_where_all_is_there(tmp_path: Path, refused: Callable[[int], None]) -> None:
    about = keep(store_of(tmp_path)).with_name(ABOUT)
    before = about.stat().st_mtime_ns
    refused(errno.EROFS)
    assert store_of(tmp_path).why_no_writes == ""
    assert about.stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierReadError, match="cannot keep prompts there"):
        store_of(tmp_path / "file")


def test_what_is_continued_makes_no_room_for_what_continues_it(tmp_path: Path) -> None:
    facts = {"library": "b1", "path": "m", "file": "f"}
    store = PromptStore(tmp_path, KeptIdentity(bytes(16), facts), 350)
    paths = [store.path_of(bytes(16), depth) for depth in range(4)]
    for path in paths[:2]:
        path.write_bytes(bytes(100))
    store.used(paths)
    other = keep(store_of(tmp_path, 1), DAY_S)
    assert store.make_room(100, frozenset(paths)), "another text goes"
    assert not other.exists()
    paths[2].write_bytes(bytes(100))
    store.used(paths)
    with pytest.raises(RowsVoid):
        store.make_room(100, frozenset(paths))
    assert [path.exists() for path in paths] == [True, True, True, False]


def test_what_a_machine_with_the_same_home_computed_stays_while_it_is_used(tmp_path: Path) -> None:
    """Its copy of the model has the same path, and is another file."""
    facts = {"library": "b1", "path": "m", "file": "f", "machine": "here"}
    there = KeptIdentity(bytes([1] * 16), {**facts, "file": "g", "machine": "there"})
    ours, theirs = (PromptStore(tmp_path, one, 1 << 20) for one in (KeptIdentity(bytes(16), facts), there))
    path = keep(theirs)
    ours.clean(print)
    assert path.exists()
    os.utime(path, (time.time() - 8 * DAY_S,) * 2)
    ours.clean(print)
    assert not path.exists()
