"""Decides what a run does when its mesh changes: a state machine without I/O. Events in, instructions out.

    LEADING -> PLANNING -> OPENING -> REPLAYING -> RUNNING
       ^___________________________________________|   a device of the plan is lost, refuses, or a better plan is there

Every attempt has an epoch that is later than all before: the epoch of the lease, with the attempts under that lease
counted in the lowest bits. Messages under an earlier epoch are ignored.
A device that was lost takes part again when it appears anew, or, a few times an hour, when it was there all along: its
link was silent for a moment. A device that refused takes part again when it is started anew; where what it refused for
may pass, it is asked again, a few times an hour too: after a while, or at once where it, or this device, is at another
address. So attempts end: at the latest, this device goes on alone, for which it needs no lease.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from edge_run.base.errors import EdgeRunError
from edge_run.base.fields import MOST_COUNT
from edge_run.base.protocols import Clock

FORGET_S = 3600.0

_What = TypeVar("_What")


class Phase(Enum):
    """What a run waits for."""

    LEADING = "the lease"
    PLANNING = "a plan"
    OPENING = "slices to open"
    REPLAYING = "what was said to be said again"
    RUNNING = "nothing"


@dataclass(frozen=True, slots=True)
class Appeared:
    """A device is there, for the first time or anew. is_anew: it was started since it was asked last."""

    node: str
    is_anew: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """The run has to do without a device.

    node: the device.
    why: the reason.
    teller: the device that says so, where that is another one.
    about: the device that `why` is said of, where that is another one.
    """

    node: str
    why: str
    teller: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """A device, which may be this one, is reached at other addresses than when it was asked.

    node: the device.
    apart: it and those from which it was apart at the old ones; empty where all of its links worked.
    """

    node: str
    apart: frozenset[str] = frozenset()


class Gone(Missing):
    """A device is not there any more, or does not answer."""


@dataclass(frozen=True, slots=True)
class Refused(Missing):
    """A device cannot take part, or does not want to. is_for_now: that may pass without its being started anew."""

    is_for_now: bool = False


@dataclass(frozen=True, slots=True)
class Led:
    """This device has the lease; its epoch may be the same again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class _Because:
    """Something changed for all devices of the run; why, in words for the user."""

    why: str


class NotLed(_Because):
    """The lease cannot be had."""


@dataclass(frozen=True, slots=True)
class Planned:
    """These devices, this one among them, compute the model."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """All slices of the plan of `epoch` are open."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """All caches hold again what they held."""

    epoch: int


class Better(_Because):
    """Another plan would be better."""


@dataclass(frozen=True, slots=True)
class LessRoom:
    """A device has less room than the plan took it to have.

    node: the device, which may be this one.
    error: what it met.
    """

    node: str
    error: EdgeRunError


class Deposed(_Because):
    """Nobody obeys this coordinator any more: another one has a later lease, or this device has left its mesh."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A device of the plan had lost touch with this one, and ended its part; it may take part again."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Apart:
    """A device, `teller`, does not reach another one of the plan, `node`; both are there, and may take part again."""

    teller: str
    node: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over: nobody computes for it any more."""


_Over: TypeAlias = "Deposed | GaveUp | Apart | Ended"
Event: TypeAlias = (
    "Appeared | Moved | Gone | Refused | Led | NotLed | Planned | Opened | Replayed | Better | LessRoom | _Over"
)
MOST_MISFITS = 3  # an hour
RETURN_S = 300.0  # before a device that refused, or did not answer, is asked again
ATTEMPT_BITS = 16
MOST_ATTEMPT = (MOST_COUNT + 1 << ATTEMPT_BITS) - 1  # the last attempt under the last epoch that a lease may have


@dataclass(frozen=True, slots=True)
class Lead:
    """Take the lease; answer with Led or NotLed."""


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Ask these devices what they have, and plan; answer with Planned, Gone or Refused."""

    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Have the devices of the plan open their slices; answer with Opened, Gone or Refused."""

    epoch: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplayLog:
    """Have all devices compute the log again; answer with Replayed, or Gone."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TellUser:
    """Let the user know.

    text: what happens.
    node: the device that does what `text` says; empty where none does.
    why: the reason, where it is not in `text`.
    about: the device that `why` is said of, where that is not `node`.
    teller: the device that says so, where that is not `node`.
    """

    text: str
    node: str = ""
    why: str = ""
    about: str = ""
    teller: str = ""


