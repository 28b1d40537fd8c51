"""Parts of weights that are changed where they lie, once, when all that they consist of was read.

A part may begin in one chunk and end in another, which different readers read. The reader that brings the last chunk of
a part converts it, before that chunk counts as readable. So whoever waits for all chunks of a part finds it converted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from edge_run.tiers.address_space import AddressSpace


class Conversions:
    """Converts parts of weights that stay in memory. Thread-safe."""

    def __init__(
        self, address_space: AddressSpace, parts: Sequence[tuple[int, int]], convert: Callable[[int], None]
    ) -> None:
        """Convert the `parts`, (address, bytes) each, when they have been read.

        convert: converts the part of that number; several threads call it at once, with one part each.
        """
        self._convert, self._lock = convert, threading.Lock()
        self._missing = [0] * len(parts)
        self._parts_in: dict[int, list[int]] = {}
        for number, (address, size_bytes) in enumerate(parts):
            chunks = address_space.chunks_of(address, size_bytes)
            self._missing[number] = len(chunks)
            for chunk in chunks:
                self._parts_in.setdefault(chunk, []).append(number)

    @property
    def is_done(self) -> bool:
        """Whether all parts have been read."""
        return not any(self._missing)

    def note_read(self, chunks: Iterable[int]) -> None:
        """Note that `chunks` have been read, for the first and only time; convert what is complete now."""
        with self._lock:
            complete = []
            for chunk in chunks:
                for number in self._parts_in.pop(chunk, ()):
                    self._missing[number] -= 1
                    if not self._missing[number]:
                        complete.append(number)
        for number in complete:
            self._convert(number)
