"""Passes in flight over two devices: what a sequence is said to hold is there on both, whatever was stopped."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cells import Cells, row_of
from edge_run.base.errors import Cancelled
from edge_run.base.protocols import BatchToken, Logits
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.generation.scheduled_passes import BegunPass, ComputedPart, ScheduledPasses
from edge_run.runtime.scheduling.scheduler import PassRules, Scheduler
from edge_run.runtime.scheduling.sequences import SequencePool
from edge_run.runtime.scheduling.widths import PassWidths

N_TEXTS, WIDTH, N_CELLS = 4, 3, 100


class TwoDevices(Cells):
    """A decoder with several passes in flight, which it computes when they are begun, and `second` when they finish.

    All else reaches `second` in its order. What was abandoned it never computes. is_stopped: no pass finishes.
    """

    most_in_flight = 3

    def __init__(self) -> None:
        super().__init__(can_branch=True, n_cells=N_CELLS)
        self.second, self.is_stopped = Cells(can_branch=True, n_cells=N_CELLS), False
        self._told = deque[tuple[Callable[..., Any], Any]]()

    def begin(self, batch: Sequence[BatchToken]) -> None:
        self.decode(batch)
        self._told.append((self.second.decode, (batch,)))

    def finish(self) -> Logits:
        if self.is_stopped:
            raise Cancelled("the pass was cancelled")
        while True:
            work, given = self._told.popleft()
            found = work(*given)
            if work == self.second.decode:
                return found

    def abandon(self) -> None:
        self._told = deque(one for one in self._told if one[0] != self.second.decode)

    def catch_up(self) -> None:
        """Have `second` do what it was told, where no pass is in flight."""
        while self._told:
            work, given = self._told.popleft()
            work(*given)

    def rewind(self, sequence: int, position: int) -> int:
        self._told.append((self.second.rewind, (sequence, position)))
        return super().rewind(sequence, position)

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        self._told.append((self.second.branch, (sequence, branches)))
        super().branch(sequence, branches)


class Served:
    """Requests whose whole texts are known: what a batch does with them, without a model."""

    def __init__(self, seed: int) -> None:
        self.chance, self.devices = random.Random(seed), TwoDevices()
        self.pool = SequencePool(N_TEXTS, N_CELLS, can_rewind=True, can_share=True)
        self.scheduler = Scheduler(self.pool, PassWidths(WidthCosts(), WIDTH), lambda: 0.0, PassRules(N_CELLS))
        self.passes = ScheduledPasses(self.scheduler, self.pool, self.devices)
        self.whole: dict[int, list[int]] = {}

    def submit(self, text: list[int]) -> None:
        self.whole[self.scheduler.submit(text[: -self.chance.randint(1, 3)])] = text

    def end(self, number: int) -> None:
        self.scheduler.end(number)
        del self.whole[number]

    def advance(self) -> None:
        """Compute a pass, as `Batch.advance` does; where it is stopped, some requests end."""
        try:
            self.passes.admit()
            while self.passes.n_in_flight < self.passes.most_in_flight and (planned := self.passes.plan()):
                self.passes.begin(BegunPass(planned, {}))
            computed = self.passes.finish()[1] if self.passes.n_in_flight else []
        except Cancelled:
            computed = []
            for number in [number for number in self.whole if self.chance.random() < 0.3]:
                self.end(number)
        for one in computed:
            if one.part.request in self.whole and one.found and self.scheduler.is_at_end(one.part):
                self.choose(one)
        if not self.passes.n_in_flight:
            self.check()

    def choose(self, one: ComputedPart) -> None:
        number = one.part.request
        so_far, text = self.scheduler.tokens(number), self.whole[number]
        assert one.found
        assert np.array_equal(one.found.row, row_of(so_far))
        self.scheduler.append(number, text[len(so_far)])
        if len(so_far) == len(text):
            self.end(number)

    def check(self) -> None:
        self.devices.catch_up()
        self.pool.check()
        for sequence in range(N_TEXTS):
            held = self.devices.text(sequence)
            assert len(held) == self.pool.n_held(sequence)
            assert held == self.devices.second.text(sequence)


TEXT = st.builds(
    lambda n, tail: n * [0] + tail, st.integers(0, 12), st.lists(st.integers(0, 4), min_size=4, max_size=6)
)
TEXTS = st.lists(TEXT, min_size=2, max_size=9)  # of which many begin alike


@given(TEXTS, st.integers(0, 2**32))
def test_who_shares_what_is_in_flight_loses_it_where_it_is_taken_back(texts: list[list[int]], seed: int) -> None:
    """Tokens were wrong: later prompts began with what one of the devices had never computed."""
    served, waiting = Served(seed), list(texts)
    for _ in range(600):
        if waiting and served.chance.random() < 0.5:
            served.submit(waiting.pop())
        served.devices.is_stopped = served.chance.random() < 0.2
        served.advance()
        if not waiting and not served.whole:
            return
    raise AssertionError(f"never done: {served.whole}")
