"""Text as it comes: token bytes in, printable pieces out, ended by the first stop string.

A token is bytes, not text: a character may be spread over several tokens, and a stop string nearly always is. What
could still become part of either is held back, so that no caller ever has to take a piece back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from edge_run.base.errors import ConfigError


class TextStream:
    """Turns the bytes of an answer into pieces of text, up to the first stop string.

    However the bytes are split, the pieces joined are `data.decode("utf-8", "replace")` of all of them, cut where the
    leftmost stop string begins. A stop string that is found while a longer one may have begun before it is decided
    only when that one is: `is_stopped` can come a few tokens after the stop string.

    stop: strings, none of them empty; the order does not matter. Raises ConfigError for an empty one.
    Not thread-safe.

    is_stopped: True once a stop string has ended the answer; nothing more comes. stop_text: that stop string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise ConfigError("stop string: must not be empty")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.is_stopped, self.stop_text = False, ""

    def push(self, data: bytes) -> str:
        """Take the bytes of the next token; return the text that is now certain, often empty."""
        return self._advance(data, is_last=False)

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD. No push may follow."""
        return self._advance(b"", is_last=True)

    def _advance(self, data: bytes, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + self._decoder.decode(data, is_last)
        found_at = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        pending_at = len(text) if is_last else self._find_beginning(text)
        if found_at is not None and found_at <= pending_at:
            self._held, self.is_stopped = "", True
            self.stop_text = next(stop for stop in self._stop if text.startswith(stop, found_at))
            return text[:found_at]
        self._held = text[pending_at:]
        return text[:pending_at]

    def _find_beginning(self, text: str) -> int:
        """Return where the leftmost unfinished stop string may begin: its length where there is none."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) and len(stop) > len(tail) for stop in self._stop):
                return at
        return len(text)
