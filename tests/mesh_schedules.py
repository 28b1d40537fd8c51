"""What is done to a mesh while it answers: faults, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORKERS, SERVER, COORDINATOR, HERE = "bcd", "b", "a", ""
DEADLY = ("kill", "freeze", "restart", "freeze and thaw")
ON_LINKS = ("unplug", "cut", "cut one way", "slow")
ON_BROKER = ("broker down", "broker restart")
ON_COORDINATOR = ("unplug", "freeze and thaw")  # for a while
COORDINATOR_FAULTS = ("kill", "freeze", "unplug")
RATES = ("250kbit", "1mbit", "5mbit")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. token: at which it strikes; 0: before the prompt. heals_s: after which it ends; None: it does not."""

    token: int
    what: str
    whom: str = HERE
    other: str = HERE
    heals_s: float | None = None
    rate: str = ""

    def __str__(self) -> str:
        words = [f"{self.token}:", self.what, self.whom, self.other, self.rate]
        return " ".join(filter(None, words)) + (f" for {self.heals_s:g} s" if self.heals_s else "")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens in one answer. end: what becomes of who makes it. takes_broker: the broker is lost with him.

    is_there: whoever takes over was a member before.
    """

    seed: int
    serves: str
    faults: tuple[Fault, ...]
    end: Fault | None = None
    takes_broker: bool = False
    is_there: bool = True

    def __str__(self) -> str:
        end = f"{self.end} (coordinator{' and broker' if self.takes_broker else ''})" if self.end else ""
        return "; ".join(filter(None, [*map(str, self.faults), end]))


def draw_schedule(seed: int, tokens: int, has_network: bool) -> Schedule:
    """Return one to three faults, and in a third of all cases the loss of the coordinator after them."""
    draw = random.Random(seed)
    serves = SERVER if seed % 4 == 3 else ""
    kinds = [*DEADLY, *(ON_LINKS * 2 if has_network else ()), *(() if serves else ON_BROKER)]
    alive, faults = list(WORKERS), []
    moments = sorted(draw.sample(range(1, tokens - 2), draw.randint(1, 3)))
    for token in moments:
        what = draw.choice(kinds)
        heals_s = draw.choice([None, 0.5, 1.5, 3.0, 5.0])
        if what in ON_BROKER:
            faults.append(Fault(token, what))
        elif what.startswith("cut"):
            whom, other = draw.sample([*alive, COORDINATOR, HERE] if alive else [COORDINATOR, HERE], 2)
            faults.append(Fault(token, what, whom, other, heals_s))
        elif what == "slow":
            faults.append(Fault(token, what, draw.choice(WORKERS + COORDINATOR), "", heals_s, draw.choice(RATES)))
        elif what in ON_COORDINATOR and draw.random() < 0.25:
            faults.append(Fault(token, what, COORDINATOR, "", heals_s or 10.0))
        elif len(alive) > 1:
            victim = draw.choice([SERVER] if serves in alive and serves and draw.random() < 0.5 else alive)
            alive.remove(victim)
            faults.append(Fault(token, what, victim, "", {"unplug": heals_s, "freeze and thaw": 1.0}.get(what)))
    ends = COORDINATOR_FAULTS if has_network else COORDINATOR_FAULTS[:2]
    end = Fault(draw.randint(2, tokens - 2), draw.choice(ends)) if draw.random() < 1 / 3 else None
    faults = [fault for fault in faults if end is None or fault.token <= end.token]
    takes_broker, is_there = end is not None and draw.random() < 0.3, draw.random() < 0.5
    if end is not None and draw.random() < 0.2:
        faults, end = [], Fault(0, end.what)
    return Schedule(seed, serves, tuple(faults), end, takes_broker, is_there)
