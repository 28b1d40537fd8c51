"""Who is answered: requests come in while few enough wait for their first token, and leave when they are done."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

import anyio

from edge_run.base.protocols import Clock
from edge_run.runtime.server.refusals import Refusal, shutting_down

MOST_RETRY_S = 3600.0
USUAL_S = 10.0  # of an answer, while none was measured
_LEARNING = 0.2  # the weight of the newest answer


class Place:
    """A request that came in. model: the name of what answers it. key: whose it is. scope: what to cancel to end it."""

    def __init__(self, clock: Clock, model: str = "", key: str = "") -> None:
        self._clock, self._began_s, self.model, self.key = clock, clock(), model, key
        self.has_begun = False
        self.scope = anyio.CancelScope()

    @property
    def age_s(self) -> float:
        """How long it has been here."""
        return self._clock() - self._began_s

    def begin(self) -> None:
        """Note that the first token is there."""
        self.has_begun = True


class Admission:
    """Lets requests in. Belongs to one event loop.

    max_queue: requests that may wait while another one waits for its first token, be it read or queued itself. Beyond
        that a key may still have its share of them, until all have twice as many.
    """

    def __init__(self, max_queue: int, clock: Clock = time.monotonic) -> None:
        self.max_queue, self._answer_s, self._clock = max_queue, USUAL_S, clock
        self._places: set[Place] = set()
        self.is_closed = False

    @property
    def n_waiting(self) -> int:
        """How many requests have no token yet."""
        return sum(not place.has_begun for place in self._places)

    @property
    def n_running(self) -> int:
        """How many requests are being answered."""
        return len(self._places) - self.n_waiting

    def of_model(self, model: str) -> tuple[int, int]:
        """Return how many requests a model answers, and how many wait for it."""
        begun = [place.has_begun for place in self._places if place.model == model]
        return sum(begun), len(begun) - sum(begun)

    @contextlib.contextmanager
    def place(self, model: str = "", key: str = "") -> Iterator[Place]:
        """Hold a place in this block. Raises Refusal where there is none: 429, or 503 once this is closed."""
        if self.is_closed:
            raise shutting_down(closes=True)
        if self._is_full(key):
            raise self.refusal()
        place = Place(self._clock, model, key)
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.remove(place)
            if place.has_begun:
                self._answer_s += _LEARNING * (place.age_s - self._answer_s)

    def _is_full(self, key: str) -> bool:
        """Return whether a request of a key is one too many."""
        waiting = Counter(place.key for place in self._places if not place.has_begun)
        share = self.max_queue / len({*waiting, key})
        n_waiting = waiting.total()
        return n_waiting > self.max_queue and (waiting[key] > share or n_waiting > 2 * self.max_queue)

    def refusal(self) -> Refusal:
        """Return what is said to one too many."""
        wait_s = self.expected_wait_s
        message = f"too many requests wait already; try again in {wait_s:.0f} s"
        return Refusal(429, message, code="queue_full", retry_after_s=wait_s)

    @property
    def expected_wait_s(self) -> float:
        """When the first of those that wait is expected to have its answer: answers wait for each other."""
        return min(max(1.0, self._answer_s), MOST_RETRY_S)

    def expect(self, answer_s: float) -> None:
        """Take an answer to last so long, while none was measured."""
        self._answer_s = answer_s

    def close(self) -> None:
        """Let nobody in any more."""
        self.is_closed = True

    def cancel(self) -> None:
        """End all requests that are here."""
        for place in self._places:
            place.scope.cancel()
