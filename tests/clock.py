"""A clock for what is given one."""

from __future__ import annotations


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
