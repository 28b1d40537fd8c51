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
UNASKED_BYTES, UNASKED_MESSAGES = 4 << 20, 64  # of what may come before anybody receives


class Inbox:
    """A queue from the link's thread to the threads that receive.

    What is not wanted (`take_only`) is dropped when it comes. Where nobody has ever received, as on a device that
    serves no models, little is kept, the rest is dropped, and the network is read all the same.
    """

    def __init__(self, on_room: Callable[[], None], most_bytes: int, most_messages: int) -> None:
        """`on_room` is called when it was full and is no more."""
        self._on_room = on_room
        self._most_bytes, self._most_messages = most_bytes, most_messages
        self._hear: Callable[[Message | DeviceLost], None] = lambda item: None
        self._is_wanted: Callable[[Message | DeviceLost], bool] = lambda item: True
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._items: deque[tuple[Message | DeviceLost, int]] = deque()
        self._bytes = 0
        self._is_received = self._is_closed = False

    def overhear(self, hear: Callable[[Message | DeviceLost], None]) -> None:
        """Have `hear` told of each item when it is put, on the thread that puts it."""
        self._hear = hear

    def take_only(self, is_wanted: Callable[[Message | DeviceLost], bool]) -> None:
        """Keep from now on only what `is_wanted`, which is asked on the thread that puts."""
        self._is_wanted = is_wanted

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be put before something was received."""
        return self._is_received and not self._has_room

    @property
    def _has_room(self) -> bool:
        most_bytes, most_messages = self._most_bytes, self._most_messages
        if not self._is_received:
            most_bytes, most_messages = min(most_bytes, UNASKED_BYTES), min(most_messages, UNASKED_MESSAGES)
        return self._bytes < most_bytes and len(self._items) < most_messages

    def put(self, item: Message | DeviceLost, size: int = 0) -> None:
        """Add a message of `size` bytes, or a loss, if it is wanted; who overhears is told first."""
        try:
            self._hear(item)
            if not self._is_wanted(item):
                return
        except Exception:
            logger.exception("data link: a mistake of whoever overhears")
        with self._lock:
            if not (self._has_room or self._is_received):
                return
            self._items.append((item, size))
            self._bytes += size
            self._arrived.notify()

    def get(self, timeout_s: float) -> Message | None:
        """Return the next message, None when none came in time. Raises the next loss, or MeshError once closed."""
        with self._lock:
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
        with self._lock:
            self._is_closed = True
            self._arrived.notify_all()
