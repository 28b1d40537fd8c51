"""Computes again all that was decoded: under a new plan, or when a pass has a graph that no device knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_run.base.errors import EdgeRunError, NotSupported, option
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.driver import GraphChanged, PassShape
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Command, Operate
from edge_run.runtime.mesh.transport import GRAPH_CHANGED, PassFailed
from edge_run.runtime.slices.maps import SliceMaps

Perform = Callable[[Command], None]  # has all devices carry out a command
BatchOf = Callable[[EdgeRunError], Sequence[BatchToken]]  # returns the tokens of the pass that an error is about


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """How long the passes of a plan take.

    token_s: a token, as measured; 0 where nothing was measured yet.
    planned_s: a token, as planned; 0 where that is not known.
    reading_s: what the device that has most to read beside its disk takes for all that it keeps.
    """

    token_s: float = 0.0
    planned_s: float = 0.0
    reading_s: float = 0.0


def replay_s(log: MeshLog, before: PlanTimes, after: PlanTimes) -> float:
    """Return how long it takes to compute again what `log` has, and the token that was broken off, under a new plan.

    What was computed first took its time under `before`, reading included. Under a slower plan each pass takes longer,
    and where a device has more to read, the first pass waits for it.
    """
    usual_s = max(before.planned_s, before.token_s)
    slower = max(1.0, after.planned_s / usual_s) if usual_s else 1.0
    more_reading_s = max(0.0, after.reading_s - before.reading_s)
    return slower * (log.seconds(before.token_s) + before.token_s) + more_reading_s


class LogReplay:
    """Has the commands of a log carried out again. Not thread-safe."""

    def __init__(self, log: MeshLog, maps: SliceMaps, say: Callable[[str], None]) -> None:
        """maps: the graphs that are known here. say: is told how much is computed again."""
        self._log, self._maps, self._say = log, maps, say
        self._before = self._times = PlanTimes()
        self._learned: set[PassShape] = set()

    def forget_shapes(self) -> None:
        """Devices are about to open their slices: none of them knows more graphs than this one."""
        self._learned.clear()

    def change_plan(self, times: PlanTimes, token_s: float) -> None:
        """A plan that takes `times` is in force. token_s: what a token took under the one before, 0: there was none."""
        if token_s:
            self._before = replace(self._times, token_s=token_s)
        self._times = times

    def unknown_shape(self, error: EdgeRunError, batch: Sequence[BatchToken]) -> PassShape | None:
        """Return the shape of a pass whose graph has to be learnt, where `error` says so; else None."""
        is_told = isinstance(error, PassFailed) and error.code == GRAPH_CHANGED
        if not isinstance(error, GraphChanged) and not is_told:
            return None
        return self._maps.unknown_shape(batch)

    def is_learned(self, shape: PassShape) -> bool:
        """Return whether the devices of the plan have learnt the graph of `shape`."""
        return shape in self._learned

    def learn(self, shape: PassShape, error: EdgeRunError, perform: Perform) -> None:
        """Have all devices learn the graph of `shape`, which empties their caches, and compute all again.

        Raises NotSupported where they have learnt it, and `error` came all the same.
        """
        if shape in self._learned:
            advice = f"run it without {option('mesh')}"
            raise NotSupported(f"this model cannot be spread over devices: {error}; {advice}") from error
        self._learned.add(shape)
        if self._log.tokens:
            self._say(f"a pass of a new kind: {self._log.tokens} tokens are computed again")
        perform(Operate("learn", shape))
        for command in self._log:
            perform(command)

    def run(self, perform: Perform, batch_of: BatchOf, n_devices: int) -> None:
        """Have all that was decoded computed again by the `n_devices` of a new plan."""
        while True:
            if self._log.tokens:
                seconds = replay_s(self._log, self._before, self._times)
                self._say(f"{self._log.tokens} tokens are computed again on {n_devices} devices, about {seconds:.1f} s")
            if not self._meets_new_shape(perform, batch_of):
                return

    def _meets_new_shape(self, perform: Perform, batch_of: BatchOf) -> bool:
        """Compute all again; return True where a graph was learnt on the way, which has emptied all caches.

        What fails may be an earlier batch than the one that is begun.
        """
        for command in self._log:
            try:
                perform(command)
            except (GraphChanged, PassFailed) as error:
                shape = self.unknown_shape(error, batch_of(error))
                if shape is None or shape in self._learned:
                    raise
                self._learned.add(shape)
                perform(Operate("learn", shape))
                return True
        return False
