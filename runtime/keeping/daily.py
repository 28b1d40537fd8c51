"""How much a folder of a prompt cache was written to today, by all processes: flash wears out by writing."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

from edge_run.base.files import whole_file
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
        try:
            found = parse((self._folder / WRITTEN).read_bytes())
            is_today = found["day"] == self._today().isoformat()
            return max(0, int(found["bytes"])) if is_today else 0
        except (OSError, ValueError, KeyError, TypeError):  # none was written yet, or the power failed meanwhile
            return 0

    def take(self, size_bytes: int) -> bool:
        """Note that `size_bytes` are about to be written; return False where that would be too much. Raises OSError."""
        with locked(self._folder / LOCK):
            written_bytes = self.written_bytes + size_bytes
            if written_bytes > self.most_bytes:
                return False
            note = {"day": self._today().isoformat(), "bytes": written_bytes}
            with whole_file(self._folder / WRITTEN, 0o600) as draft:
                draft.write_text(json.dumps(note))
        return True
