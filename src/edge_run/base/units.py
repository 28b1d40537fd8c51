"""Sizes as people write them, and as they read them. Inside the program a size is an integer of bytes."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real

from edge_run.base.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGEST_SIZE_BYTES = 1 << 60  # that may be written: more than any memory or drive has

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(text: str | float, least_bytes: int = 1) -> int:
    """Return the bytes that `text` means, at least `least_bytes`.

    `4GiB`, `4G` and `4g` are 4 x 2^30 (as llama.cpp and Docker read them); `4GB` is 4 x 10^9; a bare number is bytes,
    of which a part does not count.
    Raises ConfigError when `text` is no size, is less, or is more than `LARGEST_SIZE_BYTES`.
    """
    shown = f"{text!r:.60}"
    if isinstance(text, Real) and not isinstance(text, bool) and (isinstance(text, Integral) or math.isfinite(text)):
        size = int(text)
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise ConfigError(f"size {shown}: not a size; write it as 4GiB, 512MiB or a number of bytes")
        number, unit, binary, byte = match.groups()
        base = 1000 if byte and not binary and unit else 1024
        size = int(min(float(number) * base ** " kmgt".index(unit.lower() or " "), 2 * LARGEST_SIZE_BYTES))
    if size > LARGEST_SIZE_BYTES:
        raise ConfigError(f"size {shown}: more than any memory or drive has; write it as 4GiB")
    if size < least_bytes:
        raise ConfigError(
            f"size {shown}: must be {'more than 0' if least_bytes else '0 or more'} bytes", found_bytes=size
        )
    return size


def format_size(size_bytes: float) -> str:
    """Return `size_bytes` for a person to read: `3.81 GiB`, `512 MiB`, `740 B`."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= scale:
            value = size_bytes / scale
            return f"{value:.2f} {unit}" if unit == "GiB" else f"{value:.0f} {unit}"
    return f"{size_bytes:.0f} B"


def format_rate(tokens_per_s: float) -> str:
    """Return a speed for a person to read: `1,240 tokens/s`, `12.4 tokens/s`."""
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 100 else f"{tokens_per_s:.3g} tokens/s"


def format_count(number: int, thing: str) -> str:
    """Return a number of things for a person to read: `1 token`, `1,200 tokens`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Return the largest multiple of `multiple` that is not above `value`."""
    return value // multiple * multiple
