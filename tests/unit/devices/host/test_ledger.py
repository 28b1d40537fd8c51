"""The ledger of budgets: what is granted, what others may still take, and whose folder it lies in."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edge_run.base.errors import BudgetError
from edge_run.base.process_ids import pid_namespace
from edge_run.base.units import GIB, MIB
from edge_run.devices.host import ledger as ledger_module
from edge_run.devices.host import locks
from edge_run.devices.host.ledger import Ledger, Run
from edge_run.devices.host.locks import LivingFile, own_folders
from edge_run.devices.host.memory import MemoryGroup, ProcessMemory, Promised, process_memory

OTHER = os.getppid()  # a live process that is not this one


@pytest.fixture(autouse=True)
def resident(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What each process holds; one that is not in it holds what it holds."""
    held: dict[int, int] = {}

    def look(process: int | None = None) -> ProcessMemory:
        real, pid = process_memory(process), process or os.getpid()
        return replace(real, resident_bytes=held[pid], file_bytes=0) if pid in held else real

    monkeypatch.setattr(ledger_module, "process_memory", look)
    return held


def free(size_bytes: int) -> Callable[..., int]:
    """A machine on which this process may hold so much, were it not for promises."""

    def available_bytes(promised_bytes: Promised) -> int:
        return size_bytes - promised_bytes(None)

    return available_bytes


def other_run(folder: Path, granted_bytes: int, pid: int = OTHER, **fields: object) -> LivingFile:
    """A grant of another live process."""
    entry = {
        "pid": pid, "namespace": pid_namespace(), "model": "other.gguf", "base_bytes": 0,
        "added_bytes": granted_bytes, **fields,
    }  # fmt: skip
    return LivingFile(folder, "run-", json.dumps(entry).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 50_000,
        b"[]",
        b"null",
        b'{"pid": 1, "pid": 1}',
        *(
            json.dumps(
                {"pid": OTHER, "namespace": pid_namespace(), "model": "x", "base_bytes": 0, "added_bytes": 1} | one
            ).encode()
            for one in (
                {"pid": "1"},
                {"pid": []},
                {"pid": -1},
                {"pid": 2**80},
                {"pid": True},
                {"base_bytes": {}},
                {"base_bytes": 0.5},
                {"added_bytes": "1"},
                {"added_bytes": float("nan")},
                {"added_bytes": 10**400},
                {"model": 5},
                {"another": 1},
            )
        ),
    ],
)
def test_a_grant_that_was_written_otherwise_counts_as_none(tmp_path: Path, content: bytes) -> None:
    ledger = Ledger(tmp_path, free(10 * GIB))
    other = LivingFile(tmp_path, "run-", content)
    assert ledger.runs() == []
    ledger.grant(10 * GIB, "model.gguf", 0).close()
    other.remove()


def test_what_others_may_still_take_is_not_free(tmp_path: Path, resident: dict[int, int]) -> None:
    """What they hold already is missing from what the machine has available."""
    ledger, resident[OTHER] = Ledger(tmp_path, free(10 * GIB)), 1 * GIB
    other = other_run(tmp_path, 5 * GIB)
    assert ledger.runs() == [Run(OTHER, ("other.gguf",), 5 * GIB, GIB)]
    assert ledger.promised_bytes() == 4 * GIB
    ledger.grant(6 * GIB, "model.gguf").close()
    with pytest.raises(BudgetError):
        ledger.grant(6 * GIB + 1, "model.gguf")
    resident[OTHER] = 7 * GIB  # more than it was granted: its own affair, and never negative
    assert ledger.promised_bytes() == 0
    other.remove()
    assert ledger.runs() == []


def test_a_model_whose_name_is_no_text_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, free(10 * GIB))
    with ledger.grant(6 * GIB, os.fsdecode(b"mod\xe9l.gguf"), 0):
        assert [run.models for run in ledger.runs()] == [("mod\ufffdl.gguf",)]
        with pytest.raises(BudgetError, match="to this process"):
            ledger.grant(20 * GIB, "second.gguf", 0)


