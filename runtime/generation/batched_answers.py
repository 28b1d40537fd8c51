"""Many answers at once: one pass over the weights computes something for each of them.

`BatchedAnswers` carries out what the scheduler decides (`runtime/scheduling/scheduler.py`): it brings sequences where
they have to be, computes a pass, and chooses a token for each request that has come so far, and those that follow as
long as they were guessed (`runtime/speculation/shared_guesses.py`). A request that fails, as its grammar may, fails
alone. An error of a pass, as of a drive, leaves all requests as they were before it. Where the drive is full that keys
and values go to, the request that was admitted last ends, so that the others have its room there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from edge_run.base.closing import Closing
from edge_run.base.errors import Cancelled, ConfigError, EdgeRunError, TierReadError, lacks_room, system_errors
from edge_run.base.protocols import Clock
from edge_run.base.results import Piece, Speculation
from edge_run.runtime.decoding.session import Keeper
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.engine.pass_costs import pass_costs
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Interval, Meter
from edge_run.runtime.generation.report import Course, report
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.generation.scheduled_passes import BegunPass, ComputedPart, ScheduledPasses, recount
from edge_run.runtime.generation.speculation_setup import open_shared_guesses
from edge_run.runtime.generation.stream import GAVE_WAY
from edge_run.runtime.llama.prompt_text import check_room
from edge_run.runtime.scheduling.scheduler import PassPart, PassRules, PlannedPass, Scheduler
from edge_run.runtime.scheduling.sequences import SequencePool
from edge_run.runtime.scheduling.widths import PassWidths
from edge_run.runtime.speculation.pass_offers import span_of
from edge_run.runtime.speculation.shared_drafters import OpenText
from edge_run.runtime.speculation.shared_guesses import SharedTree
from edge_run.runtime.speculation.verification import Verification


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a request: the next piece of its answer, or the error that ended it.

    request: its number.
    piece: the piece; the last one carries the generation.
    error: the error.
    """

    request: int
    piece: Piece | None = None
    error: EdgeRunError | None = None

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.error is not None or (self.piece is not None and self.piece.generation is not None)


@dataclass(slots=True)
class _Open:
    """A request that has not ended.

    answer: its answer so far.
    arrived_s: when it came.
    deadline_s: when it must have ended.
    salt: as of `Turn`.
    course: what it cost so far.
    has_begun: whether it was ever admitted.
    """

    answer: Continuation
    arrived_s: float
    deadline_s: float
    salt: str
    course: Course = field(default_factory=Course)
    has_begun: bool = False


