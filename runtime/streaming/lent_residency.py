"""Room that passes do not need is lent to weights: of keys and values not written yet, idle buffers, rows and work.

A budget has room for a context's keys and values in full, a draft model's too, for llama.cpp's compute buffer, which is
made for a micro-batch, and for as many rows of logits as a pass may have. As long as a text is short most of the first
is unused; a pass of one token touches little of the second, and has one row. What the next pass does not need holds
weights that would stream otherwise, and is taken back before a pass that needs it: always between passes, when a buffer
holds nothing that counts (`runtime/decoding/compute_buffer.py`) and cells that no token has are not looked at. So what
is computed is the same.

How much of the buffer a narrow pass touches is known from its graph. That it is so is looked up before every pass, and
where it is not, buffers are lent no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from edge_run.base.errors import Cancelled, option
from edge_run.base.units import format_size
from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.llama.logit_rows import LogitRows
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import CellCount, Cells
from edge_run.tiers.kv.loans import Loans
from edge_run.tiers.kv.spill import Spill

logger = logging.getLogger(__name__)

MOST_EXCESSES = 2


class Borrower(Protocol):
    """Weights that stream, of which more stay while room is lent to them."""

    @property
    def most_loans(self) -> int:
        """Loans that it has a use for; each is of `loan_bytes`."""
        ...

    @property
    def least_loans(self) -> int:
        """Fewer than none, where it can give up memory of its own; else 0."""
        ...

    @property
    def loan_bytes(self) -> int:
        """The size of a loan."""
        ...

    def borrow(self, n_loans: int) -> None:
        """Have `n_loans` loans from now on, more or fewer than before; only between passes.

        What raises, as a stop does, leaves at least as many as are to be left; it is asked for again then.
        """
        ...


class NoBorrower:
    """Where nothing has a use for room that is lent."""

    most_loans, least_loans, loan_bytes = 0, 0, 1

    def borrow(self, n_loans: int) -> None:
        """Do nothing: there are no loans."""


class IdleBuffer:
    """The part of llama.cpp's compute buffer that passes of at most `narrow_tokens` tokens leave idle.

    size_bytes: how large it is.
    is_over: such passes were found to touch it, so that it is never idle again.
    """

    def __init__(self, buffer: ComputeBuffer, size_bytes: int, narrow_tokens: int = 1) -> None:
        self._buffer, self._narrow_tokens = buffer, narrow_tokens
        self.size_bytes, self.is_over = size_bytes, not size_bytes
        self._is_lent = False
        self._kept_bytes = self._excesses = 0

    def needed_bytes(self, n_tokens: int) -> int:
        """Return what of it a pass of `n_tokens` tokens needs, nothing or all; give back what the last one touched."""
        if self.is_over or n_tokens > self._narrow_tokens:
            self._is_lent = False
        elif self._is_lent:
            self._look()
        elif self._buffer.size_bytes:  # else the last pass ended before its first node, which tells where it is
            self._kept_bytes = self._buffer.size_bytes - self.size_bytes
            self._buffer.drop()
            self._is_lent, self._excesses = True, 0
        return 0 if self._is_lent else self.size_bytes

    def _look(self) -> None:
        """Give back what narrow passes touched in more places than one; lend no more where one takes too much."""
        found = self._buffer.resident_bytes()
        self._excesses = self._excesses + 1 if found > self._kept_bytes else 0
        if found > self._kept_bytes:
            self._buffer.drop()
        if self._excesses >= MOST_EXCESSES:
            self._end(f"a narrow pass touches {found} bytes of the compute buffer, not {self._kept_bytes}")

    def _end(self, why: str) -> None:
        logger.info("%s: it is lent no more", why)
        self.is_over, self._is_lent = True, False


class CellRoom:
    """The memory of a context's keys and values, as far as they are written."""

    def __init__(self, cells: Cells, spill: Spill | None = None) -> None:
        """spill: of a context of one sequence, or of streams, where what has no room goes."""
        self._streams, self._spill = cells.streams, spill
        all_cells = max((tensor.n_cells for tensor in self._streams[0].tensors), default=0)
        self._dirty_cells = [all_cells] * len(self._streams)  # llama.cpp cleared all

    def needed_bytes(self, kept_cells: Sequence[int], n_cells: Sequence[int]) -> int:
        """Return what the first `n_cells` cells of each stream take; give back what is not in the first `kept_cells`.

        No others may be in use. What has no room in memory is sent away; raises TierReadError where the drive refuses
        that.
        """
        cut = [number for number, dirty in enumerate(self._dirty_cells) if kept_cells[number] < dirty]
        if self._spill:
            for number, n_rows in enumerate(kept_cells):
                self._spill.cut(number, n_rows)
        for number in cut:
            self._drop_from(number, kept_cells[number])
        self._dirty_cells = list(n_cells)
        full_bytes = sum(stream.bytes_for(n) for stream, n in zip(self._streams, n_cells, strict=True))
        if self._spill is None:
            return full_bytes
        held_bytes = self._spill.settle(kept_cells, full_bytes)
        for number in cut:
            self._drop_from(number, kept_cells[number])  # what was cut came back with the rest of its piece
        return held_bytes

    def _drop_from(self, number: int, n_cells: int) -> None:
        stream = self._streams[number]
        for tensor in stream.tensors:
            for address, length in tensor.unused(n_cells, stream.page_bytes):
                _libc.drop_pages(address, length)


