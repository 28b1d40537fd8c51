"""Rows of a table, page by page: the bytes of the file, the budget, and what stays when a read fails."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.errors import Cancelled, ModelFileError, TierReadError
from edge_run.tiers import _libc
from edge_run.tiers.readers import Readers
from edge_run.tiers.rows import RowRange, RowTable
from edge_run.tiers.source import SourceFile
from mapped import PAGE, advice_at, content, is_readable, mapped, write_random

N_PAGES = 64
FIRST_PAGE = 2  # of the file; the table begins there


class Setting:
    """A table over a file, a count of its reads, and the addresses of its rows."""

    def __init__(self, path: Path, base: int, readers: Readers, budget_pages: int, row_bytes: int) -> None:
        self.data, self.base, self.row_bytes = path.read_bytes(), base, row_bytes
        self.source = SourceFile(path)
        self.reads: list[tuple[int, int]] = []
        real = self.source.read_into

        def read_into(address: int, length: int, offset: int) -> int:
            self.reads.append((offset // PAGE, length // PAGE))
            return real(address, length, offset)

        self.source.read_into = read_into  # type: ignore[method-assign]
        start, stop = base + FIRST_PAGE * PAGE, base + N_PAGES * PAGE
        self.table = RowTable(RowRange(start, stop, 0, FIRST_PAGE * PAGE, budget_pages * PAGE), self.source, readers)

    def fetch(self, *rows: int) -> None:
        self.table.fetch((self.base + row * self.row_bytes, self.row_bytes) for row in rows)

    def is_right(self, row: int) -> bool:
        start = row * self.row_bytes
        wanted = self.data[start : start + self.row_bytes]
        return content(self.base + start, len(wanted)) == wanted

    def resident_pages(self) -> int:
        """How many pages of the table are in memory, as the kernel counts them."""
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(self.table.range.start // PAGE * 8)
            entries = pagemap.read((self.table.range.stop - self.table.range.start) // PAGE * 8)
        return sum(entries[i + 7] >> 7 for i in range(0, len(entries), 8))


@pytest.fixture
def readers() -> Iterator[Readers]:
    two = Readers(2)
    yield two
    two.close()


@pytest.fixture
def base() -> Iterator[int]:
    with mapped([N_PAGES * PAGE], PAGE) as address_space:
        yield address_space.spans[0].base


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    write_random(file, N_PAGES * PAGE)
    return file


@pytest.mark.parametrize("row_bytes", [PAGE // 16, 3 * PAGE // 4, PAGE, PAGE + 1, 3 * PAGE])
def test_rows_hold_the_bytes_of_the_file_whatever_was_fetched_before(
    path: Path, base: int, readers: Readers, row_bytes: int
) -> None:
    setting = Setting(path, base, readers, 8, row_bytes)
    inside = range(-(-FIRST_PAGE * PAGE // row_bytes), N_PAGES * PAGE // row_bytes)
    choose = random.Random(row_bytes)
    for _ in range(100):
        rows = choose.choices(inside, k=choose.randint(1, 4))
        setting.fetch(*rows)
        assert all(setting.is_right(row) for row in rows)


def test_pages_stay_within_the_budget(path: Path, base: int, readers: Readers) -> None:
    setting = Setting(path, base, readers, 8, PAGE)
    for row in random.Random(0).choices(range(FIRST_PAGE, N_PAGES), k=300):
        setting.fetch(row)
        assert setting.resident_pages() <= 8


def test_one_call_gets_all_it_needs_beyond_the_budget(path: Path, base: int, readers: Readers) -> None:
    """A wide prompt of different tokens must not fail; afterwards the table shrinks again."""
    setting = Setting(path, base, readers, 4, PAGE)
    setting.fetch(*range(10, 30))
    assert all(setting.is_right(row) for row in range(10, 30))
    setting.fetch(40)
    assert setting.resident_pages() == 4


def test_the_pages_used_least_lately_leave(path: Path, base: int, readers: Readers) -> None:
    setting = Setting(path, base, readers, 3, PAGE)
    for row in (10, 20, 30, 10, 40):
        setting.fetch(row)
    setting.reads.clear()
    setting.fetch(10, 30, 40)
    assert setting.reads == []
    setting.fetch(20)
    assert setting.reads == [(20, 1)]


def test_rows_that_share_pages_are_read_once(path: Path, base: int, readers: Readers) -> None:
    setting = Setting(path, base, readers, 8, PAGE // 4)
    setting.fetch(40, 41, 42, 43, 44)
    assert setting.reads == [(10, 2)], "five rows on two pages next to each other: one read"
    setting.fetch(45)
    assert len(setting.reads) == 1


def test_what_lies_outside_is_left_alone(path: Path, base: int, readers: Readers) -> None:
    """The two ends of a table lie in chunks that are pinned: they are not ours to read."""
    setting = Setting(path, base, readers, 8, PAGE)
    setting.fetch(0, 1)
    assert setting.reads == []
    setting.table.fetch([(base + FIRST_PAGE * PAGE - 10, 20)])
    assert setting.reads == [(FIRST_PAGE, 1)]


def test_after_a_failed_read_nothing_is_taken_for_resident(
    path: Path, base: int, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros in place of an embedding give plausible wrong text: what failed is read again."""
    setting = Setting(path, base, readers, 8, PAGE)
    setting.fetch(10)
    good = setting.source.read_into

    def fail(address: int, length: int, offset: int) -> int:
        raise TierReadError("the drive is gone")

    monkeypatch.setattr(setting.source, "read_into", fail)
    with pytest.raises(TierReadError, match="the drive is gone"):
        setting.fetch(10, 20, 30)
    monkeypatch.setattr(setting.source, "read_into", good)
    setting.fetch(10, 20, 30)
    assert all(setting.is_right(row) for row in (10, 20, 30))