Instruction: TypeAlias = "Lead | MakePlan | Open | ReplayLog | TellUser"


class OfLate(Generic[_What]):
    """What happened with each device within the last hour: what is long ago counts no more. Not thread-safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._noted: dict[str, list[tuple[float, _What]]] = {}

    def note(self, node: str, what: _What) -> int:
        """It happened with `node`. Return how often something did, this time included."""
        now_s = self._clock()
        late = {other: [one for one in noted if now_s - one[0] < FORGET_S] for other, noted in self._noted.items()}
        self._noted = {other: noted for other, noted in late.items() if noted}
        self._noted.setdefault(node, []).append((now_s, what))
        return len(self._noted[node])

    def of(self, node: str) -> list[_What]:
        """Return what happened with `node`, in its order."""
        return [what for noted_s, what in self._noted.get(node, ()) if self._clock() - noted_s < FORGET_S]


class Failover:
    """The state of one run. `node` is this device, which has the tokens, and never leaves."""

    def __init__(self, node: str, candidates: Iterable[str], clock: Clock = time.monotonic) -> None:
        self.node = node
        self.candidates = set(candidates) - {node}
        self.left_out: dict[str, Refused] = {}
        self.nodes: tuple[str, ...] = ()
        self.epoch = 0
        self.phase = Phase.LEADING
        self.recoveries = 0
        self.why_more = ""  # why another plan may have a part for more devices, until there is one
        self._clock = clock
        self._misfits: OfLate[LessRoom] = OfLate(clock)  # devices that had less room than it seemed
        self._ends: OfLate[GaveUp] = OfLate(clock)
        self._losses: OfLate[Missing] = OfLate(clock)
        self._returns_s: dict[str, float] = {}  # when devices that the run does without may be asked again

    def start(self) -> list[Instruction]:
        """Begin, or begin again after something was broken off."""
        self.why_more = ""
        if not self.candidates:
            return self._alone()
        self.nodes, self.phase = (), Phase.LEADING
        return [Lead()]

    def handle(self, event: Event) -> list[Instruction]:
        """Return what is to be done now; what was said before and is not done yet is void when there is anything."""
        if isinstance(event, Appeared | Moved):
            return self._appeared(event) if isinstance(event, Appeared) else self._moved(event)
        if isinstance(event, Gone | Refused):
            return self._without(event)
        if isinstance(event, Better):
            return self._anew(TellUser(f"{event.why}: a new plan")) if self.phase is Phase.RUNNING else []
        if isinstance(event, LessRoom):
            return self._less_room(event)
        if isinstance(event, Deposed):
            return self._anew(TellUser(event.why)) if self.phase is not Phase.LEADING and len(self.nodes) != 1 else []
        if isinstance(event, GaveUp | Apart):
            return self._out_of_touch(event)
        if isinstance(event, Ended):
            self.nodes, self.phase = (), Phase.LEADING
            return []
        return self._next(event)

    def may_return(self, node: str) -> bool:
        """Return whether a device that is done without is asked again as it is there; not where that came too often."""
        is_time = self._clock() >= self._returns_s.get(node, math.inf)
        return is_time and node not in self.candidates and len(self._losses.of(node)) <= MOST_MISFITS

    def check(self) -> None:
        """Assert what always holds."""
        assert self.node not in self.candidates
        assert not self.candidates & self.left_out.keys()
        assert set(self.nodes) <= self.candidates | {self.node}
        if self.phase in (Phase.OPENING, Phase.REPLAYING, Phase.RUNNING):
            assert self.node in self.nodes

    def _next(self, event: Led | NotLed | Planned | Opened | Replayed) -> list[Instruction]:
        """Go a step further, when `event` is what is waited for."""
        if isinstance(event, Led) and self.phase is Phase.LEADING:
            self.epoch = max(self.epoch + 1, event.epoch << ATTEMPT_BITS)
            self.phase = Phase.PLANNING
            return [MakePlan(tuple(sorted(self.candidates)))]
        if isinstance(event, NotLed) and self.phase is Phase.LEADING:
            return [TellUser(f"{event.why}: this device goes on alone"), *self._alone()]
        if isinstance(event, Planned) and self.phase is Phase.PLANNING:
            return self._open(event.nodes)
        if isinstance(event, Opened) and self.phase is Phase.OPENING and event.epoch == self.epoch:
            self.phase = Phase.REPLAYING
            return [ReplayLog(self.epoch)]
        if isinstance(event, Replayed) and self.phase is Phase.REPLAYING and event.epoch == self.epoch:
            self.phase = Phase.RUNNING
        return []

    def _appeared(self, event: Appeared) -> list[Instruction]:
        node = event.node
        may_join = node not in self.left_out or event.is_anew or self.may_return(node)
        if may_join and node != self.node and node not in self.candidates:
            self.left_out.pop(node, None)
            self._returns_s.pop(node, None)
            self.candidates.add(node)
            self.why_more = "a device joined"
        return []

    def _moved(self, event: Moved) -> list[Instruction]:
        """Have devices that are done without asked again; and planned with, where a plan has no part for them."""
        concerned = {event.node} if event.node != self.node else self._returns_s.keys()
        self._returns_s |= dict.fromkeys(self._returns_s.keys() & concerned, self._clock())
        if not self.why_more and (self.candidates & event.apart) - {*self.nodes}:
            self.why_more = "a device has another address"
        return []

    def _without(self, event: Gone | Refused) -> list[Instruction]:
        node, is_candidate = event.node, event.node in self.candidates
        if not is_candidate and isinstance(event, Gone):  # it is done without already, or is of no use to this run
            return []
        self._losses.note(node, event)
        was_computing = self.phase in (Phase.REPLAYING, Phase.RUNNING)
        waits_s = 0.0 if was_computing and isinstance(event, Gone) else RETURN_S
        self._returns_s[node] = self._clock() + waits_s
        if isinstance(event, Refused):
            self.left_out[node] = event
            if not event.is_for_now:
                del self._returns_s[node]
        if not is_candidate:
            return []
        self.candidates.discard(node)
        is_of_plan = node in self.nodes
        self.nodes = tuple(other for other in self.nodes if other != node)
        is_left_out = isinstance(event, Refused) or self.phase is Phase.PLANNING
        told = TellUser("is left out" if is_left_out else "is lost", node, event.why, event.about, event.teller)
        if self.phase is Phase.PLANNING:
            return [told, MakePlan(tuple(sorted(self.candidates)))]
        return self._anew(told) if is_of_plan and self.phase is not Phase.LEADING else []

    def _out_of_touch(self, event: GaveUp | Apart) -> list[Instruction]:
        """Plan anew with a device that is there; where it gave up too often, without it."""
        if isinstance(event, Apart):
            told = TellUser("is not in touch with another device", event.teller, "is not reached", event.node)
        elif self._ends.note(event.node, event) > MOST_MISFITS:
            return self._without(Gone(event.node, event.why))
        else:
            told = TellUser(event.why, event.node)
        return self._anew(told) if event.node in self.nodes and self.phase is not Phase.LEADING else []

    def _less_room(self, event: LessRoom) -> list[Instruction]:
        """Plan anew with a device that has less room; where that came too often, or it is only asked, without it."""
        node, why = event.node, event.error.message
        if node not in self.nodes and self.phase is not Phase.PLANNING:
            return []
        is_too_often = self._misfits.note(node, event) > MOST_MISFITS
        if self.phase is Phase.PLANNING or (node != self.node and is_too_often):
            return self._without(Refused(node, why, is_for_now=True))
        if is_too_often:
            return [TellUser(f"{why}: this device goes on alone"), *self._alone()]
        return self._anew(TellUser(why) if node == self.node else TellUser("has less room than it seemed", node, why))

    def _anew(self, told: TellUser) -> list[Instruction]:
        self.recoveries += 1
        return [told, *self.start()]

    def _alone(self) -> list[Instruction]:
        self.epoch += 1
        return self._open((self.node,))

    def _open(self, nodes: tuple[str, ...]) -> list[Instruction]:
        self.nodes, self.phase = nodes, Phase.OPENING
        return [Open(self.epoch, nodes)]