class WorkRoom:
    """The memory in which products convert their inputs, beyond what passes of at most `narrow_tokens` tokens take.

    llama.cpp keeps as much as its widest pass took. What products in row slices took is freed.
    """

    def __init__(self, narrow_tokens: int, kept_bytes: int, freed_bytes: int, free: Callable[[], None]) -> None:
        """kept_bytes, freed_bytes: what a token of a pass takes. free: frees what row slices took so far."""
        self._narrow_tokens, self._free = narrow_tokens, free
        self._kept_bytes, self._freed_bytes = kept_bytes, freed_bytes
        self._widest = self._widest_unfreed = narrow_tokens

    def needed_bytes(self, n_tokens: int) -> int:
        """Return what there is with a pass of `n_tokens` tokens more."""
        if max(n_tokens, self._narrow_tokens) < self._widest_unfreed:
            self._free()
            self._widest_unfreed = self._narrow_tokens
        self._widest, self._widest_unfreed = (max(n, n_tokens) for n in (self._widest, self._widest_unfreed))
        kept = (self._widest - self._narrow_tokens) * self._kept_bytes
        return kept + (self._widest_unfreed - self._narrow_tokens) * self._freed_bytes


class LentResidency:
    """Lends to a borrower before each pass what the pass leaves, and takes back what it needs.

    A draft model's passes come between those of the model, or run beside one. What they need was divided before. Where
    the process may hold less than its budget, as the limit of its control group fell, weights have so much less.

    loans: how much is lent.
    count: of the context's cells in use.
    lacking_bytes: returns how much less than its budget the process may hold now.
    say: is told, once, that this is more than weights can give up.
    on_cut: is told, before room is divided, how many of the context's cells are in use, those of all streams together.
    """

    def __init__(
        self,
        loans: Loans,
        borrower: Borrower,
        buffer: IdleBuffer,
        cells: CellRoom | None = None,
        count: CellCount | None = None,
        draft_cells: CellRoom | None = None,
        work: WorkRoom | None = None,
        rows: LogitRows | None = None,
    ) -> None:
        """Lend to `borrower`, to whom nothing was lent yet.

        cells: of the context; None where they keep all their memory. count: tells up to which of them anything is
        written. draft_cells: those of the draft model's context. work, rows: None where they keep all
        their memory.
        """
        self.loans, self._borrower, self._buffer = loans, borrower, buffer
        self._cells, self.count, self._draft_cells, self._work = cells, count, draft_cells, work
        self._rows, self._own_bytes = rows, loans.pool_bytes
        self._draft_cell_bytes = self._draft_idle_bytes = self._held_idle_bytes = 0
        self.lacking_bytes: Callable[[], int] = lambda: 0
        self.say: Callable[[str], None] = logger.warning
        self.on_cut: Callable[[int], None] = lambda n_cells: None
        self._has_told_lack = False

    def before_pass(self, n_tokens: int, n_outputs: int = 1) -> None:
        """Divide the room for a pass of `n_tokens` tokens, which must be the next one.

        n_outputs: of these, how many have logits.
        """
        own_bytes = self._buffer.needed_bytes(n_tokens) + (self._work.needed_bytes(n_tokens) if self._work else 0)
        own_bytes += self._rows.needed_bytes(n_outputs) if self._rows else 0
        if self._cells and self.count:
            kept_cells = self.count.tops
            self.on_cut(sum(kept_cells))
            self.count.add(n_tokens)
            own_bytes += self._cells.needed_bytes(kept_cells, self.count.tops)
        self._own_bytes = own_bytes
        self._divide_again()
        self._tell_lack()

    def before_drafting(self, kept_tokens: int, most_tokens: int) -> bool:
        """Divide the room for passes of the draft model; return whether there is room.

        There is none after a stop, nor for what a draft gave back while the process may hold less than its budget.

        kept_tokens: the tokens in its context.
        most_tokens: as many may be there until this is called again.
        """
        if self._draft_cells:
            self._draft_cell_bytes = self._draft_cells.needed_bytes([kept_tokens], [most_tokens])
        if not (self._draft_cells or self._draft_idle_bytes):
            return True
        before_bytes, all_bytes = self._held_idle_bytes, self._own_bytes + self._draft_cell_bytes
        all_bytes += self._draft_idle_bytes + self.lacking_bytes()
        if before_bytes < self._draft_idle_bytes and not self.loans.has_room(all_bytes):
            return False
        self._held_idle_bytes = self._draft_idle_bytes
        try:
            self._divide_again()
        except BaseException as error:
            self._held_idle_bytes = before_bytes
            if isinstance(error, Cancelled):  # as the next pass will be
                return False
            raise
        return True

    def hold_draft(self, idle_bytes: int) -> None:
        """Note that a draft model holds so much of the room, but for the time from `rest_draft` to a guess."""
        self._draft_idle_bytes = self._held_idle_bytes = idle_bytes
        self._own_bytes = self.loans.pool_bytes - idle_bytes

    def rest_draft(self) -> None:
        """Have the next pass divide what the draft model gave back."""
        self._held_idle_bytes = 0

    def _divide_again(self) -> None:
        self._divide(self._own_bytes + self._draft_cell_bytes + self._held_idle_bytes)

    def take_back(self) -> None:
        """Take everything back until the next pass."""
        self._divide(self.loans.pool_bytes)

    def _tell_lack(self) -> None:
        lacking_bytes, fallen_bytes = self.loans.lacking_bytes, self.lacking_bytes()
        if lacking_bytes and fallen_bytes and not self._has_told_lack:
            self._has_told_lack = True
            self.say(
                f"the memory limit of this control group fell {format_size(fallen_bytes)} below what the run was "
                f"given, {format_size(lacking_bytes)} more than it can do without: it goes on, and may become slow or "
                f"be ended; raise the limit, or start it again with less {option('memory')}"
            )

    def _divide(self, needed_bytes: int) -> None:
        settlement = self.loans.before_pass(needed_bytes + self.lacking_bytes())
        if settlement.n_returned or settlement.n_granted:
            self._borrower.borrow(self.loans.n_loans + settlement.n_granted - settlement.n_returned)
        self.loans.settled(settlement)
