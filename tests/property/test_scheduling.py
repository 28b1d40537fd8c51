"""Requests that come, end, fail and wait in any order: each is computed whole, and cells are never too few."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.scheduling.scheduler import PassRules, PlannedPass, Scheduler
from edge_run.runtime.scheduling.sequences import SequencePool
from edge_run.runtime.scheduling.widths import PassWidths


class Served(RuleBasedStateMachine):
    """A scheduler, and a context as a decoder would hold it: what each sequence holds, and in how many cells."""

    @initialize(
        n_sequences=st.integers(1, 4),
        n_cells=st.integers(8, 60),
        is_recurrent=st.booleans(),
        width=st.integers(1, 16),
        n_groups=st.integers(1, 3),
    )
    def begin(self, n_sequences: int, n_cells: int, is_recurrent: bool, width: int, n_groups: int) -> None:
        self.now, self.is_recurrent, self.n_cells = 0.0, is_recurrent, n_cells
        self.pool = SequencePool(n_sequences, n_cells, can_rewind=not is_recurrent, can_share=not is_recurrent)
        rules = PassRules(n_cells, has_equal_parts=is_recurrent)
        self.scheduler = Scheduler(self.pool, PassWidths(WidthCosts(), width), lambda: self.now, rules)
        self.held: dict[int, list[int]] = {number: [] for number in range(n_sequences)}
        self.tokens: dict[int, list[int]] = {}
        self.n_groups = 1 if is_recurrent else n_groups
        self.in_flight: deque[PlannedPass] = deque()

    @rule(data=st.data(), key=st.sampled_from("ab"), priority=st.integers(-1, 1))
    def submit(self, data: st.DataObject, key: str, priority: int) -> None:
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.n_cells - 1))
        self.tokens[self.scheduler.submit(tokens, priority, key)] = list(tokens)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[number]
        self.scheduler.end(number)
        self.pool.check()

    @rule(is_lost=st.booleans(), has_room=st.booleans())
    def compute(self, is_lost: bool, has_room: bool) -> None:
        while placed := self.scheduler.admit():
            self.held[placed.sequence] = self.held[placed.source][: placed.n_tokens]
        self.pool.check()
        planned = self.scheduler.next_pass(n_groups=self.n_groups)
        assert planned or not self.tokens or self.in_flight
        if planned is None:
            if self.in_flight:
                self.finish()
            return
        for sequence in planned.emptied:
            self.held[sequence] = []
        assert self.pool.used_cells + planned.width <= self.n_cells
        assert len(planned.parts) <= -(-self.scheduler.n_running // self.n_groups)
        if self.is_recurrent:
            assert len({len(part.tokens) for part in planned.parts}) == 1
        for part in planned.parts:
            assert self.held[part.sequence] == self.tokens[part.request][: part.start]
            assert list(part.tokens) == self.tokens[part.request][part.start : part.start + len(part.tokens)]
            assert part.is_last == (part.start + len(part.tokens) == len(self.tokens[part.request]))
        if is_lost:  # all passes failed, and sequences that cannot be cut are empty
            for failed in (planned, *reversed(self.in_flight)):
                for part in failed.parts:
                    kept = 0 if self.is_recurrent else part.start
                    self.held[part.sequence] = self.held[part.sequence][:kept]
                    self.scheduler.placed(part.sequence, kept)
            self.in_flight.clear()
        elif not has_room and not self.in_flight:
            for sequence in self.scheduler.give_way() or ():
                self.held[sequence] = []
        else:
            self.scheduler.begun(planned)
            for part in planned.parts:
                self.held[part.sequence] += part.tokens
            self.in_flight.append(planned)
            if len(self.in_flight) >= self.n_groups:
                self.finish()
        self.pool.check()

    def finish(self) -> None:
        """Take in what came of the pass in flight that was begun first; some of its requests may have ended."""
        for part in self.in_flight.popleft().parts:
            if part.request in self.tokens and self.scheduler.is_at_end(part):
                assert self.tokens[part.request][part.start :] == list(part.tokens)
                self.tokens[part.request].append(len(self.tokens[part.request]) % 2)
                self.scheduler.append(part.request, self.tokens[part.request][-1])
                if self.scheduler.is_full(part.request):
                    del self.tokens[part.request]
                    self.scheduler.end(part.request)

    def teardown(self) -> None:
        """Nothing waits for ever: without new requests, and if each ends after a few tokens, all end."""
        left = {number: len(tokens) + 3 for number, tokens in getattr(self, "tokens", {}).items()}
        for _ in range(4000):
            if not left:
                return
            self.compute(False, True)
            for number in list(left):
                if number not in self.tokens:
                    del left[number]
                elif len(self.tokens[number]) >= left[number]:
                    del left[number], self.tokens[number]
                    self.scheduler.end(number)
        raise AssertionError(f"requests {sorted(left)} were never done")


TestServed = Served.TestCase
