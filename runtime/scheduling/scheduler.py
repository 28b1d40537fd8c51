"""Which requests are served, and what the next pass computes for each: a state machine without I/O.

A request waits, is admitted when a sequence and cells for its tokens are free, has its prompt read in parts, makes one
token with each pass, and ends. A pass of answers alone may have guesses of what follows beside them, in cells that are
free: those that come true are appended as tokens that are computed already, and of the others nothing is left. Where
the cells of a context run out, the request that was admitted last waits again, and is computed again later, so that
those before it can end. Requests that ended earlier are not told of here: what they left in the context is the pool's.
Whose turn it is says `shares.py`.

Several passes may be in flight, where different devices compute at the same time. What a pass computes counts as held
once it is begun, since all that follows happens after it; a request of which nothing is left to begin waits for its
token. A pass then has a group of the requests only, so that there are as many groups as passes in flight.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_run.base.protocols import Clock
from edge_run.runtime.decoding.common_prefix import common_prefix_tokens
from edge_run.runtime.scheduling.sequences import Beginning, SequencePool
from edge_run.runtime.scheduling.shares import Shares
from edge_run.runtime.scheduling.widths import PassWidths

GROWTH_TOKENS = 16  # for which a request that is admitted must have room, and those before it
LEAST_AWAITED = 64  # tokens that another request reads now, for which one waits to share them
MOST_TRIED = 8  # requests, of which the first may be waiting for that


@dataclass(frozen=True, slots=True)
class PassPart:
    """What a pass computes of one request.

    request: its number.
    sequence: where its tokens are.
    start: the position of the first token.
    tokens: the tokens.
    is_last: whether these are all that is known of it, so that the next token can be chosen.
    """

    request: int
    sequence: int
    start: int
    tokens: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """What the next pass computes.

    emptied: the sequences that have to be emptied before.
    parts: what is computed, answers before prompts.
    free_cells: the cells that are left, for guesses of what follows: they are taken no longer than the pass takes.
    """

    emptied: tuple[int, ...]
    parts: tuple[PassPart, ...]
    free_cells: int = 0

    @property
    def width(self) -> int:
        """The tokens of the pass."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def is_of_answers(self) -> bool:
        """Whether each part is the one token that is certain of an answer, so that what follows may be guessed."""
        return all(part.is_last and len(part.tokens) == 1 for part in self.parts)


