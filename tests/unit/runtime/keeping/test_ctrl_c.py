"""Ctrl-C while rows go to files and come from them: it is raised once no thread touches the cells any more."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.runtime.keeping import restoring, writer
from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.runtime.keeping.restoring import RowRestorer
from edge_run.runtime.keeping.search import KeptPrefix
from edge_run.runtime.keeping.store import PromptStore
from edge_run.runtime.keeping.writer import BlockToWrite, BlockWriter
from edge_run.runtime.llama.splitting import _on_large_stack
from edge_run.tiers.kv.block_file import RowsHead, RowsVoid
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout
from edge_run.tiers.kv.saving import SavingBlocks

N_BLOCKS = 12


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell that starts tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressing:
    """Work of threads that takes a while; at the first piece of it somebody presses Ctrl-C, twice."""

    def __init__(self) -> None:
        self.n_begun = self.n_done = 0
        self._main = threading.main_thread().ident or 0

    def work(self, *_: object) -> bytes:
        self.n_begun += 1
        if self.n_begun == 1:
            for _ in range(2):
                time.sleep(0.05)
                signal.pthread_kill(self._main, signal.SIGINT)
        time.sleep(0.05)
        self.n_done += 1
        return b"rows"

    def check(self, act: Callable[[], Any], most: int) -> None:
        """All that was begun, at most so much, must have ended when Ctrl-C is raised out of `act`."""
        with pytest.raises(KeyboardInterrupt):
            act()
        assert self.n_done == self.n_begun <= most
        time.sleep(0.1)
        assert self.n_done == self.n_begun <= most


@pytest.fixture
def rows() -> np.ndarray[Any, Any]:
    return np.ones(N_BLOCKS * BLOCK_ROWS * 8, np.uint8)


@pytest.fixture
def layout(rows: np.ndarray[Any, Any]) -> KvLayout:
    return KvLayout([CellTensor(rows.ctypes.data, N_BLOCKS * BLOCK_ROWS, 8)])


def test_blocks_that_wait_to_be_written_are_not(
    layout: KvLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressing, states = Pressing(), SavingBlocks()
    monkeypatch.setattr(writer, "copy_part", pressing.work)
    store = PromptStore(tmp_path, KeptIdentity(bytes(16), {"library": "", "path": "", "file": ""}), 1 << 20)
    ours = BlockWriter(store, layout, states)
    head = RowsHead(bytes(16), tuple(range(BLOCK_ROWS)), layout.row_bytes(BLOCK_ROWS))
    for job in states.completed(range(N_BLOCKS)):
        ours.submit(BlockToWrite(job, head, [store.path_of(bytes(16), job.block)]))
    pressing.check(ours.close, most=N_BLOCKS - 2)
    assert not ours.failure


def test_rows_that_come_back_are_not_read_any_more(
    rows: np.ndarray[Any, Any], layout: KvLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressing: Any = Pressing()
    monkeypatch.setattr(restoring, "read_rows", pressing.work)
    restorer = RowRestorer(pressing, layout, bytes(16), 64, lambda: None)
    tokens = tuple(range(N_BLOCKS * BLOCK_ROWS))
    prefix = KeptPrefix(len(tokens), None, [tmp_path / str(number) for number in range(N_BLOCKS)])
    pressing.check(lambda: restorer._read_blocks(prefix, tokens), most=N_BLOCKS - 2)
    assert not rows.any(), "nothing is left of files of which some were read"


def test_rows_that_come_too_late_are_not_placed(
    rows: np.ndarray[Any, Any], layout: KvLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a network drive that answers again when the cells have another text."""
    answers, late = threading.Event(), list[BaseException]()
    monkeypatch.setattr(restoring, "HANG_S", 0.1)

    def hang(_: Path, __: object, parts: Any, ___: object, place: Callable[..., None]) -> None:
        assert answers.wait(20)
        try:
            place(next(iter(parts)), b"\1" * 8 * BLOCK_ROWS)
        except BaseException as error:
            late.append(error)
            raise

    monkeypatch.setattr(restoring, "read_rows", hang)
    decoder: Any = None
    restorer = RowRestorer(decoder, layout, bytes(16), 64, lambda: None)
    tokens = tuple(range(N_BLOCKS * BLOCK_ROWS))
    prefix = KeptPrefix(len(tokens), None, [tmp_path / str(number) for number in range(N_BLOCKS)])
    try:
        assert restorer._read_blocks(prefix, tokens) == (0, "the drive does not answer")
    finally:
        answers.set()
    until_s = time.monotonic() + 20
    while len(late) < restoring.READERS and time.monotonic() < until_s:
        time.sleep(0.01)
    assert [type(error) for error in late] == restoring.READERS * [RowsVoid]
    assert not rows.any()


def test_a_text_is_split_to_the_end() -> None:
    pressing = Pressing()
    pressing.check(lambda: _on_large_stack(pressing.work), most=1)


def test_without_another_thread_rows_are_read_here_and_none_are_written(
    layout: KvLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    read = list[Path]()
    monkeypatch.setattr(restoring, "read_rows", lambda path, *_: read.append(path))
    decoder: Any = None
    restorer = RowRestorer(decoder, layout, bytes(16), 64, lambda: None)
    tokens = tuple(range(N_BLOCKS * BLOCK_ROWS))
    paths = [tmp_path / str(number) for number in range(N_BLOCKS)]
    assert restorer._read_blocks(KeptPrefix(len(tokens), None, paths), tokens) == (N_BLOCKS, "")
    assert read == paths
    states = SavingBlocks()
    store = PromptStore(tmp_path, KeptIdentity(bytes(16), {"library": "", "path": "", "file": ""}), 1 << 20)
    ours = BlockWriter(store, layout, states)
    head = RowsHead(bytes(16), tokens[:BLOCK_ROWS], layout.row_bytes(BLOCK_ROWS))
    for job in states.completed(range(2)):
        ours.submit(BlockToWrite(job, head, [store.path_of(bytes(16), job.block)]))
    ours.close()
    assert "thread" in ours.failure
