"""Who has the part of a budget that changes hands between passes: a state machine without I/O.

A context's keys and values take memory as its text grows, and the buffers of batches with many tokens are idle while
single tokens are decoded. A budget has room for both in full. What the next pass does not need of that room is lent to
weights, in loans of one size each, and is returned before a pass that needs it. Where memory is short, weights may have
to give up some of their own: then they have less than no loans.

One event (`before_pass`), what to do about it, and the note that it is done. Not thread-safe: it is asked between
passes only.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.units import MIB

LEAST_IDLE_BYTES = 4 * MIB
MARGIN_BYTES = 2 * MIB  # attention scores grow with the text


def idle_bytes(buffer_bytes: int, touched_bytes: int) -> int:
    """Return what narrow passes leave of a compute buffer of which they touch `touched_bytes`; 0 for too little."""
    idle = buffer_bytes - touched_bytes - MARGIN_BYTES
    return idle if idle >= LEAST_IDLE_BYTES else 0


@dataclass(frozen=True, slots=True)
class Settlement:
    """What is done before a pass begins.

    n_returned: loans that weights give back first.
    n_granted: loans that weights get then; never together with the former.
    """

    n_returned: int = 0
    n_granted: int = 0


class Loans:
    """The room for keys, values and buffers, and how much of it weights have.

    pool_bytes: the room in all.
    loan_bytes: the size of one loan.
    most_loans: as many as weights have a use for.
    least_loans: 0, or less by what they can give up of their own.
    n_loans: those that weights have now.
    needed_bytes: what the pass in progress was promised, or the last one.
    times_granted: how often weights got more.
    """

    def __init__(self, pool_bytes: int, loan_bytes: int, most_loans: int, least_loans: int = 0) -> None:
        assert min(pool_bytes, most_loans) >= 0 >= least_loans
        assert loan_bytes > 0
        self.pool_bytes, self.loan_bytes = pool_bytes, loan_bytes
        self.most_loans, self.least_loans = most_loans, least_loans
        self.n_loans = self.needed_bytes = self.times_granted = self._next_bytes = 0

    def loans_beside(self, needed_bytes: int) -> int:
        """Return how many loans weights may have while a pass needs `needed_bytes` of the pool."""
        return max(self.least_loans, min(self.most_loans, (self.pool_bytes - needed_bytes) // self.loan_bytes))

    def has_room(self, needed_bytes: int) -> bool:
        """Return whether the pool has `needed_bytes` beside the least that weights can do with."""
        return self.loans_beside(needed_bytes) * self.loan_bytes + needed_bytes <= self.pool_bytes

    def before_pass(self, needed_bytes: int) -> Settlement:
        """Return what is to be done before a pass that needs `needed_bytes` of the pool, which may be more than all."""
        n_loans = self.loans_beside(needed_bytes)
        self._next_bytes = needed_bytes
        return Settlement(max(0, self.n_loans - n_loans), max(0, n_loans - self.n_loans))

    def settled(self, settlement: Settlement) -> None:
        """Note that weights have done what `before_pass` said last."""
        self.n_loans += settlement.n_granted - settlement.n_returned
        self.needed_bytes = self._next_bytes
        self.times_granted += settlement.n_granted > 0

    @property
    def lacking_bytes(self) -> int:
        """What is needed, and neither in the pool nor to be had from weights."""
        return max(0, self.n_loans * self.loan_bytes + self.needed_bytes - self.pool_bytes)

    def check(self) -> None:
        """Raise AssertionError where what is lent and what the pass needs are more than the pool."""
        assert self.least_loans <= self.n_loans <= self.most_loans
        assert self.n_loans == self.least_loans or not self.lacking_bytes
