"""Sets the tunables of streaming by expert, by measuring (`prefetch/controller.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from edge_run.base.protocols import Clock
from edge_run.base.results import TuningDecision
from edge_run.prefetch.controller import Controller, Tunable


class Tuning:
    """Times passes of one token each, and sets tunables before them. Not thread-safe.

    tunables: for each, by name, its settings, each a step further than the one before, and the function that sets it.
    found: the settings that an earlier run found best, which are begun with; else it is the first one.
    """

    def __init__(
        self,
        tunables: Mapping[str, tuple[Sequence[str], Callable[[str], None]]],
        found: Mapping[str, str],
        clock: Clock = time.monotonic,
    ) -> None:
        self._set = {name: set_tunable for name, (_, set_tunable) in tunables.items()}
        self._controller = Controller(
            [
                Tunable(name, settings, found[name] if found.get(name) in settings else "")
                for name, (settings, _) in tunables.items()
            ]
        )
        self._in_force: dict[str, str] = {}
        self._clock = clock
        self._began_s: float | None = None  # the pass before, if that was of one token
        self._apply()

    def begin(self, is_token: bool, need: float) -> None:
        """Note that a pass begins, before its experts are chosen.

        is_token: whether it has a single token.
        need: the experts that the pass before needed and that had to be read.
        """
        now_s = self._clock()
        if is_token and self._began_s is not None:
            self._controller.note(now_s - self._began_s, need)
        else:
            self._controller.interrupt()
        self._began_s = now_s if is_token else None
        self._apply()

    @property
    def settings(self) -> Mapping[str, str]:
        """The best settings so far."""
        return dict(self._controller.chosen)

    @property
    def found(self) -> Mapping[str, str]:
        """The best settings of the tunables whose settings were compared."""
        return {decision.tunable: self.settings[decision.tunable] for decision in self.decisions}

    @property
    def decisions(self) -> tuple[TuningDecision, ...]:
        """The comparisons that were decided."""
        return self._controller.decisions

    def _apply(self) -> None:
        for name, setting in self._controller.settings.items():
            if self._in_force.get(name) != setting:
                self._in_force[name] = setting
                self._set[name](setting)