class BatchedAnswers(Closing):
    """The requests that share the passes of one engine: what a `Batch` is of. Only `cancel` is thread-safe.

    It is over 200 lines because whatever happens to a request, it ends in one place for all that know of it.
    """

    def __init__(
        self,
        engine: Engine,
        meter: Meter,
        most_parallel: int,
        clock: Clock = time.monotonic,
        keeper: Keeper | None = None,
    ) -> None:
        """Serve requests with `engine`, whose sequences are empty, and of these answers until they are closed.

        keeper: the prompt cache, where there is one.
        """
        self._engine, self._meter, self._clock = engine, meter, clock
        self._decoder = engine.front
        able, is_exact, has_streams = self._decoder.capabilities, engine.config.exact, engine.shape.has_streams
        self._n_sequences, self._is_padded = most_parallel, is_exact or has_streams
        pool = SequencePool(
            self._n_sequences,
            able.context_tokens * (most_parallel if has_streams else 1),
            can_rewind=able.can_rewind,
            can_share=able.can_branch,
            keeps_ended=not (is_exact or has_streams),
        )
        rules = PassRules(able.context_tokens, has_streams or is_exact or engine.model.is_recurrent, is_exact)
        costs = pass_costs(engine)
        self._widths = PassWidths(costs, able.micro_batch_tokens)
        self._guesses, self._why_plain = open_shared_guesses(engine, costs)
        self._scheduler = Scheduler(pool, self._widths, clock, rules)
        counting = partial(recount, pool, most_parallel, engine.decoder)
        self._passes = ScheduledPasses(self._scheduler, pool, self._decoder, keeper, counting)
        self._open: dict[int, _Open] = {}
        self._cancelling, self._cancelled = threading.Lock(), set[int]()
        self._events: list[Event] = []  # that nobody has been told yet
        self.is_closed = self._gave_way = False

    @property
    def speculation(self) -> Speculation:
        """The figures of speculation of all requests so far."""
        return self._guesses.figures() if self._guesses else Speculation(reason=self._why_plain)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, nor anything to be told of one."""
        return self._scheduler.is_idle and not self._events

    @property
    def n_running(self) -> int:
        """The requests that share the next pass, as far as it is decided."""
        return self._scheduler.n_running

    @property
    def n_waiting(self) -> int:
        """The requests that wait for a sequence, or for memory."""
        return self._scheduler.n_waiting

    @property
    def most_parallel(self) -> int:
        """The requests that can share a pass."""
        return self._n_sequences

    def submit(self, answer: Continuation, turn: Turn) -> int:
        """Take a request on, and its `answer`; return its number. Raises ContextFull for a prompt that is too long."""
        self.check()
        check_room(len(answer.prompt), self._scheduler.room_tokens)
        number = None
        try:
            with self.hearing_signals():
                number, now = self._scheduler.submit(answer.prompt, turn.priority, turn.key, turn.salt), self._clock()
                deadline_s = now + (math.inf if turn.deadline_s is None else turn.deadline_s)
                self._open[number] = _Open(answer, now, deadline_s, turn.salt)
        except KeyboardInterrupt:
            if number is not None:  # which nobody else knows
                self._forget(number)
            raise
        return number

    def hearing_signals(self) -> AbstractContextManager[None]:
        """End the pass in the (innermost such) block by what a signal's handler raises; raise it after the block."""
        return self._engine.interrupt.hearing_signals()

    def cancel(self, number: int) -> None:
        """End a request after the pass at hand, from any thread; where all are ended, end the pass too."""
        with self._cancelling:
            left = set(self._open)
            if number in left:  # else it has ended
                self._cancelled.add(number)
                if left <= self._cancelled:
                    self._engine.interrupt.cancel()

    def advance(self) -> list[Event]:
        """Compute one pass; return what it brought. Raises the errors of `Decoder.decode`; `advance` may go on then.

        Where requests were cancelled, or are over without a pass, their ends are returned first: a pass that fails
        would take them along. An interrupt that is not the cancelling of single requests ends all of them.
        """
        self.check()
        with self.hearing_signals():
            self._events += self._end_some()
        if not self._events:
            self._compute()
        events, self._events = self._events, []
        return events

    def _compute(self) -> None:
        """Compute one pass, and note what it brought."""
        try:
            with self.hearing_signals():
                self._passes.admit()
                self._begin_admitted()
                self._meter.lap()
                self._begin_passes()
                if self._passes.n_in_flight:
                    with self._passes.finishing() as (begun, computed):
                        self._events += self._take_in(begun, computed, self._meter.lap())
        except TierReadError as error:
            if not lacks_room(error) or self.n_running < 2:
                raise
            with self.hearing_signals():
                number = self._scheduler.running()[-1]
                self._forget(number)
                self._events.append(Event(number, error=error))
        except Cancelled:
            with self.hearing_signals():
                self._engine.interrupt.reset()  # which a pass does itself, but not rows that are read back
                is_for_all = not self._open.keys() <= self._cancelled  # else those were cancelled one by one
                self._events += [self._end(number, "cancelled") for number in list(self._open) if is_for_all]

    def drop(self, number: int) -> None:
        """Forget a request; without effect where it has ended."""
        with self._cancelling:
            if number in self._cancelled:
                self._cancelled.discard(number)
                self._engine.interrupt.reset()  # which may have been set for it when its last pass had ended
        with self.hearing_signals():
            if number in self._open:
                self._forget(number)
            self._events = [event for event in self._events if event.request != number]

    def drop_all(self) -> None:
        """Forget all requests."""
        with self.hearing_signals():
            for number in list(self._open):
                self._forget(number)
            self._events = []

    def check(self) -> None:
        """Raise Cancelled where these answers have given way to another one, ConfigError where they were closed."""
        if self._gave_way:
            raise Cancelled(GAVE_WAY)
        if self.is_closed:
            raise ConfigError("this batch was closed; open another one")

    def give_way(self) -> None:
        """End all, as another answer is begun on the model."""
        self._gave_way = self._gave_way or not self.is_closed
        self.close()

    def leave(self) -> None:
        """Free samplers and grammars, from any thread, as nobody asks for more; the next answer closes the rest."""
        for request in list(self._open.values()):
            request.answer.close()

    def close(self) -> None:
        """Forget all requests, and empty the sequences. Idempotent."""
        if self.is_closed:
            return
        with self.hearing_signals(), ExitStack() as stack:  # of which each is done, whatever another one raises
            self.is_closed = True
            stack.callback(self.drop_all)  # last: it raises the Ctrl-C that was heard
            for sequence in range(self._decoder.capabilities.sequences if self._guesses else self._n_sequences):
                stack.callback(self._decoder.rewind, sequence, 0)
            self._passes.abandon()

    def _end_some(self) -> Iterator[Event]:
        """End the requests that were cancelled, or whose time is over."""
        with self._cancelling:
            cancelled = self._cancelled & self._open.keys()
            if self._cancelled:
                self._engine.interrupt.reset()  # it may have been for one of these, or for one that has ended since
            self._cancelled.clear()
        for number in cancelled:
            yield self._end(number, "cancelled")
        now = self._clock()
        for number, request in list(self._open.items()):
            if now >= request.deadline_s:
                yield self._end(number, "deadline")

    def _begin_admitted(self) -> None:
        """Have answers begin whose requests were admitted for the first time."""
        for number in self._scheduler.running():
            request = self._open[number]
            if not request.has_begun:
                request.has_begun = True
                request.course.cached_tokens = self._scheduler.n_held(number)
                try:
                    request.answer.begin()
                except EdgeRunError as error:  # as where its owner has closed it
                    self._forget(number)
                    self._events.append(Event(number, error=error))
                    continue
                request.answer.note_read(request.course.cached_tokens)
                if self._guesses:
                    self._guesses.begin(number)

    def _begin_passes(self) -> None:
        """Begin as many passes as can be in flight."""
        while self._passes.n_in_flight < self._passes.most_in_flight:
            began_s = self._clock()
            planned = self._passes.plan(self._guesses.most_spare if self._guesses else 0)
            if planned is None:
                break
            trees = self._guess(planned)
            may_have_drafted = self._guesses and self._passes.most_in_flight == 1  # also where no guess is verified
            drafting = self._meter.lap() if may_have_drafted else Interval()
            with self._guesses.going_on() if self._guesses else nullcontext():
                has_begun = self._passes.begin(BegunPass(planned, trees, drafting, began_s))
            if not has_begun and self._passes.n_in_flight:
                break  # else somebody gave way, who is not to be admitted again before the others went on

    def _guess(self, planned: PlannedPass) -> Mapping[int, SharedTree]:
        """Return guesses of what follows the tokens of a pass; none while prompts are read, or passes in flight."""
        if not self._guesses or not planned.is_of_answers or self._passes.most_in_flight > 1:
            return {}
        texts, most_guesses = {}, self._decoder.capabilities.most_guesses
        room = {number: most_guesses(self._scheduler.n_held(number)) for number in self._scheduler.running()}
        if self._is_padded:  # all that run have as many tokens in a pass, padding included
            room = dict.fromkeys(room, min(room.values()))
        for part in planned.parts:
            tokens, request = self._scheduler.tokens(part.request), self._open[part.request]
            most_depth = max(0, min(room[part.request], request.answer.n_left - 1))
            texts[part.request] = OpenText(tokens, part.sequence, most_depth, request.salt)
        return self._guesses.plan(texts, planned.free_cells)

    def _take_in(self, begun: BegunPass, computed: Sequence[ComputedPart], lap: Interval) -> Iterator[Event]:
        """Choose tokens by what came of a pass. lap: what it cost, after the pass that was finished before it."""
        planned = begun.planned
        passed_s = self._clock() - begun.began_s if self._passes.most_in_flight > 1 else None
        trees = {one.part.request: one.tree for one in computed if one.tree}
        widths = [len(one.tree.tree) if one.tree else len(one.part.tokens) for one in computed]
        n_sequences = span_of(one.part.sequence for one in computed)
        width = self._guesses.offers.width_of(widths, n_sequences) if self._guesses else sum(widths)
        if not (self._guesses and self._guesses.drafters.was_trial):  # such a pass says nothing of those to come
            self._widths.observe(width, lap.wall_s, lap.wait_s, lap.reads.busy_s, lap.reads.bytes_read)
        if self._guesses:
            chosen_after = [one.part for one in computed if one.found and one.part.request in self._open]
            numbers = [part.request for part in chosen_after if not self._is_prompt(part)]
            self._guesses.passed(trees, numbers, lap.wall_s, lap.wait_s, has_prompts=not planned.is_of_answers)
        for one, n_tokens in zip(computed, widths, strict=True):
            if (request := self._open.get(one.part.request)) is None:
                continue  # it was dropped while the pass was in flight
            is_read = one.part.start < len(request.answer.prompt) and not one.tree  # a last token alone, too
            if is_read and not request.course.prefill.wall_s:  # what was in flight may have been taken back
                request.course.cached_tokens = one.part.start
            note = request.course.prefilled if is_read else request.course.decoded
            note(begun.drafting + lap, n_tokens / sum(widths), passed_s)
            request.answer.note_read(one.part.start + len(one.part.tokens))
            if one.found and self._scheduler.is_at_end(one.part):
                yield from self._choose_all(one.part.request, request, one.found)
                self._passes.settle(one)

    def _is_prompt(self, part: PassPart) -> bool:
        return part.start + 1 < len(self._open[part.request].answer.prompt)

    def _choose_all(self, number: int, request: _Open, found: Verification) -> Iterator[Event]:
        """Choose the next token of a request, and those after it as long as they were guessed; end it where it ends."""
        if request.answer.wants_none:  # its prompt is read, for who asks next
            yield self._end(number, "length")
            return
        is_guessed = True
        while is_guessed:
            try:
                with system_errors("choosing a token"):
                    piece = request.answer.choose(found.row)
            except EdgeRunError as error:
                self._forget(number)
                yield Event(number, error=error)
                return
            if piece is None:
                yield self._end(number, "stop")
                return
            token = piece.token_ids[0]
            is_guessed = self._guesses is not None and self._guesses.follows(number, found, token)
            request.course.ttft_s = request.course.ttft_s or self._clock() - request.arrived_s
            self._scheduler.append(number, token, is_computed=is_guessed)
            yield Event(number, piece)
            if why := request.answer.why_stop() or ("context" if self._scheduler.is_full(number) else ""):
                yield self._end(number, why)
                return

    def _end(self, number: int, why: str) -> Event:
        """End a request; return its last piece."""
        speculation = self._guesses.figures_of(number) if self._guesses else self.speculation
        try:
            with system_errors("ending an answer"):  # whose figures are read from the system
                request = self._forget(number)
                last = request.answer.finish()
                why = "stop" if request.answer.is_stopped else why
                generation = report(self._engine, self._meter, request.answer, request.course, why, speculation)
        except EdgeRunError as error:
            return Event(number, error=error)
        if self._n_sequences > 1:
            numerics = replace(generation.numerics, batching=self._engine.shape.batching)
            generation = replace(generation, numerics=numerics)
        return Event(number, replace(last, generation=generation))

    def _forget(self, number: int) -> _Open:
        request = self._open.pop(number)
        self._scheduler.end(number)
        if self._guesses:
            self._guesses.end(number)
        request.answer.close()
        return request
