"""How much a folder of a prompt cache was written to today, by all processes: flash wears out by writing."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

from edge_run.base.files.whole import whole_file
from edge_run.base.strict_json import parse
from edge_run.devices.host.locks import locked

WRITTEN, LOCK = "written.json", "written.lock"


class DailyWrites:
    """Counts what is written to a folder in a day. Thread-safe, and safe beside other processes.

    most_bytes: as much may be written from midnight to midnight, by this machine's clock.
    """

    def __init__(self, folder: Path, most_bytes: int, today: Callable[[], date] = date.today) -> None:
        self._folder, self.most_bytes, self._today = folder, most_bytes, today

    @property
    def written_bytes(self) -> int:
        """What was written today."""
        return self._written_on(self._today().isoformat())

    def has_room(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` more may be written today, as far as others do not write meanwhile."""
        return self.written_bytes + size_bytes <= self.most_bytes

    def take(self, size_bytes: int) -> bool:
        """Note that `size_bytes` are about to be written; return False where that would be too much. Raises OSError."""
        with locked(self._folder / LOCK):
            day = self._today().isoformat()  # asked once, as midnight may come meanwhile
            written_bytes = self._written_on(day) + size_bytes
            if written_bytes > self.most_bytes:
                return False
            note = {"day": day, "bytes": written_bytes}
            with whole_file(self._folder / WRITTEN, 0o600) as draft:
                draft.write_text(json.dumps(note))
        return True

    def _written_on(self, day: str) -> int:
        try:
            found = parse((self._folder / WRITTEN).read_bytes())
            return max(0, int(found["bytes"])) if found["day"] == day else 0
        except (OSError, ValueError, KeyError, TypeError):  # none was written yet, or the power failed meanwhile
            return 0
