"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


def until(
    is_so: Callable[[], _Found], limit_s: float = 60.0, why_not: Callable[[], str] = lambda: "it never came true"
) -> _Found:
    """Return what `is_so` returns, once that is not empty or false. Fails with `why_not()` where it stays so."""
    end_s = time.monotonic() + limit_s
    while not (found := is_so()):
        assert time.monotonic() < end_s, why_not()
        time.sleep(0.005)
    return found
