"""What is kept of prompts, driven with all that may happen: texts that grow and are cut, full disks, torn files."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.runtime.keeping.store import PromptStore
from edge_run.tiers.kv.block_file import DamagedRows, RowsHead, copy_part, place_part, read_rows, write_rows
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout
from edge_run.tiers.kv.record import RowPass, RowRecord, block_names, last_stop, reading
from edge_run.tiers.kv.saving import KEPT, QUEUED, WRITING, SaveJob, SavingBlocks

ROOT = bytes(16)
RING_CELLS = 1024


class Rows(RuleBasedStateMachine):
    """A record, and what it should say: for each row its token and the pass that computed it, None where unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.record = RowRecord(has_passes=True)
        self.rows: list[tuple[int, RowPass] | None] = []

    @rule(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=9))
    def run(self, tokens: list[int]) -> None:
        start, is_known = len(self.rows), None not in self.rows
        self.record.ran(start, tokens)
        one = RowPass(start, len(tokens))
        self.rows += [(token, one) if is_known else None for token in tokens]

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        position = int(share * len(self.rows))
        self.record.cut(position)
        del self.rows[position:]

    @rule(share=st.floats(0, 1))
    def lose(self, share: float) -> None:
        position = int(share * len(self.rows))
        self.record.lose(position)
        self.rows[position:] = [None] * max(1, len(self.rows) - position)

    @invariant()
    def says_what_is_known(self) -> None:
        self.record.check()
        known = [row for row in self.rows if row is not None]
        assert self.record.is_whole == (None not in self.rows)
        assert self.record.tokens == [token for token, _ in known]
        assert self.record.passes == list(dict.fromkeys(one for _, one in known))


class Saving(RuleBasedStateMachine):
    """Jobs, and for each whether rows that it copies were cut since it was given out."""

    def __init__(self) -> None:
        super().__init__()
        self.states = SavingBlocks()
        self.jobs: dict[SaveJob, bool] = {}
        self.done: set[SaveJob] = set()

    @rule(n_blocks=st.integers(0, 6))
    def complete(self, n_blocks: int) -> None:
        before = dict(self.states.states())
        jobs = self.states.completed(range(n_blocks))
        assert [job.block for job in jobs] == [block for block in range(n_blocks) if block not in before]
        assert not self.jobs.keys() & set(jobs)
        self.jobs.update(dict.fromkeys(jobs, True))

    @rule(n_rows=st.integers(0, 7 * BLOCK_ROWS))
    def cut(self, n_rows: int) -> None:
        self.states.cut(n_rows)
        for job in self.jobs:
            self.jobs[job] &= (job.block + 1) * BLOCK_ROWS <= n_rows

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if self.jobs:
            job = data.draw(st.sampled_from(list(self.jobs)))
            was_queued = dict(self.states.states()).get(job.block) == QUEUED
            assert self.states.begins(job) == (self.jobs[job] and was_queued and job not in self.done)
            self.done.add(job)

    @rule(data=st.data(), is_kept=st.booleans())
    def end(self, data: st.DataObject, is_kept: bool) -> None:
        if self.jobs:
            job = data.draw(st.sampled_from(list(self.jobs)))
            was_writing = self.states.is_valid(job)
            before = dict(self.states.states())
            self.states.ended(job, is_kept=is_kept)
            after = dict(self.states.states())
            assert (before != after) == was_writing
            assert not was_writing or (after[job.block] == KEPT) == is_kept

    @invariant()
    def only_what_is_unchanged_is_copied(self) -> None:
        for job, is_unchanged in self.jobs.items():
            assert is_unchanged or not self.states.is_valid(job)
        assert self.states.n_waiting == sum(s in (QUEUED, WRITING) for _, s in self.states.states())


TestRows = Rows.TestCase
TestSaving = Saving.TestCase
for case in (TestRows, TestSaving):
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2), max_size=1200), st.integers(0, 1200), st.sampled_from([16, 48, 512]))
@settings(max_examples=40, deadline=None)
def test_texts_share_the_names_of_what_they_share(text: list[int], changed: int, width: int) -> None:
    other = [*text[:changed], *(token + 1 for token in text[changed:])]
    passes = reading(len(text), width)
    names, others = (block_names(ROOT, tokens, passes) for tokens in (text, other))
    same = min(changed, len(text)) // BLOCK_ROWS
    assert names[:same] == others[:same]
    assert not set(names[same:]) & set(others[same:])
    assert not set(names) & set(block_names(ROOT, text, reading(len(text), width - 1)))
    assert not set(names) & set(block_names(bytes([1] * 16), text, passes))


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(1, 600))
def test_a_prompt_goes_on_where_its_passes_begin(n_tokens: int, most: int, width: int) -> None:
    stop = last_stop(reading(n_tokens, width), most)
    assert stop <= min(n_tokens, most)
    assert stop == n_tokens or stop == min(n_tokens - 1, most) // width * width


