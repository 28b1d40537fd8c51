"""What becomes of a pass that a decoder refuses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from cells import CONTEXT, Cells, row_of
from edge_run.base.errors import Cancelled, ContextFull, KernelError
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.generation.scheduled_passes import BegunPass, ScheduledPasses
from edge_run.runtime.scheduling.scheduler import PassRules, Scheduler
from edge_run.runtime.scheduling.sequences import SequencePool
from edge_run.runtime.scheduling.widths import PassWidths
from edge_run.runtime.speculation.drafting import Guess, plan_tree
from edge_run.runtime.speculation.shared_guesses import SharedTree

CELLS = 64


class Forgetful:
    """A decoder of one sequence that has no room for guesses. forgets: it loses all there is where it refuses them."""

    def __init__(self, *, forgets: bool) -> None:
        self.capabilities = Capabilities(CELLS, CELLS, 1, 4, can_rewind=True)
        self.forgets, self.length, self.begun = forgets, 0, list[list[int]]()

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        positions = [token.position for token in batch]
        assert positions[0] == self.length, "nothing is computed after what is not there"
        if len(batch) > 1 and self.length:
            self.length = 0 if self.forgets else self.length
            raise ContextFull("no room for guesses")
        self.begun.append(positions)
        self.length += len(batch)
        return np.zeros((sum(token.wants_logits for token in batch), 4), np.float32)

    def rewind(self, sequence: int, position: int) -> int:
        self.length = min(self.length, position)
        return self.length

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        raise AssertionError("there is one sequence")

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        raise AssertionError("no guess is verified")


def after_guesses_without_room(decoder: Forgetful) -> list[bool]:
    """Compute a prompt of three tokens, and an answer's first one, beside which a guess has no room."""
    pool = SequencePool(1, CELLS, can_rewind=True, can_share=False)
    scheduler = Scheduler(pool, PassWidths(WidthCosts(), CELLS), lambda: 0.0, PassRules(CELLS))
    passes = ScheduledPasses(scheduler, pool, decoder)
    number = scheduler.submit([1, 2, 3])
    passes.admit()
    read = passes.plan()
    assert read is not None
    assert passes.begin(BegunPass(read, {}))
    passes.finish()
    scheduler.append(number, 0)
    tree = SharedTree(plan_tree(0, {(2,): Guess(0.5, ("any", 0, 0), 0.5)}), (0,))
    have_begun = list[bool]()
    while not passes.n_in_flight:
        planned = passes.plan(1)
        assert planned is not None
        have_begun.append(passes.begin(BegunPass(planned, {number: tree} if planned.is_of_answers else {})))
    passes.finish()
    assert scheduler.n_held(number) == 4
    return have_begun


def test_a_pass_whose_guesses_have_no_room_is_computed_without_them() -> None:
    decoder = Forgetful(forgets=False)
    assert after_guesses_without_room(decoder) == [True]
    assert decoder.begun == [[0, 1, 2], [3]]


def test_what_was_lost_with_guesses_is_computed_before_what_follows_it() -> None:
    """Its last token was computed where nothing came before it, as on a mesh that had been broken off."""
    decoder = Forgetful(forgets=True)
    assert after_guesses_without_room(decoder) == [False, True]
    assert decoder.begun == [[0, 1, 2], [0, 1, 2, 3]]


class Shaky(Cells):
    """A decoder that fails so many times at what is named, and has no room for passes of more than so many tokens."""

    def __init__(self) -> None:
        super().__init__(can_branch=True)
        self.failing, self.n_failures, self.most_tokens = "", 0, CONTEXT

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        if len(batch) > self.most_tokens:
            raise ContextFull("no room for so many")
        return super().decode(batch)

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        self._fail("branch")
        super().branch(sequence, branches)

    def rewind(self, sequence: int, position: int) -> int:
        self._fail("rewind")
        return super().rewind(sequence, position)

    def _fail(self, what: str) -> None:
        if what == self.failing and self.n_failures:
            self.n_failures -= 1
            raise KernelError("the run is broken off")


class Served:
    """A request of the tokens 1, 2, 3, 4, whose answer has its first token, and which is alone."""

    def __init__(self, decoder: Shaky | None = None) -> None:
        self.decoder, self.pool = decoder or Shaky(), SequencePool(2, CONTEXT, can_rewind=True, can_share=True)
        widths = PassWidths(WidthCosts(), CELLS)
        self.scheduler = Scheduler(self.pool, widths, lambda: 0.0, PassRules(CONTEXT))
        self.passes = ScheduledPasses(self.scheduler, self.pool, self.decoder)
        self.first = self.scheduler.submit([1, 2, 3, 4])
        self.passes.admit()
        self.compute()
        self.scheduler.append(self.first, 0)

    def compute(self) -> list[int]:
        """Compute a pass; return whose parts it had."""
        planned = self.passes.plan()
        assert planned is not None
        if not self.passes.begin(BegunPass(planned, {})):
            return []
        for one in self.passes.finish()[1]:
            if one.found:
                assert np.array_equal(one.found.row, row_of(self.scheduler.tokens(one.part.request)))
        return [part.request for part in planned.parts]


