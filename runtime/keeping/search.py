"""Finds how much of a prompt is kept, and in which files. Nothing is read but the folder's names."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_run.base.interrupt import CHECK_S, JoinedThread, go_on
from edge_run.runtime.keeping.store import PromptStore, is_there
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout
from edge_run.tiers.kv.record import RowPass, block_names, last_stop, part_name

T = TypeVar("T")
PATIENCE_S, BLOCK_PATIENCE_S = 15.0, 0.1  # of a lookup: a drive in standby starts; and for each block of the prompt


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """The beginning of a prompt that is kept.

    position: the tokens that can be had. passes: those that computed them (`RowRecord`). blocks: the files of complete
    blocks. snapshot: what else is needed, where rows alone do not bring a context back.
    """

    position: int
    passes: Sequence[RowPass] | None
    blocks: Sequence[Path]
    snapshot: Path | None = None


class PatientDrive:
    """Asks a drive in a thread, and waits for a while only. While it has not answered, it hangs."""

    def __init__(self) -> None:
        self._thread: JoinedThread | None = None

    @property
    def hangs(self) -> bool:
        """Whether what was asked last has no answer yet."""
        return self._thread is not None and not self._thread.has_ended.is_set()

    def ask(self, function: Callable[[], T], patience_s: float, check: Callable[[], None] = go_on) -> T:
        """Return what `function` returns, or raise what it raises. Raises TimeoutError where it takes longer.

        check: runs meanwhile, and may raise to stop.
        """
        answers, errors = list[T](), list[BaseException]()

        def run() -> None:
            try:
                answers.append(function())
            except BaseException as error:
                errors.append(error)

        thread = JoinedThread(run, "edge-run-lookup")
        try:
            thread.start()
        except RuntimeError:  # no thread more can be started
            return function()
        self._thread = thread
        until_s = time.monotonic() + patience_s
        while not thread.has_ended.wait(max(0.0, min(CHECK_S, until_s - time.monotonic()))):
            check()
            if time.monotonic() >= until_s:
                raise TimeoutError
        if errors:
            raise errors[0]
        return answers[0]


class PrefixSearch:
    """Looks for what is kept of a model's prompts.

    root: the key of its rows. layout: what a context keeps.
    """

    def __init__(self, store: PromptStore, root: bytes, layout: KvLayout) -> None:
        self._store, self._root, self._layout = store, root, layout

    def block_paths(self, tokens: Sequence[int], passes: Sequence[RowPass] | None) -> list[Path]:
        """Return where the complete blocks of `tokens` are, or would be."""
        names = block_names(self._root, tokens, passes)
        return [self._store.path_of(name, depth) for depth, name in enumerate(names)]

    def snapshot_path(self, tokens: Sequence[int], passes: Sequence[RowPass] | None) -> Path:
        """Return where a snapshot after all of `tokens` is, or would be."""
        return self._snapshot_at(len(tokens), tokens, passes, block_names(self._root, tokens, passes))

    def _snapshot_at(
        self, position: int, tokens: Sequence[int], passes: Sequence[RowPass] | None, names: Sequence[bytes]
    ) -> Path:
        """Return where a snapshot after the first `position` of `tokens` is; names: of their complete blocks."""
        n_blocks = position // BLOCK_ROWS
        parent = names[n_blocks - 1] if n_blocks else self._root
        name = part_name(parent + b"snapshot", tokens, passes, n_blocks * BLOCK_ROWS, position)
        return self._store.path_of(name, n_blocks)

    def longest(
        self, tokens: Sequence[int], passes: Sequence[RowPass] | None, most: int
    ) -> tuple[KeptPrefix | None, int]:
        """Return what is kept of the first `most` tokens of `tokens`, and of how many tokens there are blocks.

        passes: those that would compute `tokens`.
        """
        names = block_names(self._root, tokens, passes)
        blocks = [self._store.path_of(name, depth) for depth, name in enumerate(names)]
        has_rows = self._layout.row_bytes(1) > 0
        if has_rows:
            blocks = blocks[: next((i for i, path in enumerate(blocks) if not is_there(path)), len(blocks))]
        n_rows = len(blocks) * BLOCK_ROWS
        if not self._layout.needs_snapshots:
            position = last_stop(passes, min(n_rows, most))
            n_needed = -(-position // BLOCK_ROWS)
            return (KeptPrefix(position, passes, blocks[:n_needed]) if position else None), n_rows
        assert passes is not None
        for position in self._stops(passes, min(n_rows + BLOCK_ROWS - 1, most, len(tokens))):
            shorter = passes[: bisect_left(passes, (position, 0))]
            path = self._snapshot_at(position, tokens, shorter, names)
            if is_there(path):
                used = blocks[: position // BLOCK_ROWS] if has_rows else []
                return KeptPrefix(position, shorter, used, path), n_rows * has_rows
        return None, n_rows * has_rows

    def _stops(self, passes: Sequence[RowPass], most: int) -> Iterator[int]:
        """Yield `most`, where a pass may have been cut, and the positions before it after which passes begin."""
        position = most
        while position > 0:
            yield position
            position = last_stop(passes, position - 1)
