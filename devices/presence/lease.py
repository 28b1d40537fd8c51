"""Who coordinates: a lease with fencing epochs, as a state machine without I/O.

The broker keeps the last word about the lease. A claim names an epoch later than every one that was ever heard of,
and becomes a lease when its sender hears it come back and, for a moment, no later one. Two may believe to lead while
the network is torn, with two epochs; members obey the later one only (`obeys`), so the earlier one is fenced off.
The low bits of an epoch are drawn at random: also two that have not heard of each other do not take the same.

An epoch says how many rounds of claims there were, and a round takes its time: epochs after `most_epoch` cannot have
come about, and `devices/messages/envelope.py` lets none in. Who says the latest that can be keeps nobody from leading:
what can be grows faster than rounds follow each other.

A coordinator that cannot reach the broker leads on: its members are reached over the data link, and as soon as any
of them has heard of a later epoch, it is obeyed no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from edge_run.base.protocols import Clock

RENEW_S, EXPIRES_S, SETTLE_S, RETRY_S = 1.0, 5.0, 0.2, 1.0
LISTEN_S = 0.3  # to what the broker kept, before the first claim
CLAIMING_TICK_S = 0.05
BALLOT_BITS = 20
LEAST_ROUNDS, ROUNDS_PER_S = 1 << 24, 2.0  # a device claims once in RETRY_S; the first is for clocks that start in 1970


def most_epoch(wall_s: float) -> int:
    """Return the latest epoch that can have come about by `wall_s`, in seconds since 1970."""
    return (LEAST_ROUNDS + int(ROUNDS_PER_S * max(0.0, wall_s)) + 1 << BALLOT_BITS) - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """This device wants to lead."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """It wants no more, or gives the lease back."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker is there from now on; what it kept is about to be heard."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A word about the lease.

    state: claim, hold or free.
    is_old: the broker had kept it, so its sender may be gone.
    """

    node: str
    epoch: int
    state: str
    is_old: bool = False


@dataclass(frozen=True, slots=True)
class EpochHeard:
    """A member knows of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class HolderLost:
    """A member is no longer there; a lease of its own is free."""

    node: str


@dataclass(frozen=True, slots=True)
class LeaseTick:
    """Time went on."""


Event: TypeAlias = Wanted | Unwanted | Connected | Heard | EpochHeard | HolderLost | LeaseTick


@dataclass(frozen=True, slots=True)
class Say:
    """Publish a word about the lease."""

    epoch: int
    state: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This device leads no more: somebody has a later epoch."""

    epoch: int


Instruction: TypeAlias = Say | Withdrawn


class Lease:
    """The lease as `node` sees it.

    epoch: the highest epoch that was heard of.
    held: the epoch under which this device leads; 0 while it does not.
    """

    def __init__(self, node: str, clock: Clock, random: Random) -> None:
        self._node, self._clock, self._random = node, clock, random
        self.epoch = 0  # epoch, of whomever
        self._holder: str | None = None  # who said last that it holds the highest
        self._heard_s = self._said_s = clock()
        self._claim = self.held = 0
        self._echo_s: float | None = None
        self._is_wanted = False
        self._retry_s = 0.0

    @property
    def holder(self) -> str | None:
        """Who leads, as far as was heard; None while nobody does."""
        return self._node if self.held else self._holder

    @property
    def wait_s(self) -> float:
        """In how many seconds something may be due."""
        return CLAIMING_TICK_S if self._is_wanted and not self.held else RENEW_S / 2 if self.held else RENEW_S

    def obeys(self, node: str, epoch: int) -> bool:
        """Whether an order of `node` under `epoch`, which was heard of, is to be carried out now."""
        return epoch == self.epoch and self.holder in (None, node)

    def handle(self, event: Event) -> list[Instruction]:
        """Take in what happened; return what is to be done."""
        now_s = self._clock()
        if isinstance(event, Wanted):
            self._is_wanted = True
            return self._pass_time(now_s)
        if isinstance(event, Unwanted):
            return self._give_back()
        if isinstance(event, Connected):
            self._retry_s = max(self._retry_s, now_s + LISTEN_S)
            return []
        if isinstance(event, HolderLost):
            if self._holder == event.node:
                self._holder = None
            return []
        if isinstance(event, EpochHeard):
            return self._hear_epoch(event.epoch)
        if isinstance(event, Heard):
            return self._hear(event, now_s)
        return self._pass_time(now_s)

    def _hear(self, event: Heard, now_s: float) -> list[Instruction]:
        if event.node == self._node:
            if event.epoch == self._claim and event.state == "claim" and self._echo_s is None:
                self._echo_s = now_s
            return []
        done = self._hear_epoch(event.epoch)
        if event.epoch < self.epoch:
            return [*done, self._say(now_s)] if self.held else done  # who is behind learns where we are
        if event.epoch in (self._claim, self.held):  # against all odds the same: the greater name has it
            if event.node < self._node:
                return done
            done += self._yield()
        self._holder = None if event.state == "free" else event.node
        self._heard_s = now_s - (EXPIRES_S - 2.5 * RENEW_S if event.is_old else 0)  # who lives renews it soon
        return done

    def _hear_epoch(self, epoch: int) -> list[Instruction]:
        if epoch <= self.epoch:
            return []
        done = self._yield()
        self.epoch, self._holder = epoch, None
        return done

    def _yield(self) -> list[Instruction]:
        """Give up a claim or a lease before a later epoch."""
        self._retry_s = self._clock() + RETRY_S * (0.5 + self._random.random())
        self._claim, held, self.held = 0, self.held, 0
        if held:
            self._is_wanted = False  # who led is told, and decides himself whether to lead again
        return [Withdrawn(held)] if held else []

    def _give_back(self) -> list[Instruction]:
        epoch, self.held, self._claim, self._is_wanted = self.held or self._claim, 0, 0, False
        return [Say(epoch, "free")] if epoch else []

    def _pass_time(self, now_s: float) -> list[Instruction]:
        if self._holder is not None and now_s - self._heard_s > EXPIRES_S:
            self._holder = None
        if self.held:
            return [self._say(now_s)] if now_s - self._said_s >= RENEW_S else []
        if self._claim:
            if self._echo_s is not None and now_s - self._echo_s >= SETTLE_S:
                self.held, self._claim, self._holder = self._claim, 0, None
                return [self._say(now_s)]
            if now_s - self._said_s > RETRY_S:  # it was lost on the way
                self._claim = 0
        if self._is_wanted and not self._claim and self._holder is None and now_s >= self._retry_s:
            round_number = (self.epoch >> BALLOT_BITS) + 1
            self._claim = self.epoch = round_number << BALLOT_BITS | self._random.getrandbits(BALLOT_BITS)
            self._echo_s, self._said_s = None, now_s
            return [Say(self._claim, "claim")]
        return []

    def _say(self, now_s: float) -> Say:
        self._said_s = now_s
        return Say(self.held, "hold")

    def check(self) -> None:
        """Assert what always holds; tests call it after every event."""
        assert not (self._claim and self.held), "a lease is no claim any more"
        assert self.held in (0, self.epoch), "who leads knows of no later epoch"
        assert self._claim in (0, self.epoch), "nor does who claims"
