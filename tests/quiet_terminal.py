"""A terminal of which nobody sees anything, and what somebody types."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any


def quiet_terminal(*, can_ask: bool = True) -> Any:
    return SimpleNamespace(
        say=lambda *_: None, say_lines=lambda *_: None, can_ask=can_ask, shows_answer=False, erase=lambda: None
    )


def piped(data: str | bytes) -> io.TextIOWrapper:
    """Return standard input that has this in it."""
    return io.TextIOWrapper(io.BytesIO(data.encode() if isinstance(data, str) else data), encoding="utf-8")
