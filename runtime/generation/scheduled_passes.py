"""The passes that a scheduler plans, computed by a decoder; what becomes of them is told to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edge_run.base.errors import ContextFull
from edge_run.base.protocols import BatchToken, Decoder, Logits
from edge_run.runtime.scheduling.scheduler import PassPart, PlannedPass, Scheduler


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """A pass that was computed.

    planned: what it was.
    rows: the logits after each part that is the last of its request so far, `(n_such_parts, vocabulary)`; they are
        valid until the next pass.
    """

    planned: PlannedPass
    rows: Logits


class ScheduledPasses:
    """Computes what a scheduler plans. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, decoder: Decoder) -> None:
        self._scheduler, self._decoder = scheduler, decoder

    def admit(self) -> None:
        """Admit the requests that can be, and have their sequences hold what they begin with."""
        while (place := self._scheduler.admit()) is not None:
            if place.source != place.sequence:
                self._decoder.branch(place.source, (place.sequence,))
            held = self._decoder.rewind(place.sequence, place.n_tokens)
            if held < place.n_tokens:  # a window has left what they would need
                self._scheduler.placed(place.sequence, held)

    def compute(self) -> ComputedPass | None:
        """Compute the next pass; None where no request needs one, or where it had no room and others have given way.

        Raises the errors of `Decoder.decode`; then the requests are as they were before, and `compute` may go on.
        """
        planned = self._scheduler.next_pass()
        if planned is None:
            return None
        self._empty(planned.emptied)
        try:
            rows = self._decoder.decode([token for part in planned.parts for token in _batch(part)])
        except ContextFull:
            self._settle(planned)
            emptied = self._scheduler.give_way()
            if emptied is None:
                raise
            self._empty(emptied)
            return None
        except BaseException:
            self._settle(planned)
            raise
        self._scheduler.computed(planned)
        return ComputedPass(planned, rows)

    def _empty(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._decoder.rewind(sequence, 0)

    def _settle(self, planned: PlannedPass) -> None:
        """Note what the sequences of a pass hold that was not computed: what they held before, or nothing."""
        for part in planned.parts:
            self._scheduler.placed(part.sequence, self._decoder.rewind(part.sequence, part.start))


def _batch(part: PassPart) -> Iterator[BatchToken]:
    last = len(part.tokens) - 1
    for i, token in enumerate(part.tokens):
        yield BatchToken(token, part.start + i, part.sequence, wants_logits=part.is_last and i == last)
