"""Keeps the rows of one context on disk as they are computed, and brings them back for prompts that begin alike.

What is brought back has the bits that reading the whole prompt in one go would have computed, or, of a conversation
that goes on, those that its own passes computed: rows are kept under the passes that they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edge_run.base.errors import Cancelled, ContextFull, KernelError
from edge_run.base.interrupt import go_on
from edge_run.base.protocols import BatchToken
from edge_run.base.units import MIB
from edge_run.runtime.keeping.restoring import NO_ANSWER, RowRestorer
from edge_run.runtime.keeping.search import BLOCK_PATIENCE_S, PATIENCE_S, KeptPrefix, PatientDrive, PrefixSearch
from edge_run.runtime.keeping.store import PromptStore, remove
from edge_run.runtime.keeping.writer import HANG_S, BlockToWrite, BlockWriter, Copies
from edge_run.tiers.kv.block_file import RowsHead
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout
from edge_run.tiers.kv.record import RowPass, RowRecord, first_without_room, last_stop, reading
from edge_run.tiers.kv.row_watcher import RowWatcher
from edge_run.tiers.kv.saving import SavingBlocks

_MOST_TRIES = 3  # at a prompt of which files turn out to be damaged


@dataclass(frozen=True, slots=True)
class ConversationRows:
    """What a conversation's rows are named after: its tokens, and the passes that computed them (None: any)."""

    tokens: Sequence[int] = ()
    passes: Sequence[RowPass] | None = None

    def within(self, tokens: Sequence[int]) -> ConversationRows:
        """Return what the first rows are named after, as far as they are of a text of these tokens."""
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        n_shared = next((n for n, (one, other) in pairs if one != other), min(len(self.tokens), len(tokens)))
        passes = None if self.passes is None else [one for one in self.passes if one.start < n_shared]
        return ConversationRows(self.tokens[:n_shared], passes)