def test_what_is_mapped_of_files_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that begins in the page cache is copied later, by this process too."""
    began = ProcessMemory(4 * GIB, 4 * GIB, 0, 0, file_bytes=4 * GIB)
    monkeypatch.setattr(ledger_module, "process_memory", lambda process=None: began)
    ledger, other = Ledger(tmp_path, free(10 * GIB)), other_run(tmp_path, 4 * GIB)
    assert ledger.promised_bytes() == 4 * GIB
    with ledger.grant(4 * GIB, "first.gguf", 0):
        assert ledger.promised_bytes() == 8 * GIB
        with pytest.raises(BudgetError):
            ledger.grant(2 * GIB + 1, "second.gguf")
    other.remove()


def test_a_refusal_names_the_others_in_one_line(tmp_path: Path, resident: dict[int, int]) -> None:
    resident.update({OTHER: 0, os.getpid(): 0})
    ledger, other = Ledger(tmp_path, free(10 * GIB)), other_run(tmp_path, 6 * GIB)
    with ledger.grant(GIB, "first.gguf", 0), pytest.raises(BudgetError) as caught:
        ledger.grant(5 * GIB, "model.gguf", 0)
    other.remove()
    assert str(caught.value) == (
        "model.gguf: the plan needs 5.00 GiB of memory for the whole process, and 3.00 GiB is free for it; granted are "
        f"6.00 GiB to process {OTHER} (other.gguf), 1.00 GiB to this process (first.gguf); "
        "lower memory= to at most 3072MiB, or end another run"
    )
    assert (caught.value.needed_bytes, caught.value.found_bytes) == (5 * GIB, 3 * GIB)


def test_three_others_are_named_and_the_rest_counted() -> None:
    runs = [Run(pid, (f"{pid}.gguf",), pid * GIB, 0) for pid in (11, 12, 13, 14, 15)]
    error = ledger_module._refusal(GIB, -5, "model.gguf", runs, [])
    assert "granted are 15.00 GiB to process 15 (15.gguf), 14.00 GiB to process 14 (14.gguf)" in str(error)
    assert str(error).endswith("23.00 GiB to 2 more; end another run"), "there is no budget that would do"


def test_without_others_the_machine_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"0 B is free for it; end other programs$"):
        Ledger(tmp_path, free(0)).grant(1, "model.gguf", 0)
    with pytest.raises(BudgetError, match=r"2.00 GiB is free for it; lower memory= to at most 2048MiB, or end other"):
        Ledger(tmp_path, free(2 * GIB)).grant(3 * GIB, "model.gguf", 0)


def test_a_check_of_the_least_promises_nothing_and_advises_no_less(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, free(2 * GIB))
    ledger.check(2 * GIB, "model.gguf")
    assert (ledger.free_bytes, ledger.runs()) == (2 * GIB, [])
    with pytest.raises(
        BudgetError, match=r"model.gguf: it needs at least 3.00 GiB .* 2.00 GiB is free for it; end other"
    ):
        ledger.check(3 * GIB, "model.gguf")


@pytest.mark.parametrize("read_bytes", [0, 1, 2, 4], ids="{} GiB read".format)
def test_two_models_in_one_process_are_counted_once_each(
    tmp_path: Path, resident: dict[int, int], read_bytes: int
) -> None:
    """The first takes 4 GiB beside the program's 1, the second 2: 7 in all, whatever was read of the first by then."""
    read_bytes *= GIB
    exactly, less = Ledger(tmp_path, free(7 * GIB)), Ledger(tmp_path, free(7 * GIB - 1))
    with exactly.grant(5 * GIB, "first.gguf", 1 * GIB):
        held_bytes = GIB + read_bytes
        needed_bytes = held_bytes + 2 * GIB
        resident[os.getpid()] = held_bytes
        assert exactly.promised_bytes() == 4 * GIB - read_bytes
        with pytest.raises(BudgetError):
            less.grant(needed_bytes, "second.gguf", held_bytes)
        second = exactly.grant(needed_bytes, "second.gguf", held_bytes)
        assert exactly.promised_bytes() == 6 * GIB - read_bytes
    resident[os.getpid()] = GIB
    assert exactly.promised_bytes() == 2 * GIB, "the first is closed, its memory given back; the second is unread"
    second.close()
    assert exactly.promised_bytes() == 0


def test_what_a_process_took_besides_its_models_is_its_own_affair(tmp_path: Path, resident: dict[int, int]) -> None:
    """Other libraries' gigabytes in this process are part of the next plan, and no reason to refuse it."""
    ledger = Ledger(tmp_path, free(12 * GIB))
    with ledger.grant(3 * GIB, "first.gguf", GIB):
        resident[os.getpid()] = 9 * GIB
        with ledger.grant(12 * GIB, "second.gguf", 9 * GIB):
            assert ledger.promised_bytes() == 3 * GIB


def test_what_is_held_now_counts_where_nothing_is_said(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, free(10 * GIB))
    with ledger.grant(5 * GIB, "first.gguf"), ledger.grant(5 * GIB, "second.gguf"):
        (run,) = ledger.runs()
        assert run.models in {("first.gguf", "second.gguf"), ("second.gguf", "first.gguf")}
        twice = 10 * GIB - run.granted_bytes
        assert 0 < twice <= 1.1 * run.held_bytes, "the program is in both"


def test_only_processes_in_a_group_count_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: dict[int, int]
) -> None:
    resident[OTHER] = 0
    inside, outside = Path("/group/inside"), Path("/group/outside")
    monkeypatch.setattr(ledger_module, "memory_groups", lambda pid: [MemoryGroup(inside, "", "")])
    other = other_run(tmp_path, GIB)
    ledger = Ledger(tmp_path)
    assert [ledger.promised_bytes(group) for group in (None, inside, outside)] == [GIB, GIB, 0]
    other.remove()


def test_release_is_idempotent_and_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, free(GIB))
    before = {*os.listdir("/proc/self/fd")}
    grant = ledger.grant(MIB, "model.gguf")
    assert len(list(tmp_path.glob("run-*"))) == 1
    grant.close()
    grant.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert {*os.listdir("/proc/self/fd")} <= before


