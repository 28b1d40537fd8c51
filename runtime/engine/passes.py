"""The passes of an open model on this device: the waits before they begin, and their progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_run.base.profile import DeviceProfile
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.progress import Timeline, pass_steps
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.engine.supply import Supply
from edge_run.runtime.forecasting.forecast import PassTimes
from edge_run.runtime.planning.planner import Planner


class Passes:
    """Runs passes. times: their expected durations, where these are known."""

    def __init__(self, loaded: Loaded, supply: Callable[[], Supply]) -> None:
        """Run the passes of `loaded`. supply: returns the supply of the weights at present."""
        self._loaded, self._supply = loaded, supply
        self.times: PassTimes | None = None
        self.timeline = Timeline(lambda: supply().share_done())
        self.decoder = LocalDecoder(
            loaded.model,
            loaded.context,
            loaded.driver,
            loaded.shape,
            self._begin,
            self.timeline,
            supply().count,
            self._confirm,
        )

    def tell(self, say: Callable[[str], None]) -> None:
        """Have `say` told, in a line, what cannot be done and is gone on without."""
        self._supply().tell(say)

    def expect(self, profile: DeviceProfile) -> None:
        """Report progress in seconds, expected from `profile`."""
        prepared = self._loaded.prepared
        planner = Planner(prepared) if prepared.known else None
        if planner and planner.can_time(profile):
            self.times = planner.times(self._supply().plan, profile)

    def _begin(self, batch: Sequence[BatchToken]) -> None:
        """Wait for weights that are read before any pass, and start the timeline of the passes of `batch`."""
        supply, shape = self._supply(), self._loaded.shape
        supply.check()
        steps = pass_steps(supply.plan, self.times, len(batch), batch[0].position, shape, supply.is_unread)
        self.timeline.begin(steps, is_timed=self.times is not None, position=batch[0].position)
        if supply.bring():
            self.timeline.advance()

    def _confirm(self) -> None:
        """Raise ModelFileError when weights that were read for a pass may be part old, part new."""
        self._supply().check_read()
