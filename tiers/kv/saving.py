"""Which blocks of rows are on their way to a file: a state machine without I/O.

A block is saved once, when its rows are complete. While it is copied from memory it must not change, so a cut below its
end makes the job void: what was written so far is thrown away, and new rows begin a new block. Once copied, a block
stays what it was, whatever becomes of the rows.

    open -> queued -> writing -> kept, failed or void
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_run.tiers.kv.layout import BLOCK_ROWS

QUEUED, WRITING, KEPT, FAILED = "queued", "writing", "kept", "failed"


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A block that is to be saved: its number in the context, and which one of that number it is."""

    block: int
    generation: int


class SavingBlocks:
    """The blocks of one context. Not thread-safe: its owner has a lock.

    A block without a state is open: its rows are not complete, or nobody wants it saved.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[str, int]] = {}  # and the generation, by block
        self._generation = 0

    @property
    def n_waiting(self) -> int:
        """Blocks that are queued or being written."""
        return sum(state in (QUEUED, WRITING) for state, _ in self._states.values())

    def completed(self, blocks: range) -> list[SaveJob]:
        """Return the jobs for those of `blocks`, all complete, that were not given to anybody before."""
        jobs = [SaveJob(block, self._generation) for block in blocks if block not in self._states]
        self._states.update({job.block: (QUEUED, job.generation) for job in jobs})
        return jobs

    def restored(self, n_blocks: int) -> None:
        """The first `n_blocks` blocks came from files: they are kept already."""
        self._states.update(dict.fromkeys(range(n_blocks), (KEPT, self._generation)))

    def cut(self, n_rows: int) -> None:
        """Only the first `n_rows` rows are left: blocks that end later are open again, and their jobs void."""
        gone = [block for block in self._states if (block + 1) * BLOCK_ROWS > n_rows]
        for block in gone:
            del self._states[block]
        self._generation += bool(gone)

    def begins(self, job: SaveJob) -> bool:
        """Note that `job` is being written; return False where it is void."""
        return self._move(job, QUEUED, WRITING)

    def is_valid(self, job: SaveJob) -> bool:
        """Return whether the rows that `job` copies are still those that it was made for."""
        return self._states.get(job.block) == (WRITING, job.generation)

    def ended(self, job: SaveJob, *, is_kept: bool) -> None:
        """Note the end of `job`; a void one changes nothing."""
        self._move(job, WRITING, KEPT if is_kept else FAILED)

    def states(self) -> Iterator[tuple[int, str]]:
        """Yield (block, state) of all that are not open."""
        yield from ((block, state) for block, (state, _) in sorted(self._states.items()))

    def _move(self, job: SaveJob, before: str, after: str) -> bool:
        is_there = self._states.get(job.block) == (before, job.generation)
        if is_there:
            self._states[job.block] = after, job.generation
        return is_there
