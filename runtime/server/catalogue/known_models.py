"""What can be asked for: models by the names that clients give them, and which of them cannot be opened now."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_run.base.errors import EdgeRunError
from edge_run.runtime.server.catalogue.folder import LeftOutFile, ModelEntry, ModelFolder

REMEMBERED_S = 30.0  # why a model could not be opened, so that not every request tries again
_SUFFIXES = ("", ":latest", ".gguf")


class KnownModels:
    """The models of a folder. left_out: files that are none."""

    def __init__(self, found: ModelFolder) -> None:
        self._entries = {entry.name: entry for entry in found.entries}
        self.left_out: Sequence[LeftOutFile] = found.left_out
        self._failures: dict[str, tuple[float, EdgeRunError]] = {}

    @property
    def entries(self) -> Sequence[ModelEntry]:
        """The models, by name."""
        return tuple(self._entries.values())

    def named(self, name: str) -> ModelEntry | None:
        """Return the model of this name, with or without what some clients add to names."""
        for suffix in _SUFFIXES:
            if (found := self._entries.get(name.removesuffix(suffix))) is not None:
                return found
        return None

    def note_failure(self, name: str, error: EdgeRunError) -> None:
        """Remember for a while that a model cannot be opened."""
        self._failures[name] = time.monotonic(), error

    def failure(self, name: str) -> EdgeRunError | None:
        """Return why a model cannot be opened, if that was found out lately."""
        found_s, error = self._failures.get(name, (-float("inf"), None))
        return error if time.monotonic() - found_s < REMEMBERED_S else None
