"""Looks for a model among the files of a worker, by what they hold: each is read once, which takes minutes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import Cancelled, EdgeRunError, system_errors
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.fetch.fingerprint import Fingerprint, fingerprint
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.pieces import PIECE_BYTES

STOP_TIMEOUT_S, STALE_S = 30.0, 10.0  # a drive may hang; a search is asked for several times a second


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that is here as a whole. path: its first shard, or its only one."""

    path: Path
    shards: Sequence[Path]
    fingerprint: Fingerprint


class FileSearch:
    """Looks for one model, on a thread of its own, until it is over or stopped. Any thread may read its fields.

    reads: the name of the file that is read, or will be first.
    read_bytes, size_bytes: of that file so far, and in all.
    found: the model; None where it is not among the files.
    unread: why a file of the model's name could not be read.
    """

    def __init__(self, paths: Sequence[Path], model: str, name: str, sizes: Sequence[int], cache: Path) -> None:
        """Look among `paths` for shards of `sizes` with the hash `model`, first of all at files called `name`.

        cache: for what was read.
        """
        self._paths = sorted(paths, key=lambda path: path.name != name)
        self._model, self._name, self._sizes, self._cache = model, name, tuple(sizes), cache
        self.reads, self.read_bytes, self.size_bytes = name, 0, sum(sizes)
        self.found: FoundModel | None = None
        self.unread: EdgeRunError | None = None
        self._interrupt, self._over, self._over_s = Interrupt(), threading.Event(), math.inf
        self._thread = threading.Thread(target=self._look, name="edge-run search", daemon=True)
        self._thread.start()

    @property
    def is_stale(self) -> bool:
        """Whether it was over some time ago: there may be other files by now."""
        return time.monotonic() - self._over_s > STALE_S

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over; return whether it is."""
        return self._over.wait(timeout_s)

    def stop(self) -> None:
        """Look no further. Idempotent."""
        self._interrupt.cancel()
        self._thread.join(STOP_TIMEOUT_S)

    def _look(self) -> None:
        try:
            for path in self._paths:
                try:
                    self.found = self._read(path)
                except Cancelled:
                    return
                except EdgeRunError as error:
                    self.unread = self.unread or (error if path.name == self._name else None)
                if self.found is not None:
                    return
        finally:
            self._over_s = time.monotonic()
            self._over.set()

    def _read(self, path: Path) -> FoundModel | None:
        """Return the model where that is what the file at `path` holds."""
        with system_errors(f"reading {path}"):
            shards = [shard.path for shard in read_gguf(path).shards]
            if tuple(shard.stat().st_size for shard in shards) != self._sizes:
                return None
            self.reads, self.read_bytes = path.name, 0
            found = fingerprint(shards, self._cache, self._go_on)
        return FoundModel(path, shards, found) if found.model == self._model else None

    def _go_on(self) -> None:
        """A piece was read."""
        self.read_bytes = min(self.size_bytes, self.read_bytes + PIECE_BYTES)
        self._interrupt.check()
