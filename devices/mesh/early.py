"""Messages that came before the list of members is settled: kept until it is known whom to believe. Bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MOST_MESSAGES, MOST_BYTES = 1000, 4 << 20


@dataclass(frozen=True, slots=True)
class EarlyMessage:
    """A message as it came.

    topic: as text.
    is_kept: the broker had kept it.
    sender: who brought it, where it came over the data link.
    """

    topic: str
    payload: bytes
    is_kept: bool
    sender: str | None


class EarlyMessages:
    """The messages in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[EarlyMessage] = deque(maxlen=MOST_MESSAGES)

    def put(self, message: EarlyMessage) -> None:
        """Keep a message; where there are many already the oldest goes, and where they are large, this one."""
        if sum(len(one.payload) for one in self._waiting) + len(message.payload) <= MOST_BYTES:
            self._waiting.append(message)

    def take(self) -> EarlyMessage | None:
        """Return the oldest message; None where none is left."""
        return self._waiting.popleft() if self._waiting else None
