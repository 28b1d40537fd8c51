"""How a batch of requests is cut between machines of different speed, so that all of them end at the same time.

A machine that answers many at once is given requests one by one, and always has as many as share its passes. That is
enough while many are left. At the end it is not: a slow machine would still work on a full load when fast ones have
nothing left to do. So none has more unfinished requests than its share, by the tokens a second that were measured; and
when none is left to give, one that another machine would answer much sooner is taken back (as MapReduce has its last
tasks done elsewhere: Dean and Ghemawat, 2004, but done twice there). That happens to a request once: one that is long
by itself would begin anew without end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

AHEAD_S = 10.0
"""How long the requests that wait at a machine keep it busy: more than a lost second or two, and more than the five
seconds from which on Dask's adaptive clusters grow. What waits there is not lost, but it is not elsewhere either."""

SOONER = 2.0  # another machine must be, which begins anew, for a request to be taken back


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """What a machine has to do.

    most: requests that it takes on at once.
    n_asked: requests that it was given and has not answered.
    tokens_per_s: of the answers that it made, None before that is known.
    requests_per_s: the same in answers.
    """

    most: int
    n_asked: int = 0
    tokens_per_s: float | None = None
    requests_per_s: float = 0.0


def next_machine(n_unfinished: int, loads: Sequence[MachineLoad]) -> int | None:
    """Return the number of the machine that the next request goes to; None where it waits until one is answered.

    n_unfinished: requests without an answer, those that machines have and the next one included.
    """
    rates = _rates(loads)
    free = [
        number
        for number, (load, rate) in enumerate(zip(loads, rates, strict=True))
        if load.n_asked < _quota(n_unfinished, load, rate / sum(rates))
    ]
    return min(free, key=lambda number: (loads[number].n_asked + 1) / rates[number], default=None)


def to_take_back(loads: Sequence[MachineLoad], newest_s: Sequence[float | None]) -> int | None:
    """Return the number of the machine whose newest request another would answer much sooner; None where none would.

    newest_s: for how long each machine has had the newest of its requests that may be taken back; None without one.
    """
    answer_s = {
        number: load.most / load.requests_per_s
        for number, load in enumerate(loads)
        if load.requests_per_s and load.n_asked < load.most
    }
    left_s = [_left_s(load, for_s) for load, for_s in zip(loads, newest_s, strict=True)]

    def is_late(number: int) -> bool:
        elsewhere_s = min((one_s for other, one_s in answer_s.items() if other != number), default=math.inf)
        return left_s[number] > SOONER * elsewhere_s

    return max(filter(is_late, range(len(loads))), key=left_s.__getitem__, default=None)


def _left_s(load: MachineLoad, newest_s: float | None) -> float:
    """Return how long a machine is expected to take for its newest request.

    What is overdue takes as long again, as it may be frozen; and so does what nothing is known of.
    """
    expected_s = max(load.n_asked, load.most) / load.requests_per_s if load.requests_per_s else 0.0
    return abs(expected_s - newest_s) if load.n_asked and newest_s is not None else 0.0


def _quota(n_unfinished: int, load: MachineLoad, share: float) -> int:
    """Return how many unfinished requests a machine may have."""
    return min(load.most + math.ceil(AHEAD_S * load.requests_per_s), math.ceil(n_unfinished * share))


def _rates(loads: Sequence[MachineLoad]) -> list[float]:
    """Return the speed of each machine; one that was not measured is as fast as the others on average."""
    known = [load.tokens_per_s for load in loads if load.tokens_per_s]
    usual = sum(known) / len(known) if known else 1.0
    return [load.tokens_per_s or usual for load in loads]


class AnswerPace:
    """How fast a machine answers, from when its last answers came."""

    def __init__(self, n_remembered: int) -> None:
        """n_remembered: answers that count; fewer than end together would say too much or nothing."""
        self._came: deque[tuple[float, int]] = deque(maxlen=max(2, n_remembered))

    def start(self, now_s: float) -> None:
        """Go on: the machine had nothing to do until now, which says nothing of its pace."""
        if not self._came:
            self._came.append((now_s, 0))
        idle_s = now_s - self._came[-1][0]
        self._came = deque(((came_s + idle_s, n_tokens) for came_s, n_tokens in self._came), self._came.maxlen)

    def add(self, now_s: float, n_tokens: int) -> None:
        """An answer of so many tokens came."""
        self._came.append((now_s, n_tokens))

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of answers, over the time; None before the first answer."""
        return self._per_s(sum(n_tokens for _, n_tokens in list(self._came)[1:]))

    @property
    def requests_per_s(self) -> float:
        """The answers, over the time; 0 before the first."""
        return self._per_s(len(self._came) - 1) or 0.0

    def _per_s(self, count: int) -> float | None:
        if len(self._came) < 2 or count == 0:
            return None
        return count / max(1e-6, self._came[-1][0] - self._came[0][0])
