"""Weights in DRAM that llama.cpp copies to a GPU for a prefill or verification batch, which the GPU then computes.

The copies are made at the beginning of a split, before llama.cpp asks about its first node. So the pass stops at the
end of the split before; there the weights of the next split are acquired, and those of the last one released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from edge_run.base.errors import NotSupported, option
from edge_run.runtime.graph.nodes import WeightRead
from edge_run.runtime.graph.scheduler_splits import Split, SplitAccount


class Carrier(Protocol):
    """Keeps weights in DRAM while llama.cpp copies them."""

    def bring(self, reads: Sequence[WeightRead]) -> None:
        """Acquire the weights of one split."""
        ...

    def let_go(self, reads: Sequence[WeightRead]) -> None:
        """Release the weights of one split."""
        ...

    def expose(self) -> None:
        """Make all weights in DRAM readable until `hide`; missing ones read as zeros."""
        ...

    def hide(self) -> None:
        """Undo `expose`."""
        ...


class CopySchedule:
    """Which weights are copied at which node of the graph that was scheduled last.

    reads: the weights in DRAM, by name.
    """

    def __init__(self, reads: Mapping[bytes, WeightRead]) -> None:
        self.reads = reads
        self._account = SplitAccount()
        self._splits: tuple[Split, ...] = ()
        self._borders: dict[int, tuple[WeightRead, ...]] = {}
        self.hear = self._account.hear

    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the present pass's graph; the same object as long as the graph is the same.

        Raises NotSupported where llama.cpp does not report them, or copies weights before it asks about any node.
        """
        if (splits := self._account.splits) is not self._splits:
            self._splits, self._borders = splits, self._find_borders(splits)
        if not self._splits or 0 in self._borders:
            raise NotSupported(
                "op offload: this llama.cpp does not say which weights it copies to the GPU, or copies them at once; "
                f"give {option('op_offload', False)}"
            )
        return self._splits

    def is_border(self, ordinal: int) -> bool:
        """Return whether the pass stops before node `ordinal`."""
        return ordinal in self._borders

    def reads_at(self, ordinal: int) -> tuple[WeightRead, ...]:
        """Return the weights that are copied where the pass stops before node `ordinal`."""
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
    """Acquires weights before llama.cpp copies them. One pass at a time."""

    def __init__(self, schedule: CopySchedule, carrier: Carrier) -> None:
        self._schedule, self._carrier = schedule, carrier
        self._held: tuple[WeightRead, ...] = ()
        self._is_exposed = False

    def cross(self, ordinal: int) -> None:
        """Acquire the weights that are copied next, if any, now that all nodes before `ordinal` are computed."""
        if self._schedule.is_border(ordinal):
            self.release()
            if reads := self._schedule.reads_at(ordinal):
                self._carrier.bring(reads)
                self._held = reads

    def release(self) -> None:
        """Release the weights that were copied last."""
        held, self._held = self._held, ()
        if held:
            self._carrier.let_go(held)

    def give_up(self) -> None:
        """Let the pass go on although it is void: the weights that it copies must be readable, with any content."""
        if not self._is_exposed:
            self._is_exposed = True
            self._carrier.expose()

    def end(self, *, is_whole: bool) -> None:
        """Note that llama.cpp has returned. is_whole: whether the pass succeeded."""
        if is_whole:
            self.release()
        self._held = ()  # else the stream has let go of everything
        if self._is_exposed:
            self._is_exposed = False
            self._carrier.hide()