@pytest.mark.parametrize(("failing", "n_failures"), [("branch", 1), ("rewind", 1), ("rewind", 2)])
def test_a_request_whose_sequence_could_not_be_made_ready_waits_again(failing: str, n_failures: int) -> None:
    """It counted as running, with a beginning that its sequence did not hold."""
    served = Served()
    scheduler, pool, decoder = served.scheduler, served.pool, served.decoder
    second = scheduler.submit([1, 2, 3, 0])
    decoder.failing, decoder.n_failures = failing, n_failures
    with pytest.raises(KernelError):
        served.passes.admit()
    pool.check()
    assert scheduler.running() == [served.first]
    assert scheduler.n_waiting == 1
    assert pool.n_held(1) == 0
    served.passes.admit()
    assert decoder.text(1) == [1, 2, 3]
    assert scheduler.n_held(second) == 3
    assert served.compute() == [served.first, second]


class Queued(Shaky):
    """The same, with two passes in flight."""

    most_in_flight = 2

    def __init__(self) -> None:
        super().__init__()
        self._rows = deque[Logits]()

    def begin(self, batch: Sequence[BatchToken]) -> None:
        self._rows.append(self.decode(batch))

    def finish(self) -> Logits:
        return self._rows.popleft()

    def abandon(self) -> None:
        self._rows.clear()
        self._fail("abandon")


@pytest.mark.parametrize(("failing", "n_held"), [("abandon", 4), ("rewind", 0)])
def test_a_pass_of_which_no_token_was_chosen_is_computed_again(failing: str, n_held: int) -> None:
    """Its requests waited for ever for that token, where others in flight could not be taken back either."""
    served = Served(Queued())
    scheduler, passes = served.scheduler, served.passes
    numbers = [served.first, scheduler.submit([2, 2, 2])]
    passes.admit()
    for _ in numbers:
        planned = passes.plan()
        assert planned is not None
        assert passes.begin(BegunPass(planned, {}))
    served.decoder.failing, served.decoder.n_failures = failing, 1
    with pytest.raises(KernelError), passes.finishing():
        raise Cancelled("no token was chosen")
    assert not passes.n_in_flight
    served.pool.check()
    assert [scheduler.n_held(number) for number in numbers] == [n_held, 0]
    assert {*served.compute(), *served.compute()} == {*numbers}


def test_a_pass_without_room_is_computed_without_the_youngest_who_holds_nothing_yet() -> None:
    """All ended, though the others had room: no sequence had to be emptied, as where nobody can give way."""
    served = Served()
    served.scheduler.submit([0, 0, 0])
    served.passes.admit()
    served.decoder.most_tokens = 3
    assert served.compute() == []
    assert served.scheduler.running() == [served.first]
    assert served.compute() == [served.first]


class Torn:
    """A decoder of three sequences with recurrent state: where a pass fails, all lose theirs."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(CELLS, CELLS, 3, 4, can_rewind=False)
        self.lengths = [0, 0, 0]
        self.failure: Exception | None = None
        self.cuts_left = CELLS  # until one is broken off, as by a second Ctrl-C while devices are told of it

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        if self.failure:
            self.lengths = [0, 0, 0]
            raise self.failure
        for token in batch:
            assert token.position == self.lengths[token.sequence], "nothing is computed after what is not there"
            self.lengths[token.sequence] += 1
        return np.zeros((sum(token.wants_logits for token in batch), 4), np.float32)

    def rewind(self, sequence: int, position: int) -> int:
        self.lengths[sequence] *= position >= self.lengths[sequence]  # else it cannot be cut, and is emptied
        self.cuts_left -= 1
        if not self.cuts_left:
            raise KeyboardInterrupt
        return self.lengths[sequence]

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        raise AssertionError("state has no branches")

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        raise AssertionError("no guess is verified")


@pytest.mark.parametrize(
    ("failure", "most_cuts", "raised"),
    [
        (Cancelled("the pass was cancelled"), CELLS, Cancelled),
        (ContextFull("no room on another device"), CELLS, None),
        *[(Cancelled("the pass was cancelled"), most_cuts, KeyboardInterrupt) for most_cuts in (1, 2, 3)],
    ],
)
def test_what_sequences_beside_a_failed_pass_have_lost_is_computed_again(
    failure: Exception, most_cuts: int, raised: type[BaseException] | None
) -> None:
    """The state of one that lies between those of the pass may be another text's by then."""
    pool, decoder = SequencePool(3, CELLS, can_rewind=False, can_share=False), Torn()
    rules = PassRules(CELLS, has_equal_parts=True)
    scheduler = Scheduler(pool, PassWidths(WidthCosts(), CELLS), lambda: 0.0, rules)
    passes = ScheduledPasses(scheduler, pool, decoder)

    def compute() -> None:
        planned = passes.plan()
        assert planned is not None
        assert passes.begin(BegunPass(planned, {}))
        passes.finish()

    numbers = [scheduler.submit([one, 2, 3]) for one in range(3)]
    passes.admit()
    for _ in numbers:
        compute()
    scheduler.end(numbers[1])
    for number in (numbers[0], numbers[2]):
        scheduler.append(number, 0)
    assert [pool.n_held(one) for one in range(3)] == [3, 3, 3]
    decoder.failure, decoder.cuts_left = failure, most_cuts
    planned = passes.plan()
    assert planned is not None
    if raised:
        with pytest.raises(raised):
            passes.begin(BegunPass(planned, {}))
    else:
        assert not passes.begin(BegunPass(planned, {})), "others gave way"
    assert [pool.n_held(one) for one in range(3)] == [0, 0, 0]
    assert [scheduler.n_held(number) for number in (numbers[0], numbers[2])] == [0, 0]
    decoder.failure = None
    again = scheduler.submit([1, 2, 3, 0])
    passes.admit()
    assert scheduler.n_held(again) == 0
    for _ in range(3):
        compute()
    pool.check()
