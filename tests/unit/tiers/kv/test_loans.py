"""Loans: the pool is divided between a pass and weights, and never more than all of it is given out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge_run.base.units import MIB
from edge_run.tiers.kv.loans import LEAST_IDLE_BYTES, MARGIN_BYTES, Loans, Settlement, idle_bytes


class LoansMachine(RuleBasedStateMachine):
    """Passes that need any part of a pool, or more; what weights are told is done, or somebody stops it."""

    @initialize(
        pool=st.integers(0, 1000),
        loan=st.integers(1, 100),
        most=st.integers(0, 30),
        spare=st.one_of(st.just(0), st.integers(0, 20)),
    )
    def begin(self, pool: int, loan: int, most: int, spare: int) -> None:
        self.loans = Loans(pool, loan, most, -spare)
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


def test_where_a_pool_is_too_small_weights_give_up_what_they_can_of_their_own() -> None:
    loans = Loans(10, 3, 5, least_loans=-2)
    loans.settled(loans.before_pass(14))
    assert (loans.n_loans, loans.lacking_bytes) == (-2, 0)
    loans.settled(loans.before_pass(20))
    assert (loans.n_loans, loans.lacking_bytes) == (-2, 4)
    settlement = loans.before_pass(4)
    assert settlement == Settlement(n_granted=4)


@given(buffer=st.integers(0, 64 * MIB), touched=st.integers(0, 64 * MIB))
def test_idle_is_what_is_not_touched_less_a_margin_or_nothing(buffer: int, touched: int) -> None:
    idle = idle_bytes(buffer, touched)
    assert idle in (0, buffer - touched - MARGIN_BYTES)
    assert (idle > 0) == (buffer - touched - MARGIN_BYTES >= LEAST_IDLE_BYTES)
