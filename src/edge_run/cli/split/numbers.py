"""Flags whose values are several numbers."""

from __future__ import annotations

import math

from edge_run.base.errors import ConfigError


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a flag's text. Raises ConfigError where it is none."""
    try:
        found = tuple(float(one) for one in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"{flag} {text}: must be numbers with commas between them")
    return found


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of a flag's text. Raises ConfigError where one is none."""
    found = numbers(flag, text)
    if not all(map(float.is_integer, found)):
        raise ConfigError(f"{flag} {text}: must be whole numbers with commas between them")
    return tuple(map(int, found))
