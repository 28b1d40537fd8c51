"""A bounded queue of messages and losses that arrived over the data link and were not received yet."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.mesh import Message

logger = logging.getLogger(__name__)

MOST_BYTES, MOST_MESSAGES = 256 << 20, 1024
MOST_BULK_BYTES, MOST_BULK_MESSAGES = 16 << 20, 256


class Inbox:
    """A queue from the link's thread to the threads that receive.

    Where nobody has ever received, as on a device that serves no models, what comes to a full queue is dropped, and the
    network is read all the same.
    """

    def __init__(self, on_room: Callable[[], None], most_bytes: int, most_messages: int) -> None:
        """`on_room` is called when it was full and is no more."""
        self._on_room = on_room
        self._most_bytes, self._most_messages = most_bytes, most_messages
        self._hear: Callable[[Message | DeviceLost], None] = lambda item: None
        self._arrived = threading.Condition()
        self._items: deque[tuple[Message | DeviceLost, int]] = deque()
        self._bytes = 0
        self._is_received = self._is_closed = False

    def overhear(self, hear: Callable[[Message | DeviceLost], None]) -> None:
        """Have `hear` told of each item when it is put, on the thread that puts it."""
        self._hear = hear

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be put before something was received."""
        return self._is_received and not self._has_room

    @property
    def _has_room(self) -> bool:
        return self._bytes < self._most_bytes and len(self._items) < self._most_messages

    def put(self, item: Message | DeviceLost, size: int = 0) -> None:
        """Add a message of `size` bytes, or a loss; who overhears is told first."""
        try:
            self._hear(item)
        except Exception:
            logger.exception("data link: a mistake of whoever overhears")
        with self._arrived:
            if not (self._has_room or self._is_received):
                return
            self._items.append((item, size))
            self._bytes += size
            self._arrived.notify()

    def get(self, timeout_s: float) -> Message | None:
        """Return the next message, None when none came in time. Raises the next loss, or MeshError once closed."""
        with self._arrived:
            self._is_received = True
            if not self._arrived.wait_for(lambda: self._items or self._is_closed, max(0.0, timeout_s)):
                return None
            if self._is_closed:
                raise MeshError("data link: is closed")
            was_full = self.is_full
            item, size = self._items.popleft()
            self._bytes -= size
        if was_full and not self.is_full:
            self._on_room()
        if isinstance(item, DeviceLost):
            raise item
        return item

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()
