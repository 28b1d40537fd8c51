"""The time of a token with a part of the model on a GPU, from measurements, which decides how much goes there.

A forecast is made from the profile of the processor, the GPU and the drive (`probe`). Each run compares the forecast
with the times of its tokens, and the next run's forecast for the same part is corrected accordingly. So when a GPU has
become slower, perhaps because something else uses it, the next opening may leave more to the processor. After a day the
correction lapses. A forecast from what was measured while other programs were at work corrects none.

llama.cpp keeps all experts of a layer in one tensor. So the layers are shared out between processor and GPU, while
HybriMoE (Zhong et al. 2025) shares out the experts of one layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_run.base.errors import BudgetError
from edge_run.base.profile import DeviceProfile
from edge_run.base.protocols import Clock
from edge_run.runtime.gpu.offload import Offload
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.tiers.gguf import GgufModel

NEXT_POSITION = 512  # after which tokens are timed
LEAST_PACES = 12
FRESH_S = 24 * 3600.0
NEVER_S = 1e9
PROCESSOR = "none"


class OffloadTimes:
    """Forecasts for one model under one budget.

    profile: the profile of the device; None before the first forecast, and where something was not measured.
    """

    def __init__(self, prepared: Prepared, recall: Callable[[Prepared], DeviceProfile | None]) -> None:
        """Forecast for the model of `prepared`, of which nothing is on a GPU yet.

        recall: returns the profile of this device, where all that the model needs was measured.
        """
        self._prepared = replace(prepared, why_plain="")  # what computes is the same whoever loads it
        self._recall = recall
        self.profile: DeviceProfile | None = None
        self._paces: Mapping[str, tuple[float, float]] | None = None

    def token_s(self, offload: Offload | None) -> float | None:
        """Return the seconds of a token with `offload`; None where something was not measured."""
        gguf, config = self._prepared.gguf, self._prepared.config
        if self._paces is None:
            self._paces = known_paces(gguf, config.cache)
            self.profile = self._recall(self._prepared)
        if self.profile is None or self._prepared.known is None:
            return None
        planner = Planner(replace(self._prepared, offload=offload))
        if not planner.can_time(self.profile):
            return None
        try:
            plan = planner.plan()
        except BudgetError:
            return NEVER_S
        times = planner.times(plan, self.profile)
        pace, _ = self._paces.get(part_of(offload), (1.0, 0.0))
        return times.pass_s(1, NEXT_POSITION, 1, is_first=False) * pace


def part_of(offload: Offload | None) -> str:
    """Return the key under which the paces of `offload` are saved."""
    return offload.part if offload else PROCESSOR


def known_paces(gguf: GgufModel, cache_folder: Path, clock: Clock = time.time) -> dict[str, tuple[float, float]]:
    """Return, by part, tokens' times over the forecast ones and when they were noted, for the last day."""

    def understood(found: Any) -> dict[str, tuple[float, float]]:
        paces = {str(part): (float(pace), float(noted_s)) for part, (pace, noted_s) in found.items()}
        return {part: noted for part, noted in paces.items() if 0 <= clock() - noted[1] < FRESH_S}

    return KeptFindings.of_model(cache_folder / "paces", gguf).read(understood) or {}


def note_paces(
    gguf: GgufModel, cache_folder: Path, part: str, paces: Sequence[float], clock: Clock = time.time
) -> None:
    """Save how the tokens of a run compared with the forecast, if there were enough tokens. Never raises."""
    if len(paces) >= LEAST_PACES:
        noted = {part: (statistics.median(paces), clock())}
        KeptFindings.of_model(cache_folder / "paces", gguf).write(known_paces(gguf, cache_folder, clock) | noted)
