"""How long it takes until an answer goes on after a device was lost: said beforehand, and kept."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.runtime.mesh.log import MeshLog


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """A plan's: seconds of a token as measured (0: not yet) and as planned (0: not known), and of reading its weights.

    reading_s: what the device that has most to read beside its disk takes for all that it keeps.
    """

    token_s: float = 0.0
    planned_s: float = 0.0
    reading_s: float = 0.0


def replay_s(log: MeshLog, before: PlanTimes, after: PlanTimes) -> float:
    """Return how long it takes to say again what `log` has, and the token that was broken off, under a new plan.

    What was said first took its time under `before`, reading included. Under a slower plan each pass takes longer, and
    where a device has more to read, the first pass waits for it.
    """
    usual_s = max(before.planned_s, before.token_s)
    slower = max(1.0, after.planned_s / usual_s) if usual_s else 1.0
    more_reading_s = max(0.0, after.reading_s - before.reading_s)
    return slower * (log.seconds(before.token_s) + before.token_s) + more_reading_s