def test_a_grant_released_twice_does_not_close_anothers_file(tmp_path: Path) -> None:
    """The number of a closed descriptor is given out again."""
    ledger = Ledger(tmp_path, free(GIB))
    first = ledger.grant(MIB, "model.gguf")
    first.close()
    with ledger.grant(MIB, "model.gguf"):
        first.close()
        assert len(ledger.runs()) == 1


def test_threads_share_one_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for three of the eight that ask at once."""
    monkeypatch.setattr(locks, "LONGEST_WAIT_S", 60.0)
    granted, refused, all_asked = [], [], threading.Barrier(8)

    def ask() -> None:
        ledger = Ledger(tmp_path, free(3 * GIB))
        all_asked.wait()
        try:
            granted.append(ledger.grant(GIB, "model.gguf", 0))
        except BudgetError as error:
            refused.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(granted), len(refused)) == (3, 5)
    for grant in granted:
        grant.close()


def test_entries_that_are_not_understood_are_passed_over(tmp_path: Path) -> None:
    """Those of a later version, and of a container that shares the folder but not the numbers of processes."""
    later = LivingFile(tmp_path, "run-", b'{"version": 2}')
    broken = LivingFile(tmp_path, "run-", b"\xff{")
    foreign = other_run(tmp_path, GIB, namespace=1)
    assert Ledger(tmp_path).runs() == []
    assert len(list(tmp_path.glob("run-*"))) == 3, "their processes live"
    for file in (later, broken, foreign):
        file.remove()


def test_what_nobody_locks_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run-1-2-abandoned").write_text("{}")
    (tmp_path / "run-link").symlink_to("/etc/passwd")
    assert Ledger(tmp_path).runs() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "run-link"]


def test_a_lock_that_is_held_for_ever_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LONGEST_WAIT_S", 0.05)
    ledger = Ledger(tmp_path, free(GIB))
    with locks.locked(tmp_path / "lock"), ledger.grant(MIB, "model.gguf"):
        assert len(ledger.runs()) == 1


# Whose folder


def test_the_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "edge-run-7"
    assert own_folders([tmp_path / "nowhere" / "edge-run", folder, tmp_path / "later"]) == [folder]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert own_folders([folder]) == [folder]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_a_file_or_somebody_elses_folder_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make names in /tmp."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").touch()
    assert own_folders([tmp_path / "link", tmp_path / "file"]) == []
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert own_folders([tmp_path / "target"]) == []


@pytest.mark.parametrize("missing", ["folder", "locks"])
def test_without_a_ledger_nothing_is_promised_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "locks":
        monkeypatch.setattr(locks, "HAS_LOCKS", False)
    ledger = Ledger(tmp_path / "no" / "folder" if missing == "folder" else tmp_path, free(GIB))
    assert ledger.folders == []
    with ledger.grant(MIB, "model.gguf"):
        assert (ledger.runs(), ledger.promised_bytes()) == ([], 0)
    with pytest.raises(BudgetError):
        ledger.grant(2 * GIB, "model.gguf")


def test_a_grant_that_cannot_be_written_down_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    ledger = Ledger(tmp_path, free(GIB))
    monkeypatch.setattr(os, "write", refuse)
    ledger.grant(MIB, "model.gguf").close()
    assert list(tmp_path.glob("run-*")) == []


@pytest.mark.parametrize("temporary", ["/tmp", "own", "none"])
def test_of_the_users_folders_only_the_last_hangs_on_the_environment(
    temporary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setenv("XDG_RUNTIME_DIR", "/somewhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path) if temporary == "own" else temporary)
    monkeypatch.setattr(tempfile, "tempdir", None)
    if temporary == "none":
        monkeypatch.setattr(tempfile, "gettempdir", refuse)
    user = os.geteuid()
    wanted = [f"/run/user/{user}/edge-run", f"/tmp/edge-run-{user}", f"/var/tmp/edge-run-{user}"]
    wanted += [f"{tmp_path}/edge-run-{user}"] * (temporary == "own")
    assert list(map(str, locks.user_folders())) == wanted


def test_what_began_without_a_session_is_seen_within_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a job of cron's, which has no /run/user. And a folder that has two names is one."""
    session, folder, link = tmp_path / "session" / "edge-run", tmp_path / "tmp", tmp_path / "var"
    link.symlink_to(tmp_path)
    monkeypatch.setattr(ledger_module, "user_folders", lambda: [session, folder, link / "tmp"])
    of_cron = Ledger(None, free(GIB))
    with of_cron.grant(MIB, "of-cron.gguf", 0):
        session.parent.mkdir()
        ledger = Ledger(None, free(GIB))
        assert ledger.folders == [session, folder]
        with ledger.grant(MIB, "of-the-session.gguf", 0):
            assert (len(list(folder.glob("run-*"))), len(list(session.glob("run-*")))) == (1, 1)
            for one in (ledger, of_cron):
                assert [sorted(run.models) for run in one.runs()] == [["of-cron.gguf", "of-the-session.gguf"]]
