"""Whose turn it is where one model is open and requests ask for several. Decisions only, no I/O.

A request for the model that is open goes on at once, until others have waited for `patience_s`: then newcomers wait
too, those that were let in finish, and the model that has been waited for longest is opened. All that wait for it then
go on together. So no request waits longer than for each other model's patience, its opening, and the answers that had
begun; and as a model stays open for a multiple of what opening took, little time goes into that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from edge_run.base.errors import EdgeRunError
from edge_run.base.protocols import Clock

LEAST_PATIENCE_S = 5.0
OPENINGS = 4  # a model stays open for so many times what opening it took, where others wait


@dataclass(eq=False, slots=True)
class ModelTurn:
    """A request's claim on a model. since_s: when it came. is_in: it uses the model. error: why it never will."""

    name: str
    since_s: float
    is_in: bool = False
    error: EdgeRunError | None = None


@dataclass(frozen=True, slots=True)
class ModelChange:
    """What is to be done now: close what is open, then open the model of this name; None: no other one."""

    name: str | None


@dataclass(slots=True)
class Turns:
    """The state. After each event `decide` says what has changed.

    open: the model that is open. is_changing: a `ModelChange` is being carried out. is_leaving: the model that is open
    is to be closed as soon as nobody uses it.
    """

    clock: Clock = time.monotonic
    open: str | None = None
    is_changing: bool = False
    is_leaving: bool = False
    users: set[ModelTurn] = field(default_factory=set)
    waiting: list[ModelTurn] = field(default_factory=list)
    _opened_s: float = -float("inf")
    _patience_s: float = LEAST_PATIENCE_S

    def ask(self, name: str) -> ModelTurn:
        """Take a request for a model on; it waits until `decide` lets it in."""
        turn = ModelTurn(name, self.clock())
        self.waiting.append(turn)
        return turn

    def leave(self, turn: ModelTurn) -> None:
        """Forget a request, whether it waits, or is in, or has failed."""
        self.users.discard(turn)
        if turn in self.waiting:
            self.waiting.remove(turn)

    def close_when_idle(self) -> None:
        """Have the model closed that is open, when those that use it are done."""
        self.is_leaving = self.open is not None

    def opened(self, name: str, took_s: float = 0.0) -> None:
        """Note that a change is made: the model is open."""
        self.open, self.is_changing, self.is_leaving = name, False, False
        self._opened_s, self._patience_s = self.clock(), max(LEAST_PATIENCE_S, OPENINGS * took_s)
        self._let_in()

    def closed(self) -> None:
        """Note that a change is made: no model is open."""
        self.open, self.is_changing, self.is_leaving = None, False, False

    def failed(self, name: str, error: EdgeRunError) -> None:
        """Note that a model cannot be opened: those that wait for it need not."""
        self.closed()
        for turn in [turn for turn in self.waiting if turn.name == name]:
            turn.error = error
            self.waiting.remove(turn)

    def decide(self) -> ModelChange | None:
        """Let in who may go on; return what is to be done, if anything is."""
        if self.is_changing:
            return None
        if self.open is not None and self._takes_more:
            self._let_in()
        if self.users or not (self.waiting or self.is_leaving):
            return None
        oldest = min(self.waiting, key=lambda turn: turn.since_s, default=None)
        if oldest and oldest.name == self.open and not self.is_leaving:
            self._let_in()
            return None
        self.is_changing = True
        return ModelChange(oldest.name if oldest else None)

    @property
    def _takes_more(self) -> bool:
        """Whether newcomers may use the model that is open."""
        others = [turn.since_s for turn in self.waiting if turn.name != self.open]
        closes_s = max(self._opened_s, min(others, default=float("inf"))) + self._patience_s
        return not self.is_leaving and self.clock() < closes_s

    def _let_in(self) -> None:
        for turn in [turn for turn in self.waiting if turn.name == self.open]:
            self.waiting.remove(turn)
            turn.is_in = True
            self.users.add(turn)
