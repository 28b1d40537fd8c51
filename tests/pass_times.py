"""What passes take on two devices: wall seconds, seconds of waiting, seconds and bytes of reading."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.runtime.speculation.width_control import WIDTHS, WidthControl


def streamed(width: int) -> tuple[float, float, float, int]:
    """A pass that reads for 4 s, and computes 0.1 s a token."""
    compute_s = 0.3 + 0.1 * width
    return max(4.0, compute_s), max(0.0, 4.0 - compute_s), 4.0, 4 * 10**9


def resident(width: int) -> tuple[float, float, float, int]:
    """A pass that reads nothing."""
    return 0.3 + 0.1 * width, 0.0, 0.0, 0


def chosen(control: WidthControl, values: Sequence[float]) -> int:
    """Return how wide `control` has a pass of one text, with guesses of these values in the order they are taken."""
    most = min(control.most_tokens, 1 + len(values))
    offers = [(width, 1 + sum(values[: width - 1])) for width in WIDTHS if width <= most]
    return offers[control.best(offers)][0]
