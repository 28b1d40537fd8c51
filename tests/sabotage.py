"""Reads that fail when a test says so."""

from __future__ import annotations

import logging
import threading
from typing import Any

from edge_run.base.errors import TierReadError
from edge_run.tiers.source import SourceFile


class Saboteur:
    """Makes the reads of a process fail: the `fails_at`th from when it is set, once or for `n_failures` reads."""

    def __init__(self) -> None:
        self.fails_at, self.n_failures, self._lock = -1, 1, threading.Lock()
        self.real = SourceFile.read_into
        logging.getLogger("edge_run").setLevel(logging.ERROR)

    def __get__(self, source: SourceFile, kind: type) -> Any:
        def read_into(address: int, length: int, offset: int) -> int:
            with self._lock:
                self.fails_at -= 1
                if -self.n_failures <= self.fails_at < 0:
                    raise TierReadError("sabotage")
            return self.real(source, address, length, offset)

        return read_into

    def set(self, fails_at: int, n_failures: int = 1) -> None:
        with self._lock:
            self.fails_at, self.n_failures = fails_at, n_failures


def sabotage() -> Saboteur:
    """Put all reads of this process in the hands of the saboteur that is returned."""
    saboteur = Saboteur()
    SourceFile.read_into = saboteur  # type: ignore[method-assign,assignment]
    saboteur.set(-(10**9))
    return saboteur
