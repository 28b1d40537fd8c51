"""A few tokens of a model by edge-run, and by llama.cpp's mmap, each cold and in the same memory: for the demo.

mmap is run only in a memory group, where the page cache counts too: without one it would have all of the machine's
memory, and the two would not compare. How long it may take is bounded: where memory is short it may be very slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge_run.base.bench import BACKEND_NAMES, MMAP, OURS, Measurement
from edge_run.base.closing import Closing
from edge_run.base.config import Backend, ModelConfig
from edge_run.runtime.bench.bench import arbitrary_tokens
from edge_run.runtime.bench.cold_run import ColdRuns, OutOfMemory
from edge_run.runtime.planning.plan import planner

MMAP_SECONDS = 40.0
PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class MmapContest:
    """What was measured of edge-run, and of mmap; None where it was not, and why in `problem`."""

    ours: Measurement | None
    mmap: Measurement | None
    problem: str


class BesideMmap(Closing):
    """Measures both. A context manager; `close` ends a run and leaves nothing.

    config: its memory is the budget, and the limit of the group.
    on_step: is told what runs, every half second.
    """

    def __init__(self, path: Path, config: ModelConfig, on_step: Callable[[str], None]) -> None:
        assert config.memory is not None
        planned = planner(path, config)
        self._config, self._on_step = planned.config, on_step
        self._vocabulary = planned.known.vocabulary
        self._runs = ColdRuns([shard.path for shard in planned.gguf.shards], int(config.memory))

    @property
    def reason(self) -> str:
        """Why there is no memory group, empty where there is."""
        return self._runs.group.reason

    def run(self, predict_tokens: int, most_s: float = MMAP_SECONDS) -> MmapContest:
        """Return what both took for `predict_tokens` tokens after a prompt of PROMPT_TOKENS arbitrary ones.

        most_s: for mmap. Raises what opening the model raises, and BudgetError where edge-run itself was
        ended for want of memory.
        """
        if self.reason:
            return MmapContest(None, None, self.reason)
        try:
            ours = self._measure(OURS, predict_tokens)
        except OutOfMemory as ended:
            raise ended.of_ours() from None
        try:
            mmap = self._measure(MMAP, predict_tokens, most_s)
        except _TooLong:
            return MmapContest(
                ours, None, f"it had not made {predict_tokens} tokens after {most_s:.0f} s, and was stopped"
            )
        except OutOfMemory as ended:
            return MmapContest(ours, None, str(ended))
        return MmapContest(ours, mmap, "")

    def close(self) -> None:
        """End what runs, and leave nothing. Idempotent."""
        self._runs.close()

    def _measure(self, backend: Backend, predict_tokens: int, most_s: float = math.inf) -> Measurement:
        def tick(elapsed_s: float) -> None:
            if elapsed_s > most_s:
                raise _TooLong
            self._on_step(f"{BACKEND_NAMES[backend]}, cold: {elapsed_s:.0f} s (Ctrl-C stops)")

        config = replace(self._config, backend=backend, check_file=False)
        return self._runs.run(config, arbitrary_tokens(PROMPT_TOKENS, self._vocabulary), predict_tokens, tick)


class _TooLong(Exception):
    """A run took longer than it may."""
