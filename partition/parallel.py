"""How many answers share a pass, if as many tokens a second as can be are wanted. Pure.

Over streamed weights, more answers in a pass are more tokens for the same reads, until computing takes longer than
reading, or until their keys and values displace so many weights that the pass reads too much more. FlexGen (Sheng et
al., 2023) solves for a schedule offline; here a few numbers are compared by the forecast of their passes.
"""

from __future__ import annotations

from collections.abc import Callable

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_GAIN = 1.03  # for more at once: each then waits longer for its next token, and takes memory


def most_productive(tokens_per_s: Callable[[int], float], most: int) -> int:
    """Return how many answers at once, at most `most`, make about as many tokens a second as any number does.

    tokens_per_s: what so many at once make; 0 where they have no room.
    """
    speeds = {number: tokens_per_s(number) for number in (*NUMBERS, most) if number <= most}
    return min(number for number, speed in speeds.items() if speed * LEAST_GAIN >= max(speeds.values()))
