"""The passes that a scheduler plans, computed by a decoder; what becomes of them is told to the scheduler.

A decoder that spreads a model over devices can have several passes in flight. What they compute counts as computed from
when they are begun, as all that follows happens after them; where one fails, all are taken back. Sequences that came to
share what these were to compute lose it too: devices that did not get to it have nothing there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

from edge_run.base.errors import ContextFull
from edge_run.base.protocols import BatchToken, Decoder, Logits
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.one_at_a_time import pass_queue
from edge_run.runtime.decoding.session import Keeper
from edge_run.runtime.generation.meter import Interval
from edge_run.runtime.scheduling.scheduler import PassPart, PlannedPass, Scheduler
from edge_run.runtime.scheduling.sequences import Beginning, SequencePool
from edge_run.runtime.speculation.drafting import plan_tree
from edge_run.runtime.speculation.shared_guesses import SharedTree
from edge_run.runtime.speculation.verification import Verification


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """A part of a pass that was computed.

    part: what it was.
    found: of a part that is the last of its request so far, the logits after it and after guesses of what follows; they
        are valid until the next pass.
    tree: those guesses; None where there were none.
    """

    part: PassPart
    found: Verification | None
    tree: SharedTree | None


@dataclass(frozen=True, slots=True)
class BegunPass:
    """A pass to be begun.

    planned: what it computes.
    trees: the guesses of what follows, by requests.
    drafting: what making them cost.
    began_s: when that began.
    first_cell: the first of the cells that it takes; known once it is in flight.
    """

    planned: PlannedPass
    trees: Mapping[int, SharedTree]
    drafting: Interval = field(default_factory=Interval)
    began_s: float = 0.0
    first_cell: int = 0


class ScheduledPasses:
    """Computes what a scheduler plans. Not thread-safe.

    pool: the sequences of `scheduler`.
    keeper: the prompt cache, which has the rows of sequence 0 where no other sequence has any.
    recount: is called before a pass: the decoder counts cells that sequences share for each of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: SequencePool,
        decoder: Decoder,
        keeper: Keeper | None = None,
        recount: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler, self._pool, self._decoder, self._keeper = scheduler, pool, decoder, keeper
        self._queue, self._recount = pass_queue(decoder), recount
        self._in_flight: deque[BegunPass] = deque()

    @property
    def most_in_flight(self) -> int:
        """How many passes can be in flight; it may change from one pass to the next."""
        return self._queue.most_in_flight

    @property
    def n_in_flight(self) -> int:
        """The passes that were begun, and are not finished."""
        return len(self._in_flight)

    def admit(self) -> None:
        """Admit the requests that can be, and have their sequences hold what they begin with.

        Raises what the decoder or the prompt cache does; then the request that it was for waits again.
        """
        while (place := self._scheduler.admit()) is not None:
            try:
                self._place(place)
            except BaseException:
                self._scheduler.placed(place.sequence, 0)
                self._scheduler.put_back()
                self._empty((place.sequence,))  # where that fails too, whoever has the sequence next cuts it first
                raise

    def _place(self, place: Beginning) -> None:
        """Have the sequence of a request that is admitted hold what it begins with."""
        if place.source != place.sequence:
            self._decoder.branch(place.source, (place.sequence,))
        held = self._decoder.rewind(place.sequence, place.n_tokens)
        if held < place.n_tokens:  # a window has left what they would need
            self._scheduler.placed(place.sequence, held)
        if self._keeper and self._scheduler.is_first(place):
            (number,) = self._scheduler.running()
            self._scheduler.read_back(number, self._keeper.resume(self._scheduler.tokens(number), 0) or 0)

    def plan(self, n_guesses: int = 0) -> PlannedPass | None:
        """Return the next pass, which may have so many guesses; None where no request needs one."""
        planned = self._scheduler.next_pass(n_guesses, self.most_in_flight)
        if planned is not None:
            self._empty(planned.emptied)
        return planned if planned and planned.parts else None

    def begin(self, begun: BegunPass) -> bool:
        """Begin a pass; return whether it is in flight.

        It is not where it had no room: then others gave way, or there will be room when passes in flight are finished,
        or what was lost with guesses that had none is computed first.

        Raises the errors of `Decoder.decode`; then the requests are as they were before all passes in flight, and
        `plan` may go on.
        """
        planned, trees = begun.planned, begun.trees
        self._recount()
        try:
            self._queue.begin([token for part in planned.parts for token in self._batch(part, trees)])
        except ContextFull:
            self._undo(planned, trees)
            self._look_at_all()  # a mesh empties them where devices have begun
            if trees and all(self._scheduler.n_held(part.request) == part.start for part in planned.parts):
                return self.begin(replace(begun, trees={}))
            if trees:
                return False
            if self._in_flight:
                return False
            emptied = self._scheduler.give_way()
            if emptied is None:
                raise
            self._empty(emptied)
            return False
        except BaseException:
            with self._looking_at_all():
                self._undo(planned, trees)
                self.abandon()
            raise
        self._in_flight.append(replace(begun, first_cell=self._pool.next_cell))
        self._scheduler.begun(planned)
        return True

    def finish(self) -> tuple[BegunPass, list[ComputedPart]]:
        """Return the pass in flight that was begun first, and what came of it.

        Each part has to be `settle`d once tokens were chosen. Raises as `begin`.
        """
        try:
            rows = self._queue.finish()
        except BaseException:
            with self._looking_at_all():
                self.abandon()
            raise
        begun = self._in_flight.popleft()
        return begun, _parts(begun, rows)

    @contextmanager
    def finishing(self) -> Iterator[tuple[BegunPass, list[ComputedPart]]]:
        """Give the block what `finish` returns; where it fails, that pass is taken back, and those in flight."""
        begun, computed = self.finish()
        try:
            yield begun, computed
        except BaseException:  # or requests would wait for ever for tokens that nobody has chosen
            try:
                self.abandon()
            finally:
                self._undo(begun.planned, begun.trees)
            raise

    def abandon(self) -> None:
        """Take back all passes in flight; the requests are as they were before these."""
        if not self._in_flight:
            return
        first_cell = self._in_flight[0].first_cell
        with ExitStack() as stack:  # of which each is done, whatever another one raises
            stack.callback(lambda: self._cut(self._pool.holding_since(first_cell)))  # who shared them meanwhile
            for begun in self._in_flight:  # the last one first
                stack.callback(self._undo, begun.planned, begun.trees)
            self._in_flight.clear()
            self._queue.abandon()

    def settle(self, computed: ComputedPart) -> None:
        """Let the sequence of a part hold what its text followed of the guesses, and nothing else of them."""
        part, tree, found = computed.part, computed.tree, computed.found
        if tree is None or found is None:
            return
        branch = tree.sequences[tree.tree.sequences()[found.node][0]]
        n_tokens = part.start + 1 + found.n_followed
        self._decoder.keep(part.sequence, part.start, branch, tree.sequences[1:])
        held = self._decoder.rewind(part.sequence, n_tokens)
        if held < n_tokens:
            self._scheduler.placed(part.sequence, held)

    def _empty(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._decoder.rewind(sequence, 0)

    def _undo(self, planned: PlannedPass, trees: Mapping[int, SharedTree]) -> None:
        """Note what the sequences of a pass hold that was not computed: what they held before, or nothing."""
        with ExitStack() as stack:
            stack.callback(self._cut, [(part.sequence, part.start) for part in planned.parts])
            for tree in trees.values():
                self._empty(tree.sequences[1:])

    @contextmanager
    def _looking_at_all(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._look_at_all()

    def _look_at_all(self) -> None:
        """Note what sequences hold after a pass that failed: those that were not in it may have lost their state."""
        self._cut([(sequence, self._pool.n_held(sequence)) for sequence, _ in self._pool.holding_since(0)])

    def _cut(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Cut sequences, (number, tokens), and note what they hold then.

        Where that cannot be told, as a second Ctrl-C comes while devices are, it is nothing; that is raised afterwards.
        """
        raised = list[BaseException]()
        for sequence, n_tokens in lengths:
            try:
                held = self._decoder.rewind(sequence, n_tokens)
            except BaseException as error:
                raised.append(error)
                held = 0
                with suppress(BaseException):
                    self._decoder.rewind(sequence, 0)
            self._scheduler.placed(sequence, held)
        if raised:
            raise raised[-1]

    def _batch(self, part: PassPart, trees: Mapping[int, SharedTree]) -> list[BatchToken]:
        if tree := trees.get(part.request):
            if branches := tree.sequences[1:]:
                self._decoder.branch(part.sequence, branches)
            return tree.tree.batch(part.start, tree.sequences)
        last = len(part.tokens) - 1
        return [
            BatchToken(token, part.start + i, part.sequence, wants_logits=part.is_last and i == last)
            for i, token in enumerate(part.tokens)
        ]


def _parts(begun: BegunPass, rows: Logits) -> list[ComputedPart]:
    """Return the parts of a pass that has given `rows`."""
    computed, at = [], 0
    for part in begun.planned.parts:
        tree, found = begun.trees.get(part.request), None
        if part.is_last:
            verified = tree.tree if tree else plan_tree(part.tokens[-1], {})
            found = Verification(verified, rows[at : at + len(verified)])
            at += len(verified)
        computed.append(ComputedPart(part, found, tree))
    return computed


def recount(pool: SequencePool, n_sequences: int, decoder: LocalDecoder) -> None:
    """Have `decoder` count cells as `pool` does, whose sequences are the first ones; the others are for guesses."""
    lengths = [pool.n_held(one) if one < n_sequences else 0 for one in range(decoder.capabilities.sequences)]
    decoder.recount(lengths, pool.used_cells)
