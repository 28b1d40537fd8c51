"""Flags whose values are several numbers."""

from __future__ import annotations

from edge_run.base.errors import ConfigError


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a flag's text. Raises ConfigError where it is none."""
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: must be numbers with commas between them") from error