def test_a_drive_may_have_a_bad_moment(
    path: Path, base: int, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_run.tiers.source.PAUSE_S", 0.01)
    setting, failures = Setting(path, base, readers, 8, PAGE), [errno.EIO]
    good = setting.source.read_into

    def fail_once(address: int, length: int, offset: int) -> int:
        if failures:
            raise TierReadError("the drive is reset", errno=failures.pop())
        return good(address, length, offset)

    monkeypatch.setattr(setting.source, "read_into", fail_once)
    setting.fetch(10)
    assert setting.is_right(10)
    failures += [errno.EIO, errno.EIO]
    with pytest.raises(TierReadError, match="is reset"):
        setting.fetch(30)
    setting.fetch(30)
    assert setting.is_right(30)


def test_what_a_failed_call_did_read_is_given_back(path: Path, base: int, readers: Readers) -> None:
    """Of two reads one fails: the other's page is in memory, and would stay there uncounted for good."""
    setting = Setting(path, base, readers, 8, PAGE)
    os.truncate(path, 50 * PAGE)
    for row in range(FIRST_PAGE, 30, 2):
        with pytest.raises(ModelFileError, match="cut while in use"):
            setting.fetch(row, 60)
    assert setting.resident_pages() <= 8


@pytest.mark.parametrize("row", [10, N_PAGES - 1])  # the last page is not whole
@pytest.mark.parametrize("change", ["content", "mode"])
def test_rows_that_are_read_again_are_compared_where_the_file_may_have_changed(
    path: Path, base: int, readers: Readers, change: str, row: int
) -> None:
    """As after an edit whose time was set back; the mode of a file is nothing of its content."""
    os.truncate(path, N_PAGES * PAGE - 123)
    setting, before = Setting(path, base, readers, 1, PAGE), path.stat()
    setting.fetch(row)
    setting.fetch(20)
    time.sleep(0.02)  # the time of a change is exact to some milliseconds
    if change == "content":
        with path.open("r+b") as file:
            file.seek(row * PAGE + 100)
            file.write(bytes([setting.data[row * PAGE + 100] ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        path.chmod(0o640)
    setting.source.check_unchanged()
    assert setting.source.is_doubtful
    if change == "content":
        with pytest.raises(ModelFileError, match="changed while it was in use"):
            setting.fetch(row)
    else:
        setting.fetch(row)
        assert setting.is_right(row)
    setting.fetch(20)
    assert setting.is_right(20)
    assert setting.reads == [(row, 1), (20, 1), (row, 1), (20, 1)]


def test_a_wait_for_a_drive_that_hangs_can_be_ended(path: Path, base: int, readers: Readers) -> None:
    """What it brings later does not count, and is given back before the next rows are read."""
    setting, answers, is_stopped = Setting(path, base, readers, 8, PAGE), threading.Event(), True
    real = setting.source.read_into

    def hanging(address: int, length: int, offset: int) -> int:
        assert answers.wait(60)
        return real(address, length, offset)

    def check() -> None:
        if is_stopped:
            raise Cancelled("the pass was cancelled")

    setting.source.read_into = hanging  # type: ignore[method-assign]
    setting.table._check = check
    began_s = time.monotonic()
    for rows in ((5, 7, 9), (30,)):
        with pytest.raises(Cancelled):
            setting.fetch(*rows)
    assert time.monotonic() - began_s < 30
    is_stopped = False
    answers.set()
    setting.fetch(30)
    assert setting.is_right(30)
    assert setting.resident_pages() == 1
    setting.fetch(5, 7)
    assert setting.is_right(5)
    assert setting.is_right(7)


def test_a_stop_is_heard_while_reads_come_in_and_ends_the_others(path: Path, base: int, readers: Readers) -> None:
    """However fast the drive is."""
    setting = Setting(path, base, readers, 8, PAGE)
    real = setting.source.read_into

    def slow(address: int, length: int, offset: int) -> int:
        time.sleep(0.02)
        return real(address, length, offset)

    def check() -> None:
        if setting.reads:
            raise Cancelled("the pass was cancelled")

    setting.source.read_into = slow  # type: ignore[method-assign]
    setting.table._check = check
    with pytest.raises(Cancelled):
        setting.fetch(*range(4, N_PAGES, 2))
    setting.table._check = lambda: None
    n_read = len(setting.reads)
    setting.fetch(20)
    assert setting.is_right(20)
    assert len(setting.reads) <= n_read + 3, "what was under way, and this one"
    assert n_read < 10


def test_a_table_is_kept_out_of_huge_pages_forks_and_core_dumps(path: Path, base: int, readers: Readers) -> None:
    """Where huge pages are always on, one row would bring 2 MiB into memory, far beyond the budget."""
    setting = Setting(path, base, readers, 8, PAGE)
    huge = {"nh"} if Path("/sys/kernel/mm/transparent_hugepage").exists() else set()
    assert {"dc", "dd", *huge} <= advice_at(setting.table.range.start)


def test_a_table_apart_has_the_same_rows_elsewhere(path: Path, base: int, readers: Readers) -> None:
    """Nothing of it comes to the table's own addresses, and its memory goes when it does."""
    data, source = path.read_bytes(), SourceFile(path)
    start, stop = base + FIRST_PAGE * PAGE, base + N_PAGES * PAGE
    table = RowTable(RowRange(start, stop, 0, FIRST_PAGE * PAGE, 8 * PAGE, is_apart=True), source, readers)
    for row in (5, 60, 33):
        address = base + row * PAGE + 100
        table.fetch([(address, PAGE // 2)])
        place = table.place_of(address)
        assert not start <= place < stop
        assert content(place, PAGE // 2) == data[row * PAGE + 100 :][: PAGE // 2]
    assert _libc.resident_bytes(start, stop - start) == 0
    place = table.place_of(start)
    table.close()
    table.close()
    assert not is_readable(place)
    source.close()
