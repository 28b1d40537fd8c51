"""What may be shown at a terminal of text that came from a file or the network.

A terminal obeys escape codes: they can rename its window, hide what was said before, or type for the user. So whatever
is written for people goes through here: notices, tables, progress, errors, the log and Python's own complaints. The
text of an answer does at a terminal only: in a pipe or a file it stays as the model wrote it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, TextIO

_KEPT = "\n\t"
_CONTROLS = [code for code in (*range(32), *range(127, 160)) if chr(code) not in _KEPT]
_TURNING = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))  # which way text runs, line ends


def _escapes(codes: Iterable[int]) -> dict[int, str]:
    return {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in codes}


_PRINTABLE = _escapes((*_CONTROLS, *_TURNING))
_ONE_LINE = _PRINTABLE | {ord("\n"): "\\n", ord("\t"): " "}
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(127, 160), *_TURNING)}
_ANSWER = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")


def printable(text: str) -> str:
    r"""Return lines of text with what a terminal would obey written out, as `\x1b`."""
    return text.translate(_PRINTABLE)


def one_line(text: str) -> str:
    """Return `text` as `printable` does, line breaks written out too, so that it cannot pass for lines of ours."""
    return text.translate(_ONE_LINE)


def answer_text(text: str) -> str:
    """Return a piece of an answer for a terminal: each control character but tab and line break as U+FFFD."""
    return text.translate(_ANSWER)


def printable_json(text: str) -> str:
    """Return JSON of the same value without what a terminal would obey: JSON escapes ASCII's control codes only."""
    return text.translate(_IN_JSON)


class PrintableStream:
    """A text stream that writes what is `printable`; whoever holds it may be given anything."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write `text`, escaped."""
        return self.raw.write(printable(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write `lines`, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class LogFormatter(logging.Formatter):
    """Keeps a message in one line; a traceback below it has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of `record`, escaped."""
        return one_line(super().formatMessage(record))
