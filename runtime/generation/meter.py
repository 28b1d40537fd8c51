"""What a run cost: times, tokens, and bytes read, taken from the engine's counters between two moments."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from edge_run.base.protocols import Clock
from edge_run.base.results import IoUse, Stats
from edge_run.runtime.engine.engine import Engine
from edge_run.tiers.readers import ReadTotals


@dataclass(frozen=True, slots=True)
class Interval:
    """What passed between two moments. wait_s: the part of wall_s in which computing waited for weights."""

    wall_s: float = 0.0
    wait_s: float = 0.0
    reads: ReadTotals = field(default_factory=ReadTotals)

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.wall_s + other.wall_s, self.wait_s + other.wait_s, self.reads + other.reads)

    def part(self, share: float) -> Interval:
        """Return what falls to one of several that it was spent for."""
        return Interval(self.wall_s * share, self.wait_s * share, self.reads.part(share))

    @property
    def efficiency(self) -> float:
        """The longer of computing and reading, over the wall time: 1.0 when one of the two never pauses."""
        return min(1.0, max(self.wall_s - self.wait_s, self.reads.busy_s) / self.wall_s) if self.wall_s > 0 else 1.0


class Meter:
    """Counts what generations cost on one engine. Not thread-safe."""

    def __init__(self, engine: Engine, clock: Clock = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._mark = self._now()
        self._decode = Interval()
        self._generations = self._prompt_tokens = self._completion_tokens = self._decoded_tokens = 0

    def lap(self) -> Interval:
        """Return what passed since the last lap (or since the meter was made)."""
        before, self._mark = self._mark, self._now()
        return Interval(
            self._mark.wall_s - before.wall_s,
            self._mark.wait_s - before.wait_s,
            self._mark.reads.since(before.reads),
        )

    def count(self, prompt_tokens: int, completion_tokens: int, decode: Interval) -> None:
        """Note a finished generation."""
        self._generations += 1
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        self._decoded_tokens += max(0, completion_tokens - 1)  # the first one comes with the prompt
        self._decode += decode

    def io_use(self, whole: Interval, decode: Interval, decoded_tokens: int) -> IoUse:
        """Return the reads of an interval, `decode` of which decoded `decoded_tokens` tokens one by one."""
        reads = whole.reads
        return IoUse(
            bytes_read=reads.bytes_read,
            bytes_per_token=decode.reads.bytes_read / decoded_tokens if decoded_tokens else 0.0,
            bandwidth_bytes_per_s=reads.bytes_read / reads.busy_s if reads.busy_s else 0.0,
            efficiency=decode.efficiency,
            copy_bytes=reads.copy_bytes,
            repeated_reads=reads.repeated_reads,
            cached_bytes=reads.cached_bytes,
        )

    def stats(self) -> Stats:
        """Return all since the engine was opened."""
        whole = Interval(reads=self._engine.read_totals)
        return Stats(
            load_s=self._engine.load_s,
            generations=self._generations,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            memory=self._engine.memory_use,
            io=self.io_use(whole, self._decode, self._decoded_tokens),
            backend=self._engine.backend,
            experts=self._engine.expert_use,
            kv_spill=self._engine.kv_spill,
        )

    def _now(self) -> Interval:
        return Interval(self._clock(), self._engine.wait_s, self._engine.read_totals)