@dataclass(frozen=True, slots=True)
class PassRules:
    """What the passes of a context must be like.

    most_tokens: of one request.
    has_equal_parts: all parts of a pass have as many tokens, as recurrent models want it.
    is_exact: a request is computed in the same parts whatever else is: its prompt alone, on a grid, its answer token by
        token.
    """

    most_tokens: int
    has_equal_parts: bool = False
    is_exact: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has not ended.

    tokens: of the prompt and the answer so far; those that were given, until it is admitted.
    n_prompt: the tokens of the prompt.
    priority: higher ones come first.
    key: whose it is.
    arrived_s: when it came.
    salt: what was computed for it serves those of the same salt.
    sequence: where its tokens are; None while it waits.
    n_held: how many tokens the sequence holds.
    turn: how many were admitted before it.
    last_pass: the number of the last pass that it was in, 0 before there was one.
    """

    number: int
    tokens: Sequence[int]
    n_prompt: int
    priority: int
    key: str
    arrived_s: float
    salt: str = ""
    sequence: int | None = None
    n_held: int = 0
    turn: int = 0
    last_pass: int = 0

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_held


class Scheduler:
    """The requests of one context. Not thread-safe.

    It is over 200 lines because what happens to one request changes what all others may have.

    pool: the context's sequences.
    widths: how wide passes are.
    rules: what passes must be like.
    clock: the seconds since some moment.
    """

    def __init__(self, pool: SequencePool, widths: PassWidths, clock: Clock, rules: PassRules) -> None:
        self._pool, self._widths, self._clock, self._rules = pool, widths, clock, rules
        self._requests: dict[int, _Request] = {}
        self._running: list[_Request] = []  # of them those with a sequence, in the order in which they came to it
        self._numbers, self._turns = itertools.count(), itertools.count()
        self._shares = Shares()
        self._reads_prompt_next = True
        self._n_passes = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not self._requests

    @property
    def n_waiting(self) -> int:
        """The requests that have no sequence."""
        return len(self._requests) - self.n_running

    @property
    def n_running(self) -> int:
        """The requests that have one."""
        return len(self._running)

    def running(self) -> list[int]:
        """Return the requests that have a sequence, those first that were admitted first."""
        return [request.number for request in self._running]

    def tokens(self, number: int) -> Sequence[int]:
        """Return the tokens of a request: its prompt, and its answer so far."""
        return self._requests[number].tokens

    def n_held(self, number: int) -> int:
        """Return how many tokens of a request are computed."""
        return self._requests[number].n_held

    @property
    def room_tokens(self) -> int:
        """The tokens that one request can have, its prompt and its answer together."""
        return self._rules.most_tokens

    def submit(self, tokens: Sequence[int], priority: int = 0, key: str = "", salt: str = "") -> int:
        """Take a request on; return its number. Its tokens must be fewer than `room_tokens`, and stay as they are."""
        number = next(self._numbers)
        self._shares.enter(key, (request.key for request in self._requests.values()))
        self._requests[number] = _Request(number, tokens, len(tokens), priority, key, self._clock(), salt)
        return number

    def admit(self) -> Beginning | None:
        """Admit the next request, if one can be; return where it begins: carry that out, or have it `put_back`."""
        if not self.n_waiting or not self._pool.has_free_sequence:
            return None
        now_s = self._clock()
        for request in heapq.nsmallest(MOST_TRIED, self._next_ones(), key=lambda one: self._rank(one, now_s)):
            placed = self._pool.plan(request.tokens, request.salt)
            if not self._is_being_read(request, placed.n_tokens):
                return self._admit(request, placed, now_s)
        return None

    def _admit(self, request: _Request, placed: Beginning, now_s: float) -> Beginning | None:
        needed = len(request.tokens) - placed.n_tokens + GROWTH_TOKENS * (self.n_running + 1)
        if self.n_running and self._pool.room_beside(placed) < needed:
            return None
        self._pool.begin(request.number, placed, request.salt)
        request.sequence = placed.sequence
        if len(request.tokens) == request.n_prompt:
            request.tokens = list(request.tokens)  # no sooner: many answers to one prompt may wait
        request.turn = next(self._turns)
        self._shares.admit(request.key, request.priority, request.turn, now_s)
        request.n_held = placed.n_tokens
        self._running.append(request)
        return placed

    def is_first(self, place: Beginning) -> bool:
        """Return whether the request at `place` is alone, in a context that holds nothing yet."""
        return place.sequence == 0 and self.n_running == 1 and not self._pool.used_cells

    def read_back(self, number: int, n_tokens: int) -> None:
        """The sequence of a request holds its first `n_tokens` tokens now, and nothing was computed for that."""
        request = self._requests[number]
        assert request.sequence is not None
        assert not request.n_held
        self._pool.extend(request.sequence, request.tokens[:n_tokens])
        request.n_held = n_tokens

    def placed(self, sequence: int, n_tokens: int) -> None:
        """`sequence` holds `n_tokens` tokens only, fewer than it was said to."""
        self._pool.cut(sequence, n_tokens)
        for request in self._running:
            if request.sequence == sequence:
                request.n_held = min(request.n_held, n_tokens)

    def next_pass(self, n_guesses: int = 0, n_groups: int = 1) -> PlannedPass | None:
        """Return what to compute next; None, or a pass of no parts, where no request has anything to compute.

        n_guesses: that may be verified with it. What ended requests left gives way to them, nobody else does.
        n_groups: into which the requests that run are divided, each of which has a pass in flight.

        Where cells run out, prompts wait for answers to end, and answers for those that were admitted before them.
        """
        emptied: list[int] = []
        while ready := self._ready(n_groups):
            parts = self._choose(ready)
            width = sum(len(part.tokens) for part in parts)
            emptied += self._pool.make_room(width + n_guesses)
            free = self._pool.n_cells - self._pool.used_cells
            fitting = _cut(parts, free)
            if fitting and _n_answers(fitting) == _n_answers(parts):
                return PlannedPass(tuple(emptied), tuple(fitting), max(0, free - width))
            assert self.n_running > 1, "a request that is alone has room, or is full"
            self.put_back()
        return PlannedPass(tuple(emptied), ()) if emptied else None

    def give_way(self) -> list[int] | None:
        """Make room where a pass had none although it was expected to; return the sequences to empty, if any.

        None: nothing was done, as the request that is alone has no room.
        """
        if (emptied := self._pool.make_room(self._pool.n_cells)) or self.n_running < 2:
            return emptied or None
        self.put_back()  # also who holds nothing: without its tokens the next pass is narrower
        return self._pool.make_room(self._pool.n_cells)

    def put_back(self) -> None:
        """Let the request that was admitted last wait again."""
        request = self._running.pop()
        assert request.sequence is not None
        self._pool.end(request.sequence)
        request.sequence, request.n_held = None, 0

    def begun(self, planned: PlannedPass) -> None:
        """`planned` was begun. Where it fails, its sequences have to be `placed`."""
        self._n_passes += 1
        for part in planned.parts:
            request = self._requests[part.request]
            self._pool.extend(part.sequence, part.tokens)
            request.n_held += len(part.tokens)
            request.last_pass = self._n_passes
            self._shares.give(request.key, len(part.tokens))

    def append(self, number: int, token: int, *, is_computed: bool = False) -> None:
        """`token` comes next in the answer of a request. is_computed: as a guess, in the pass before."""
        request = self._requests[number]
        assert isinstance(request.tokens, list)
        request.tokens.append(token)
        if is_computed:
            assert request.sequence is not None
            self._pool.extend(request.sequence, (token,))
            request.n_held += 1
            self._shares.give(request.key, 1)

    def is_at_end(self, part: PassPart) -> bool:
        """Return whether the next token can be chosen by what `part` has brought: its request's text ends with it.

        A request that gave way while a pass with its last token was in flight may be computed again before that pass is
        finished; then the text goes on, and what comes a second time is of its middle.
        """
        return part.is_last and part.start + len(part.tokens) == len(self._requests[part.request].tokens)

    def is_full(self, number: int) -> bool:
        """Return whether the last token of a request has no cell any more, even if it were alone."""
        return len(self._requests[number].tokens) > self._rules.most_tokens

    def end(self, number: int) -> None:
        """A request has ended, for whatever reason."""
        request = self._requests.pop(number)
        if request.sequence is not None:
            self._pool.end(request.sequence)
            self._running.remove(request)
        self._shares.leave(request.key for request in self._requests.values())

    def _ready(self, n_groups: int) -> list[_Request]:
        """Return the requests that the next pass is for: of those that have something to compute, a group."""
        ready = [request for request in self._running if request.n_left]
        room = len(ready) if n_groups == 1 else max(1, 3 * self._widths.most_tokens // 4)  # of one pass, with prompts
        group = sorted(ready, key=lambda request: request.last_pass)[: min(room, -(-self.n_running // n_groups))]
        return sorted(group, key=lambda request: request.turn)

    def _next_ones(self) -> list[_Request]:
        """Return the requests that are next to be admitted: those that had to give their place up, or all that wait.

        One that waits with a higher priority goes before them.
        """
        waiting = [request for request in self._requests.values() if request.sequence is None]
        highest = max(request.priority for request in waiting)
        return [request for request in waiting if request.last_pass and request.priority == highest] or waiting

    def _is_being_read(self, request: _Request, n_held: int) -> bool:
        """Whether another request is reading much of what `request` would read itself: in a moment they share it."""
        least = n_held + max(LEAST_AWAITED, (len(request.tokens) - n_held) // 2)
        return self._pool.shares_beginnings and any(
            other.salt == request.salt
            and other.n_held < min(least, other.n_prompt)
            and common_prefix_tokens(other.tokens[: other.n_prompt], request.tokens) >= least
            for other in self._running
        )

    def _rank(self, request: _Request, now_s: float) -> tuple[float, int, int, int]:
        return (*self._shares.rank(request.key, request.priority, request.arrived_s, now_s), request.number)

    def _choose(self, running: Sequence[_Request]) -> list[PassPart]:
        """Return what is computed next as far as time goes."""
        prompts = [request for request in running if self._is_prompt(request)]
        answers = [_part(request, 1) for request in running if not self._is_prompt(request)]
        if not self._rules.has_equal_parts:
            return answers + self._share(prompts, len(answers))
        reads_prompt = bool(prompts) and (self._reads_prompt_next or not answers)
        self._reads_prompt_next = not reads_prompt
        if not reads_prompt:
            return sorted(answers, key=lambda part: part.sequence)
        first, width = prompts[0], self._widths.most_tokens
        if self._rules.is_exact:  # what was said since is computed again as it was, token by token
            return [_part(first, min(first.n_prompt - first.n_held, width))]
        return [_part(first, min(width, self._widths.with_prompts(len(answers), are_few=self._are_answers_few())))]

    def _is_prompt(self, request: _Request) -> bool:
        return request.n_left > 1 and (not self._rules.is_exact or request.n_held < request.n_prompt)

    def _are_answers_few(self) -> bool:
        """Return whether fewer of all that run make tokens than have prompts to be read."""
        return 2 * sum(map(self._is_prompt, self._running)) > self.n_running

    def _share(self, prompts: Sequence[_Request], n_answers: int) -> list[PassPart]:
        """Return what a pass has of prompts: half for the one that came first, the rest for the shortest.

        Those that end with it then may have some tokens more.
        """
        if not prompts:
            return []
        n_tokens = self._widths.with_prompts(n_answers, are_few=self._are_answers_few()) - n_answers
        shares = {request.number: 0 for request in prompts}
        shares[prompts[0].number] = min(prompts[0].n_left, max(1, n_tokens // 2))
        left = n_tokens - sum(shares.values())
        shortest_first = sorted(prompts, key=lambda request: request.n_left)
        for request in shortest_first:
            more = min(left, request.n_left - shares[request.number])
            shares[request.number] += more
            left -= more
        for request in shortest_first:
            more = request.n_left - shares[request.number]
            if not self._widths.may_end_prompts(n_answers, n_answers + sum(shares.values()) + more):
                break
            shares[request.number] += more
        return [_part(request, share) for request in prompts if (share := shares[request.number])]


def _part(request: _Request, n_tokens: int) -> PassPart:
    assert request.sequence is not None
    tokens = tuple(request.tokens[request.n_held : request.n_held + n_tokens])
    is_last = request.n_held + len(tokens) == len(request.tokens)
    return PassPart(request.number, request.sequence, request.n_held, tokens, is_last)


def _n_answers(parts: Sequence[PassPart]) -> int:
    return sum(part.is_last and len(part.tokens) == 1 for part in parts)


def _cut(parts: Sequence[PassPart], room: int) -> list[PassPart]:
    """Return as much of `parts`, in their order, as `room` cells have room for."""
    found = []
    for part in parts:
        if not (tokens := part.tokens[:room]):
            break
        found.append(replace(part, tokens=tokens, is_last=part.is_last and len(tokens) == len(part.tokens)))
        room -= len(tokens)
    return found
