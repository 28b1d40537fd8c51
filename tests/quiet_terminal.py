"""A terminal of which nobody sees anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def quiet_terminal(*, can_ask: bool = True) -> Any:
    return SimpleNamespace(
        say=lambda *_: None, say_lines=lambda *_: None, can_ask=can_ask, shows_answer=False, erase=lambda: None
    )