class PromptKeeper(RowWatcher):
    """The prompt cache of one context. Not thread-safe; its writer has a thread.

    It is over 200 lines because all that happens to rows, reading them back too, changes the one record of them.
    """

    def __init__(
        self,
        store: PromptStore,
        key: bytes,
        layout: KvLayout,
        restorer: RowRestorer,
        *,
        width: int,
        has_passes: bool,
        say: Callable[[str], None],
        check: Callable[[], None] = go_on,
    ) -> None:
        """width: tokens in a pass of a prompt. has_passes: whether bits depend on passes. say: is told what failed.

        check: runs while a lookup is waited for, and may raise to end it.
        """
        self._store, self._key, self._layout, self._restorer = store, key, layout, restorer
        self._width, self._say, self._check = width, say, check
        self._search = PrefixSearch(store, key, layout)
        self._drive = PatientDrive()
        self._record = RowRecord(has_passes=has_passes)
        self._states = SavingBlocks()
        self._writer = BlockWriter(store, layout, self._states)
        self._snapshots: set[int] = set()  # positions at which one is taken
        self._turns: list[Path] = []  # those after the latest answers of the conversation
        self._is_placing = self._is_off = False
        self._told_bytes = -1  # what was written when a failure was told last: it is told again after something was
        self._expected: ConversationRows | None = None
        self.keeps_answers = False

    @property
    def written_bytes(self) -> int:
        """What was written so far."""
        return self._writer.written_bytes

    @property
    def rows(self) -> ConversationRows:
        """What the context holds, to go on with in another process (`expect`)."""
        record = self._record
        return ConversationRows(tuple(record.tokens), None if record.passes is None else tuple(record.passes))

    def expect(self, rows: ConversationRows) -> None:
        """Look for these rows of a conversation too when the next prompt comes."""
        self._expected = rows

    def resume(self, prompt: Sequence[int], held: int) -> int | None:
        """Make the context hold the longest beginning of `prompt` that is kept, if it is longer than `held` tokens.

        Returns the tokens that the context holds then; None where it was not touched. Raises Cancelled in the middle of
        reading rows, after which it is empty; before that, it leaves this to the pass that follows. Where llama.cpp
        does not do as it did when the rows were kept, none are taken any more. Without a held token the context is
        emptied: what other sequences had left may not lie as it does in a new one.
        """
        self._snapshots = set()
        if not held:
            self._restorer.clear()
        result, failure, tried = None, "", list[KeptPrefix]()
        for _ in range(0 if self._is_off or self._drive.hangs else _MOST_TRIES):
            try:
                patience_s = PATIENCE_S + BLOCK_PATIENCE_S * len(prompt) / BLOCK_ROWS
                prefix, self._snapshots = self._drive.ask(partial(self._longest, prompt), patience_s, self._check)
            except TimeoutError:
                self._say_no_answer()
                break
            except Cancelled:
                return result
            if prefix is None or prefix.position <= (held if result is None else result):
                break
            if tried.count(prefix) > 1:  # once more, as a drive that is reset answers then
                if prefix.snapshot and not failure.endswith(NO_ANSWER):
                    remove(prefix.snapshot)  # it is written anew
                break
            tried.append(prefix)
            try:
                result, failure = self._restore(prefix, prompt)
            except ContextFull:  # which is empty now
                result = 0
                break
            except KernelError as error:
                self._is_off, result = True, 0
                self._say(f"prompt cache: off: {error}")
                break
            if not failure:
                break
            self._say(f"prompt cache: {failure}; computed again")
        self._expected = None
        return result

    def finish(self) -> None:
        """An answer is complete: keep what a conversation needs to go on."""
        if self.keeps_answers and self._layout.needs_snapshots and self._record.tokens and not self._drive.hangs:
            if path := self._snapshot():
                self._turns = [one for one in self._turns if one != path] + [path]
            # The one before stays: what tells of the conversation is written after its rows.
            for old in self._turns[:-2]:
                remove(old)
            del self._turns[:-2]
        self._tell_failure()

    def flush(self) -> None:
        """Wait until all that was given to the writer is on disk."""
        self._writer.close()
        self._tell_failure()

    def close(self) -> None:
        """Write what is complete. Idempotent."""
        self.flush()

    def ran(self, tokens: Sequence[BatchToken]) -> None:
        """Have blocks written that a pass has completed."""
        if self._is_placing:
            return
        self._tell_failure()  # of blocks that came before: who answers in shared passes says nothing of an end
        record = self._record
        before = len(record.tokens)
        if any(token.sequence or token.branches for token in tokens):
            record.lose(min(token.position for token in tokens))
            return
        record.ran(tokens[0].position, [token.token for token in tokens])
        if len(record.tokens) // BLOCK_ROWS > before // BLOCK_ROWS:
            self._save_blocks()
        is_wanted = len(record.tokens) in self._snapshots and len(record.tokens) == self._read_in_one_go()
        if is_wanted and not self._drive.hangs:
            self._snapshot()

    def cut(self, sequence: int, position: int) -> None:
        """Let no block be written that is about to lose rows.

        Of what is not kept by rows no more is kept before the context is cleared: a sequence that is emptied may get
        other memory for its recurrent state than the first one of a new context.
        """
        if self._is_placing or sequence:
            return
        if not position:
            self._turns.clear()
        with self._writer.lock:
            self._states.cut(position)
        last = self._record.passes[-1] if self._record.passes else None
        is_within = last and 0 < position < last.start + (last.width > 1)
        if self._layout.needs_snapshots and (is_within or not position):
            self._record.lose(0)  # a ring is not what passes up to there would have left
        else:
            self._record.cut(position)

    def cleared(self) -> None:
        """Keep what comes next."""
        self._record.cut(0)

    def taken_back(self, n_tokens: int) -> None:
        """Keep nothing of a ring in which passes began to overwrite what no window reaches.

        A token that was alone leaves its cell to the next one; where there were several, others are the next.
        """
        if self._layout.needs_snapshots and n_tokens > 1:
            self._record.lose(0)

    def branched(self, position: int) -> None:
        """From `position` on, rows need not lie in the order of the text."""
        with self._writer.lock:
            self._states.cut(position)
        self._record.lose(position)

    def _longest(self, prompt: Sequence[int]) -> tuple[KeptPrefix | None, set[int]]:
        """Return the longest beginning of `prompt` that is kept, less than all of it, and where snapshots are wanted.

        It changes nothing, as it may come late, of a drive that was gone on without.
        """
        most, snapshots = len(prompt) - 1, set[int]()
        passes = None if self._record.passes is None else reading(len(prompt), self._width)
        best, n_rows = self._search.longest(prompt, passes, most)
        if self._layout.needs_snapshots:
            snapshots = {last_stop(passes, most), last_stop(passes, min(n_rows, most))} - {0}
        expected = self._expected
        if expected is not None and (expected.passes is None) == (passes is None):
            same = zip(prompt, expected.tokens, strict=False)
            common = next((i for i, (ours, theirs) in enumerate(same) if ours != theirs), len(expected.tokens))
            common = min(common, len(prompt))
            begun = None if expected.passes is None else [one for one in expected.passes if one.start < common]
            room = first_without_room(begun or (), self._restorer.context_tokens, self._width)
            other, _ = self._search.longest(expected.tokens[:common], begun, min(most, common, room))
            if other and (best is None or other.position > best.position):
                best = other
        return best, snapshots

    def _restore(self, prefix: KeptPrefix, prompt: Sequence[int]) -> tuple[int, str]:
        """Bring `prefix` back; return how many tokens the context holds, and what failed."""
        with self._writer.lock:
            self._states.cut(0)
        self._record.cut(0)
        self._turns.clear()
        self._is_placing = True
        try:
            position, failure = self._restorer.restore(prefix, prompt)
            position = position if prefix.snapshot else last_stop(prefix.passes, position)
            if not prefix.snapshot:
                self._restorer.cut(position)
        finally:
            self._is_placing = False
        passes = [one for one in prefix.passes or () if one.start < position]
        self._record.restore(prompt[:position], passes)
        with self._writer.lock:
            self._states.restored(position // BLOCK_ROWS)
        self._store.used([*prefix.blocks, *([prefix.snapshot] if prefix.snapshot else [])])
        return position, failure

    def _save_blocks(self) -> None:
        """Give the writer the complete blocks that are worth keeping and that it was not given before."""
        record = self._record
        if not self._layout.row_bytes(1) or self._drive.hangs or self._writer.is_resting:
            return
        self._writer.resume()
        n_blocks = (len(record.tokens) if self.keeps_answers else self._read_in_one_go()) // BLOCK_ROWS
        with self._writer.lock:
            jobs = self._states.completed(range(n_blocks))
        if not jobs:
            return
        paths = self._search.block_paths(record.tokens, record.passes)
        for job in jobs:
            tokens = tuple(record.tokens[job.block * BLOCK_ROWS : (job.block + 1) * BLOCK_ROWS])
            head = RowsHead(self._key, tokens, self._layout.row_bytes(BLOCK_ROWS))
            self._writer.submit(BlockToWrite(job, head, paths[: job.block + 1]))

    def _read_in_one_go(self) -> int:
        """Return how many of the first tokens have the rows that reading any prompt with them would give."""
        record = self._record
        if record.passes is None:
            return len(record.tokens)
        whole = 0
        for start, width in record.passes:
            if start != whole or width != self._width or start + width > len(record.tokens):
                break
            whole += width
        return whole

    def _snapshot(self) -> Path | None:
        """Write what the next pass changes, and wait for that; return where, or None where it could not be written.

        Nothing is written where more was computed since than is known: what the memory holds is the state after that.
        """
        record = self._record
        if not record.is_whole:
            return None
        stop = len(record.tokens)
        start = stop // BLOCK_ROWS * BLOCK_ROWS
        head = RowsHead(self._key, tuple(record.tokens[start:]), self._layout.snapshot_bytes(start, stop))
        paths = self._search.block_paths(record.tokens, record.passes)
        paths.append(self._search.snapshot_path(record.tokens, record.passes))
        copies, patience_s = Copies(self._layout.snapshot_parts(start, stop)), HANG_S + head.file_bytes / MIB
        try:
            is_kept = self._drive.ask(partial(self._writer.write, paths, head, iter(copies)), patience_s)
        except TimeoutError:
            self._say_no_answer()
            return None
        finally:
            copies.end()  # also after Ctrl-C: what is not copied by now would be of another text
        return paths[-1] if is_kept else None

    def _say_no_answer(self) -> None:
        self._say(f"prompt cache: {self._store.folder}: the drive does not answer; gone on without until it does")

    def _tell_failure(self) -> None:
        failure, written_bytes = self._writer.failure, self._writer.written_bytes
        if failure and self._told_bytes != written_bytes:
            self._told_bytes = written_bytes
            self._say(f"prompt cache: {failure}: nothing more is kept in {self._store.folder} for now")
