"""The results of a batch: lines that are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from unittest import mock

import anyio
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")

from batch_lines import LINE, write
from edge_run.base.errors import ConfigError, TierReadError
from edge_run.runtime.batches import results_file
from edge_run.runtime.batches.answering import BatchResult, Place
from edge_run.runtime.batches.input_file import (
    BatchRequest,
    count_lines,
)
from edge_run.runtime.batches.results_file import ResultsFile
from edge_run.runtime.batches.run import BatchProgress, BatchRun


def test_results_are_found_again_and_a_line_that_was_cut_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with ResultsFile(path) as results:
        results.add("a", 200, b'{"id":"x"}')
        results.add("b", 400, {"error": {"message": "no"}})
    whole = path.read_bytes()
    assert [json.loads(line)["response"]["status_code"] for line in whole.splitlines()] == [200, 400]
    for cut in (1, 20, len(whole.splitlines()[1])):
        path.write_bytes(whole[:-cut])
        with ResultsFile(path) as results:
            assert results.done == {"a"}
            results.add("c", 200, b"{}")
        assert [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()] == ["a", "c"]


def test_a_run_that_fails_before_a_result_leaves_no_file(tmp_path: Path) -> None:
    """As where the model cannot be opened. What was there stays, and so does what is written."""
    path = tmp_path / "out"

    def fail(results: ResultsFile) -> None:
        with results:
            raise TierReadError("no model")

    with pytest.raises(TierReadError):
        fail(ResultsFile(path))
    assert not list(tmp_path.iterdir())
    path.touch()
    with pytest.raises(TierReadError):
        fail(ResultsFile(path))
    assert path.read_bytes() == b""
    path.unlink()
    results = ResultsFile(path)
    results.add("a", 200, {})
    with pytest.raises(TierReadError):
        fail(results)
    assert path.read_bytes()
    path.unlink()
    with ResultsFile(path):
        pass
    assert path.read_bytes() == b"", "there was nothing to be answered"


@pytest.mark.parametrize(
    "content",
    [
        b"a note\n",
        b"[1]\n",
        b'{"custom_id": 1, "response": {}}\n',
        b'{"custom_id": "a"}\n',
        b'{"custom_id": null, "response": {}}\n',
        b"\x00\n",
        b"[" * 9999 + b"\n",
    ],
)
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content + b"half")
    with pytest.raises(ConfigError, match="line 1 is no result of a batch"):
        ResultsFile(path)
    assert path.read_bytes() == content + b"half"


@pytest.mark.parametrize(
    "content",
    [b"a note", b'{"a": 1}', b"\x89PNG", b'{"id": 5, "name": "x"}', b"{" * 2000, b"\0" * 2000, b'{"id":"batch_resp'],
)
def test_a_file_without_a_line_break_is_left_as_it_is(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "MOST_BODY_BYTES", 1000)
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="line 1 is no result of a batch"):
        ResultsFile(path)
    assert path.read_bytes() == content


def test_what_a_power_cut_leaves_of_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    with ResultsFile(path) as results:
        results.add("a", 200, b'{"text":"%s"}' % (b"x" * 2000))
    whole = path.read_bytes()
    monkeypatch.setattr(results_file, "MOST_BODY_BYTES", 1000)  # a line may be longer than a request
    for rest in (b"", b"\0" * 500, b"{", b'{"id":"ba' + b"\0" * 99, whole[:30], whole[:1500]):
        path.write_bytes(whole + rest)
        with ResultsFile(path) as results:
            assert results.done == {"a"}
        assert path.read_bytes() == whole


@pytest.mark.parametrize("is_in_order", [False, True])
def test_a_line_that_is_no_request_takes_the_result_of_none(tmp_path: Path, is_in_order: bool) -> None:
    """Whatever requests are called: after the line, and before it."""
    asked = [{**LINE, "custom_id": "line-4"}, "no JSON", {**LINE, "custom_id": "line-2"}, "nor this", LINE, LINE]
    source, answered = write(tmp_path / "in", *asked), list[str]()

    class Places:
        async def take(self, n_unfinished: int) -> Place:
            return self._answer

        async def _answer(self, request: BatchRequest) -> BatchResult:
            answered.append(request.custom_id)
            return BatchResult(200, b"{}")

    for _ in range(2):
        with ResultsFile(tmp_path / "out") as results:
            progress = BatchProgress(count_lines(source))
            anyio.run(BatchRun(source, results, progress, lambda: None, is_in_order=is_in_order).run, Places())
            assert progress.unfinished == 0
    assert sorted(answered) == ["a", "line-2", "line-4"]
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    statuses = {one["custom_id"] or one["line"]: one["response"]["status_code"] for one in found}
    assert len(found) == len(statuses)
    assert statuses == {"line-4": 200, 2: 400, "line-2": 200, 4: 400, "a": 200, 6: 400}


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    with ResultsFile(tmp_path / "out"), pytest.raises(ConfigError, match="another run writes them"):
        ResultsFile(tmp_path / "out")
    ResultsFile(tmp_path / "out").close()


def test_a_folder_and_a_place_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "out", Path("."), Path("/")):
        with pytest.raises(ConfigError, match="cannot be written"):
            ResultsFile(path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultsFile(tmp_path / "out") as results:
        results.add("a", 200, b"{}")
        before = (tmp_path / "out").read_bytes()
        write_all = os.write

        def half(descriptor: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return write_all(descriptor, data[:-10])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(TierReadError, match="No space left"):
            results.add("b", 200, b"{}")
        assert (tmp_path / "out").read_bytes() == before
        assert results.done == {"a"}


def test_a_drive_that_refuses_to_lock_is_told_by_the_name_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(TierReadError, match=r"results .*out: Input/output error"):
        ResultsFile(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_reason_to_answer_nothing(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre, where clusters are; it is told that nothing keeps another run off."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ResultsFile(tmp_path / "out") as results:
        results.add("a", 200, b"{}")
        assert not results.is_locked
    monkeypatch.undo()
    with ResultsFile(tmp_path / "out") as results:
        assert (results.done, results.is_locked) == ({"a"}, True)


def test_what_windows_lacks_is_no_reason_to_answer_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_file, "fcntl", None)
    for name in ("O_CLOEXEC", "pread", "fdatasync"):
        monkeypatch.delattr(os, name)
    with ResultsFile(tmp_path / "out") as results:
        assert not results.is_locked
        for key in "bc":
            results.hold(key, 200, b"{}")
        results.add("a", 200, b"{}")
        results.add_held("cb")
    assert ids(tmp_path / "out") == ["a", "c", "b"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_results_that_somebody_removes_meanwhile_end_the_run(tmp_path: Path, is_replaced: bool) -> None:
    """As an editor, which writes another file in their place: what is written then would be nowhere."""
    path = tmp_path / "out"
    with ResultsFile(path) as results:
        results.add("a", 200, b"{}")
        path.unlink()
        if is_replaced:
            path.write_bytes(b"")
        with pytest.raises(TierReadError, match="was removed or replaced while this run wrote it"):
            results.add("b", 200, b"{}")
        assert results.done == {"a"}


class Numbered:
    """Answers requests, but request 0 only after `n_before` others; then it fails, if it is to."""

    def __init__(self, n_before: int, *, fails: bool) -> None:
        self.answered, self._others = list[str](), list[anyio.Event]()
        self._n_before, self._fails = n_before, fails

    async def take(self, n_unfinished: int) -> Place:
        return self._answer

    async def _answer(self, request: BatchRequest) -> BatchResult:
        if request.custom_id == "0" and self._n_before:
            self._others.append(anyio.Event())
            await self._others[0].wait()
            if self._fails:
                raise TierReadError("the power fails")
        self.answered.append(request.custom_id)
        if len(self.answered) == self._n_before:
            self._others[0].set()
        return BatchResult(200, b"{}", 3)


def run_numbered(
    folder: Path, n_before: int, *, fails: bool = False, is_in_order: bool = True
) -> tuple[list[str], BatchProgress]:
    """Answer what is left of five requests; return which were answered, and how far it is."""
    source = write(folder / "in", *({**LINE, "custom_id": str(number)} for number in range(5)))
    places, progress = Numbered(n_before, fails=fails), BatchProgress(5)
    with ResultsFile(folder / "out") as results, contextlib.suppress(TierReadError):
        anyio.run(BatchRun(source, results, progress, lambda: None, is_in_order=is_in_order).run, places)
    return places.answered, progress


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_results_in_order_wait_for_those_before_them(tmp_path: Path) -> None:
    answered, progress = run_numbered(tmp_path, 4)
    assert sorted(answered[:4]) == ["1", "2", "3", "4"]
    assert ids(tmp_path / "out") == ["0", "1", "2", "3", "4"]
    assert (progress.done, progress.tokens, progress.unfinished) == (5, 15, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("is_in_order", [True, False])
def test_what_waited_for_results_before_it_is_not_computed_again(tmp_path: Path, is_in_order: bool) -> None:
    answered, progress = run_numbered(tmp_path, 4, fails=True)
    assert sorted(answered) == ["1", "2", "3", "4"]
    assert (progress.done, ids(tmp_path / "out")) == (4, [])
    held = tmp_path / "out.held"
    *_, last = ids(held)
    held.write_bytes(held.read_bytes()[:-5] + bytes(100))  # as a power cut leaves it
    assert run_numbered(tmp_path, 1, fails=True)[0] == [last]
    answered, progress = run_numbered(tmp_path, 0, is_in_order=is_in_order)
    assert answered == ["0"]
    assert (progress.done, progress.kept, progress.unfinished) == (1, 4, 0)
    found = ids(tmp_path / "out")
    assert (found if is_in_order else sorted(found)) == ["0", "1", "2", "3", "4"]
    assert not held.exists()


def test_what_is_held_of_results_that_were_removed_is_forgotten(tmp_path: Path) -> None:
    run_numbered(tmp_path, 4, fails=True)
    (tmp_path / "out").unlink()
    assert len(run_numbered(tmp_path, 4)[0]) == 5


def test_notes_of_somebody_under_the_name_of_what_is_held_stay(tmp_path: Path) -> None:
    notes = tmp_path / "out.held"
    notes.write_text("notes\n")
    for _ in range(2):  # also where the results are there by now
        with pytest.raises(ConfigError, match=r"out\.held: line 1 is no result"):
            ResultsFile(tmp_path / "out")
    assert notes.read_text() == "notes\n"


def test_what_is_held_is_free_for_others_only_once_it_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    results, close = ResultsFile(path), os.close
    results.hold("b", 200, {})
    results.add_held(["b"])
    named = list[bool]()
    monkeypatch.setattr(os, "close", lambda one: (named.append((tmp_path / "out.held").exists()), close(one)))
    results.close()
    assert named == [False, False]


def test_what_could_not_be_written_still_comes_before_what_follows(tmp_path: Path) -> None:
    source = write(tmp_path / "in", LINE)
    with ResultsFile(tmp_path / "out") as results:
        run = BatchRun(source, results, BatchProgress(3), lambda: None, is_in_order=True)
        run._held = {0: "a", 1: "b"}
        full = mock.patch.object(results, "add_held", side_effect=TierReadError("no space"))
        with full, pytest.raises(TierReadError):
            anyio.run(run._write_held)
        assert not run._is_next(2)
        with mock.patch.object(results, "add_held") as add:
            anyio.run(run._write_held)
        assert add.call_args.args == (["a", "b"],)
        assert run._is_next(2)
