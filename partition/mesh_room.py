"""The room of a device that met with less than it seemed to have, as plans take it from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError
from edge_run.base.fields import MOST_BYTES
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork

LEAST_SHARE = 16  # of what a device had, one in so many is taken off at least, so that the next plan is another one


@dataclass(frozen=True, slots=True)
class RoomBound:
    """The most that a device is planned with, whatever it says of itself.

    memory_bytes: of its memory.
    weight_bytes: of weights, where it fetches them.
    keeps_all: its keys and values stay in memory.
    """

    memory_bytes: int = MOST_BYTES
    weight_bytes: int = MOST_BYTES
    keeps_all: bool = False

    def within(self, known: DeviceSpec) -> DeviceSpec:
        """Return a device as it is planned with."""
        most = known.most_weight_bytes
        return replace(
            known,
            memory_bytes=min(known.memory_bytes, self.memory_bytes),
            most_weight_bytes=None if most is None else min(most, self.weight_bytes),
            least_kept_bytes=0 if self.keeps_all else known.least_kept_bytes,
            least_kept_share=0.0 if self.keeps_all else known.least_kept_share,
        )


def room_bound(known: DeviceSpec, plan: MeshPlan, works: Sequence[UnitWork], error: EdgeRunError) -> RoomBound:
    """Return the bound for a device of `plan` that met with `error`: of its memory, or of its drive.

    A drive has no room for what is fetched, or for keys and values. What is missing is missing of what the device was
    to have, which may be far less than what it offered. works: the units of the model.
    """
    own = [work for work, owner in zip(works, plan.owners, strict=True) if owner == known.node]
    weight_bytes = sum(work.weight_bytes for work in own)
    if isinstance(error, BudgetError):
        had = known.memory_bytes
        if not plan.read_bytes.get(known.node, 0):  # else it reads the rest in all the memory that it has
            kept_bytes = sum(work.kept_bytes for work in own)
            had = min(had, weight_bytes + kept_bytes + plan.rounds * known.range_bytes)
        return RoomBound(memory_bytes=_less(had, max(error.minimum_bytes, error.needed_bytes) - error.found_bytes))
    if isinstance(error, TierReadError) and error.needed_bytes and known.most_weight_bytes is not None:
        had = min(known.most_weight_bytes, weight_bytes)
        return RoomBound(weight_bytes=_less(had, error.needed_bytes - error.found_bytes))
    return RoomBound(keeps_all=True)


def _less(had_bytes: int, missing_bytes: int) -> int:
    return max(0, had_bytes - max(missing_bytes, had_bytes // LEAST_SHARE))
