"""Weights that llama.cpp copies to a GPU for a pass of many tokens, which then computes there what lies in DRAM.

The copies are made when a part of the graph begins, before its first node is asked about. So the pass stops at the end
of the part before; there the weights of the next one are brought, and those of the last one let go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from edge_run.base.errors import NotSupported
from edge_run.runtime.graph.nodes import WeightRead
from edge_run.runtime.graph.scheduler_splits import Split, SplitAccount


class Carrier(Protocol):
    """What has the weights in DRAM there while they are copied."""

    def bring(self, reads: Sequence[WeightRead]) -> None:
        """Hold the weights of one part."""
        ...

    def let_go(self, reads: Sequence[WeightRead]) -> None:
        """Hold them no more."""
        ...

    def expose(self) -> None:
        """Let all of DRAM be read, as zeros where nothing is, until `hide`."""
        ...

    def hide(self) -> None:
        """End what `expose` began."""
        ...


class CopySchedule:
    """What is copied when, in the graph that was scheduled last. reads: the weights in DRAM, by name."""

    def __init__(self, reads: Mapping[bytes, WeightRead]) -> None:
        self.reads = reads
        self._account = SplitAccount()
        self._splits: tuple[Split, ...] = ()
        self._borders: dict[int, tuple[WeightRead, ...]] = {}
        self.hear = self._account.hear

    @property
    def n_told(self) -> int:
        """How many graphs were scheduled so far."""
        return self._account.n_told

    def splits(self) -> tuple[Split, ...]:
        """Return how the graph of the pass in progress is cut; the same object as long as it is the same graph.

        Raises NotSupported where llama.cpp does not say, or copies weights before anything is asked.
        """
        if (splits := self._account.splits) is not self._splits:
            self._splits, self._borders = splits, self._find_borders(splits)
        if not self._splits or 0 in self._borders:
            raise NotSupported(
                "op offload: this llama.cpp does not say which weights it copies to the GPU, or copies them at once; "
                "give --no-op-offload"
            )
        return self._splits

    def is_border(self, ordinal: int) -> bool:
        """Return whether the pass stops before node `ordinal`."""
        return ordinal in self._borders

    def reads_at(self, ordinal: int) -> tuple[WeightRead, ...]:
        """Return what is copied where the pass stops before node `ordinal`."""
        return self._borders[ordinal]

    def _find_borders(self, splits: Sequence[Split]) -> dict[int, tuple[WeightRead, ...]]:
        borders: dict[int, tuple[WeightRead, ...]] = {}
        is_copying = False
        for split in splits:
            reads = tuple(self.reads[name] for name in split.inputs if name in self.reads)
            if reads or is_copying:
                borders[split.first] = reads
            is_copying = bool(reads)
        return borders


class WeightCopies:
    """Has what is copied there in time. One pass at a time."""

    def __init__(self, schedule: CopySchedule, carrier: Carrier) -> None:
        self._schedule, self._carrier = schedule, carrier
        self._held: tuple[WeightRead, ...] = ()
        self._is_exposed = False

    def cross(self, ordinal: int) -> None:
        """All before node `ordinal` is computed: bring what is copied next, where anything is."""
        if self._schedule.is_border(ordinal):
            self.release()
            if reads := self._schedule.reads_at(ordinal):
                self._carrier.bring(reads)
                self._held = reads

    def release(self) -> None:
        """Let go of what was copied last."""
        held, self._held = self._held, ()
        if held:
            self._carrier.let_go(held)

    def give_up(self) -> None:
        """The pass goes on, but counts for nothing: what it copies may be anything, but must be there."""
        if not self._is_exposed:
            self._is_exposed = True
            self._carrier.expose()

    def end(self, *, is_whole: bool) -> None:
        """llama.cpp has returned; is_whole: nothing failed."""
        if is_whole:
            self.release()
        self._held = ()  # else the stream has let go of everything
        if self._is_exposed:
            self._is_exposed = False
            self._carrier.hide()
