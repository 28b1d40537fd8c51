"""Loans: the pool is divided between a pass and weights, and never more than all of it is given out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge_run.base.units import MIB
from edge_run.tiers.kv.loans import LEAST_IDLE_BYTES, MARGIN_BYTES, Loans, Settlement, idle_bytes


class LoansMachine(RuleBasedStateMachine):
    """Passes that need any part of a pool, or more; what weights are told is done, or somebody stops it."""

    @initialize(pool=st.integers(0, 1000), loan=st.integers(1, 100), most=st.integers(0, 30))
    def begin(self, pool: int, loan: int, most: int) -> None:
        self.loans = Loans(pool, loan, most)
        self.n_held = self.times_more = 0

    @rule(needed=st.integers(0, 1200), is_stopped=st.booleans())
    def a_pass(self, needed: int, is_stopped: bool) -> None:
        before = self.loans.n_loans, self.loans.needed_bytes
        settlement = self.loans.before_pass(needed)
        assert not (settlement.n_returned and settlement.n_granted)
        assert (self.loans.n_loans, self.loans.needed_bytes) == before, "nothing has been done yet"
        if is_stopped:
            return
        self.n_held += settlement.n_granted - settlement.n_returned
        self.times_more += settlement.n_granted > 0
        self.loans.settled(settlement)
        assert self.loans.needed_bytes == needed
        left = self.loans.pool_bytes - needed
        assert self.n_held == self.loans.most_loans or (self.n_held + 1) * self.loans.loan_bytes > left, "idle room"

    @invariant()
    def never_more_than_the_pool(self) -> None:
        if hasattr(self, "loans"):
            self.loans.check()
            assert self.loans.n_loans == self.n_held
            assert self.loans.times_granted == self.times_more


TestLoans = LoansMachine.TestCase


def test_a_pass_that_needs_all_gets_all() -> None:
    loans = Loans(10, 3, 5)
    loans.settled(loans.before_pass(0))
    assert loans.n_loans == 3
    settlement = loans.before_pass(10)
    assert settlement == Settlement(n_returned=3)
    loans.settled(settlement)
    assert loans.before_pass(50) == Settlement()


@given(buffer=st.integers(0, 64 * MIB), touched=st.integers(0, 64 * MIB))
def test_idle_is_what_is_not_touched_less_a_margin_or_nothing(buffer: int, touched: int) -> None:
    idle = idle_bytes(buffer, touched)
    assert idle in (0, buffer - touched - MARGIN_BYTES)
    assert (idle > 0) == (buffer - touched - MARGIN_BYTES >= LEAST_IDLE_BYTES)
