"""The file of the list of members, while another process has it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edge_run.base.errors import MeshError
from edge_run.devices.members import list_file
from edge_run.devices.members.cluster import members_path, read_cluster
from edge_run.devices.members.identity import device_key
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.members.list_file import ListFile, change_list
from edge_run.devices.members.member_list import MemberList
from mesh_lists import let_in, make_cluster, stranger_in
from waiting import until

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_while_another_process_changes_the_list_nobody_waits_and_nothing_is_lost(tmp_path: Path) -> None:
    """As `mesh remove` does that was stopped in the middle: presence and lease of `mesh join` go on."""
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one"])
    folder, founder = tmp_path / "one", device_key(tmp_path / "one")
    newer = let_in(ListEditor(founder, cluster.listed, cluster.secret), device_key(tmp_path / "two"), "two")
    file = ListFile(folder, cluster)
    words = [sys.executable, "-c", HOLD, str(folder / "cluster.lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        started = time.monotonic()
        file.keep(cluster.adopt(newer, founder))
        assert file.changed() is None
        assert time.monotonic() - started < 30, "it would wait for ever"
        other.communicate(timeout=30)
    assert file.changed() is None, "it is this process's own"
    file.close()
    assert file.changed() is None
    known = read_cluster(folder)
    assert known is not None
    assert known.listed == newer


def test_a_slow_card_is_waited_for_at_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat is sent or heard meanwhile, and a pass that looks for losses waits: others gave the device up."""
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one"])
    folder, founder = tmp_path / "one", device_key(tmp_path / "one")
    newer = let_in(ListEditor(founder, cluster.listed, cluster.secret), device_key(tmp_path / "two"), "two")
    file = ListFile(folder, cluster)
    go_on, write = threading.Event(), list_file.write_cluster
    monkeypatch.setattr(list_file, "write_cluster", lambda *given: (go_on.wait(60), write(*given)))
    started = time.monotonic()
    file.keep(cluster.adopt(newer, founder))
    assert file.changed() is None
    assert time.monotonic() - started < 30
    threading.Timer(0.1, go_on.set).start()
    file.close()
    known = read_cluster(folder)
    assert known is not None
    assert known.listed == newer
    assert file.changed() is None, "it is this process's own"


def test_a_change_that_cannot_be_read_at_once_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one"])
    file = ListFile(tmp_path / "one", cluster)
    file._path.write_bytes(b"another")
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> object:
            raise OSError(24, "Too many open files")

        patch.setattr(Path, "open", refuse)
        assert file.changed() is None
    assert file.changed() == b"another"
    assert file.changed() is None
    file.close()


def test_what_cannot_be_written_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full drive: a device that forgot who was removed would believe him again after its next start."""
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one"])
    folder, founder = tmp_path / "one", device_key(tmp_path / "one")
    newer = let_in(ListEditor(founder, cluster.listed, cluster.secret), device_key(tmp_path / "two"), "two")
    file, tried = ListFile(folder, cluster), list[object]()
    with monkeypatch.context() as patch:

        def refuse(*given: object) -> None:
            tried.append(given)
            raise MeshError("no space left")

        patch.setattr(list_file, "write_cluster", refuse)
        file.keep(cluster.adopt(newer, founder))
        until(lambda: tried and not file._is_writing(), 20)
        assert not file._is_writing()
        assert len(tried) == 1, "not at each look"
        file._retry_s = 0.0
        until(lambda: not file._is_writing() and len(tried) > 1, 20)
    file._retry_s = 0.0
    until(lambda: not file._is_writing() and file._unkept is None, 20)
    known = read_cluster(folder)
    assert known is not None
    assert known.listed == newer


def test_a_secret_whose_writing_was_broken_off_is_that_of_the_list(tmp_path: Path) -> None:
    """Two files are written: what a change seals anew would be the secret before."""
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one"])
    folder, founder = tmp_path / "one", device_key(tmp_path / "one")
    newer = ListEditor(founder, cluster.listed, cluster.secret).rotate(bytes(32))
    members_path(folder, cluster.id).write_bytes(newer.payload)
    secrets = list[bytes]()

    def change(editor: ListEditor) -> MemberList:
        secrets.append(editor.secret)
        return editor.listed

    assert change_list(folder, change).secret == bytes(32)
    assert secrets == [bytes(32)]


def test_a_list_is_not_written_into_a_cluster_of_the_same_id_that_another_founded(tmp_path: Path) -> None:
    """Such a line may be made on purpose: a program that still runs for the first cluster would damage the second."""
    cluster = make_cluster(tmp_path, "mqtt://127.0.0.1", ["one", "two"])
    folder, founder = tmp_path / "two", device_key(tmp_path / "one")
    file = ListFile(folder, cluster)
    stranger_in(folder, cluster)
    known = read_cluster(folder)
    file.keep(cluster.adopt(ListEditor(founder, cluster.listed, cluster.secret).rotate(bytes(32)), founder))
    file.close()
    assert read_cluster(folder) == known