@contextmanager
def memory(n_cells: int) -> Iterator[tuple[np.ndarray, KvLayout]]:
    """Memory with rows, columns, a state and a ring, and bytes before, between and after them that are nobody's."""
    rng = np.random.default_rng(0)
    space = rng.integers(0, 256, 64 + n_cells * (8 + 3 * 2) + 64 + 100 + 64 + RING_CELLS * 3 * 2 + 64, np.uint8)
    base = space.ctypes.data
    rows = CellTensor(base + 64, n_cells, 8)
    columns = CellTensor(base + 64 + 8 * n_cells, n_cells, 2, 3)
    state = base + 128 + 14 * n_cells
    ring = CellTensor(state + 164, RING_CELLS, 2, 3)
    yield space, KvLayout((rows, columns), [(state, 100)], [ring])


@pytest.mark.parametrize(
    ("n_cells", "n_tokens", "n_kept"),
    [(RING_CELLS, 1, 1), (RING_CELLS, 999, 999), (RING_CELLS, 2000, RING_CELLS), (BLOCK_ROWS, 1, BLOCK_ROWS)],
)
def test_of_a_ring_those_cells_are_kept_that_a_token_can_have(n_cells: int, n_tokens: int, n_kept: int) -> None:
    """Of a large one 66 MB were written after each answer, mostly zeros. Of a few cells anyone may be in use."""
    layout = KvLayout((), (), [CellTensor(1 << 20, n_cells, 2, 3)])
    assert layout.needs_snapshots
    assert layout.snapshot_bytes(0, n_tokens) == n_kept * 6
    strips = [(part.address, part.strip_bytes, part.n_strips) for part in layout.snapshot_parts(0, n_tokens)]
    assert strips == [(1 << 20, n_kept * 2, 3)]


def test_a_file_system_that_takes_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written and read all the same."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with memory(BLOCK_ROWS) as (space, layout):
        parts = list(layout.row_parts(0, BLOCK_ROWS))
        head = RowsHead(bytes(16), tuple(range(BLOCK_ROWS)), layout.row_bytes(BLOCK_ROWS))
        copies = [copy_part(part) for part in parts]
        write_rows(tmp_path / "rows", head, copies)
        space[:] = 0
        read_rows(tmp_path / "rows", head, parts, lambda: None, place_part)
        assert [copy_part(part) for part in parts] == copies


@given(st.data(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_torn_file_is_found_and_touches_nothing_else(data: st.DataObject, is_snapshot: bool) -> None:
    with tempfile.TemporaryDirectory() as name, memory(3 * BLOCK_ROWS) as (space, layout):
        path = Path(name, "rows")
        start, stop = BLOCK_ROWS, 2 * BLOCK_ROWS
        list_parts = layout.snapshot_parts if is_snapshot else layout.row_parts
        size_bytes = layout.snapshot_bytes(start, stop) if is_snapshot else layout.row_bytes(stop - start)
        head = RowsHead(bytes(range(16)), tuple(range(BLOCK_ROWS)), size_bytes)
        assert write_rows(path, head, map(copy_part, list_parts(start, stop))) == path.stat().st_size == head.file_bytes
        assert path.stat().st_mode & 0o777 == 0o600
        assert [entry.name for entry in Path(name).iterdir()] == ["rows"]
        before = space.copy()
        for part in list_parts(start, stop):
            for strip in range(part.n_strips):
                at = part.address + strip * (part.stride_bytes or part.strip_bytes) - space.ctypes.data
                space[at : at + part.strip_bytes] ^= 255
        outside = space == before
        assert np.count_nonzero(~outside) == size_bytes
        read_rows(path, head, list_parts(start, stop), lambda: None, place_part)
        assert np.array_equal(space, before)
        content = bytearray(path.read_bytes())
        kind = data.draw(st.sampled_from(["flip", "cut", "longer"]))
        at = data.draw(st.integers(0, len(content) - 1))
        if kind == "flip":
            content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content[:at] if kind == "cut" else content + b"x" * (kind == "longer"))
        with pytest.raises(DamagedRows):
            read_rows(path, head, list_parts(start, stop), lambda: None, place_part)
        assert np.array_equal(space[outside], before[outside])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=25))
@settings(max_examples=40, deadline=None)
def test_the_least_recently_used_goes_first_and_leaves_nothing_behind(uses: list[tuple[int, int]]) -> None:
    """Each use is of the first blocks of one of several texts: what is not there is written."""
    with tempfile.TemporaryDirectory() as name:
        store = PromptStore(Path(name), KeptIdentity(ROOT, {"library": "", "path": "", "file": ""}), 1000)
        used_at: dict[Path, int] = {}
        for moment, (text, n_blocks) in enumerate(uses):
            paths = [store.path_of(bytes([text, depth] * 8), depth) for depth in range(n_blocks)]
            there = [path for path in paths if path.exists()]
            assert there == paths[: len(there)], "a block without the one before it"
            store.used(there)
            used_at.update(dict.fromkeys(there, moment))
            for path in paths[len(there) :]:
                before = {other for other in used_at if other.exists()}
                assert store.make_room(100)
                gone = {other for other in before if not other.exists()}
                kept = before - gone
                assert all(used_at[a] <= used_at[b] for a in gone for b in kept)
                path.write_bytes(bytes(100))
                store.used([*paths[: paths.index(path)], path])
                used_at[path] = moment
            total = sum(path.stat().st_size for path in Path(name).rglob("*.rows"))
            assert total <= 1000
        assert not store.make_room(1001)
