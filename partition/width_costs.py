"""The seconds of a pass by its width (its tokens), learned from earlier passes. Pure: times in, seconds out.

A pass takes about as long as the longer of computing and reading. Computing grows with the number of tokens. Reading
grows only in a mixture of experts, with the union of the experts that the tokens choose. Between widths that were seen,
times are interpolated linearly. The latest passes of a width count most, at the drive's present pace.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from edge_run.partition.cost import overlapped_s

LATEST = 7  # passes of a width that count
FEW, REMEMBERED = 3, 1000  # fewer values of a width count for so many of other widths, where they stand out
STANDS_OUT = 1.5  # times what a width can be by its neighbours
LATEST_PACED = 31  # of what does not change with the drive's pace: more, or it would wander off
LEAST_READ_S = 1e-6  # else it says nothing of the drive
LEAST_PASS_S = 1e-9  # so that others can be compared with any
MOST_STEP = 2.0  # in time, from the widest pass that was seen to one that may be tried
FAR_WIDER = 4  # than another width: says little of it
SLOPE = 0.25  # of computing one token, for each further one, where only one width was seen: more than most devices


class WidthCurve:
    """A quantity by width: the median of the `latest` values at a width, and straight lines between widths.

    The first value at a width counts until there is another: a first pass makes its graph, and takes memory.

    forgets: a few values of a width, of which no median is sure, are forgotten after a while where they stand out from
    what was seen at the widths beside it. Something disturbed them then, and as the width looks so slow that it is not
    taken again, nothing else would set them right. A pass of more tokens takes no less long, and at most in proportion
    to its tokens, as it could be several passes; so what stands out is far more than the next wider has, or than the
    next narrower has in proportion. The narrowest is held against the wider only.
    """

    def __init__(self, latest: int = LATEST, *, forgets: bool = True) -> None:
        self._latest, self._forgets, self._n_values = latest, forgets, 0
        self._seen: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._widths: list[int] = []
        self._seen_once: set[int] = set()
        self._few: dict[int, int] = {}  # widths of few values, and when the last one came, the oldest first

    def observe(self, width: int, value: float) -> None:
        """Note `value` at `width`."""
        if width not in self._medians:
            self._widths.insert(bisect_left(self._widths, width), width)
            self._seen_once.add(width)
        elif width in self._seen_once:
            self._seen_once.remove(width)
            self._seen[width].clear()
        seen = self._seen.setdefault(width, deque(maxlen=self._latest))
        seen.append(value)
        self._medians[width] = statistics.median(seen)
        self._n_values += 1
        self._few.pop(width, None)
        if len(seen) < FEW:
            self._few[width] = self._n_values
        self._forget()

    def _forget(self) -> None:
        width = next(iter(self._few), None)
        if not self._forgets or width is None or self._n_values - self._few[width] <= REMEMBERED:
            return
        del self._few[width]
        if self._medians[width] <= STANDS_OUT * self._most(width):
            self._few[width] = self._n_values  # what is beside it may be known better then
            return
        self._widths.remove(width)
        self._seen_once.discard(width)
        del self._seen[width], self._medians[width]

    def _most(self, width: int) -> float:
        """Return the most that is to be expected at `width` by the widths beside it."""
        place = bisect_left(self._widths, width)
        narrower, wider = self._widths[max(0, place - 1) : place], self._widths[place + 1 : place + 2]
        bounds = [self._medians[one] * max(1.0, width / one) for one in (*narrower, *wider)]
        return min(bounds, default=math.inf)

    def __bool__(self) -> bool:
        return bool(self._widths)

    def __contains__(self, width: int) -> bool:
        return width in self._medians

    def at(self, width: int, growth: Callable[[int], float] = lambda width: 1.0) -> float:
        """Return the quantity at `width`; beyond the widths that were seen it grows in proportion to `growth`."""
        if width in self._medians:
            return self._medians[width]
        place = bisect_left(self._widths, width)
        if 0 < place < len(self._widths):
            low, high = self._widths[place - 1], self._widths[place]
            share = (width - low) / (high - low)
            return (1 - share) * self._medians[low] + share * self._medians[high]
        nearest = self._widths[0] if place == 0 else self._widths[-1]
        return self._medians[nearest] * growth(width) / growth(nearest)

    @property
    def widest(self) -> int:
        """The widest that was seen, 0 before anything was."""
        return self._widths[-1] if self._widths else 0

    def narrowest(self, *, is_settled: bool = False) -> int:
        """Return the narrowest that was seen, 0 before anything was. is_settled: more than once."""
        return next((width for width in self._widths if not (is_settled and width in self._seen_once)), 0)

    def line(self) -> tuple[float, float] | None:
        """Return the value at width 1 and the slope of the line through the smallest and the largest width seen."""
        if len(self._widths) < 2:
            return None
        low, high = self._widths[0], self._widths[-1]
        slope = (self._medians[high] - self._medians[low]) / (high - low)
        return self._medians[low] - slope * (low - 1), slope


class WidthCosts:
    """Seconds of a pass by its width.

    union_growth: the bytes that a pass of a width reads, over the bytes of a pass of one token.

    A drive may change its speed within minutes, while the last pass of some width is long ago. Reading a byte also
    takes longer in passes of many tokens, which use the processor and the memory more. So the time of a byte is
    recorded for each width, relative to a pace that all widths share. Each pass updates the pace by comparing itself
    with earlier passes of its width.
    """

    def __init__(self, union_growth: Callable[[int], float] = lambda width: 1.0) -> None:
        self._union_growth = union_growth
        self._compute, self._factor = WidthCurve(), WidthCurve()
        self._bytes = WidthCurve(forgets=False)  # a pass of one token may find all it needs in memory
        self._byte_s = WidthCurve(LATEST_PACED)  # at pace 1
        self._paces: deque[tuple[float, float]] = deque(maxlen=LATEST)  # over what was usual at the width, bytes

    def observe(self, width: int, wall_s: float, wait_s: float, read_s: float, read_bytes: int) -> None:
        """Record a pass.

        width: its tokens.
        wall_s: its duration.
        wait_s: how long it waited for weights.
        read_s: how long a read was in flight.
        read_bytes: the bytes it read.
        """
        compute_s, read_s = max(0.0, wall_s - wait_s), min(read_s, wall_s)
        self._compute.observe(width, compute_s)
        self._bytes.observe(width, read_bytes)
        if read_bytes > 0 and read_s > LEAST_READ_S:
            if width in self._byte_s:
                self._paces.append((read_s / read_bytes / self._byte_s.at(width), read_bytes))
            self._byte_s.observe(width, read_s / read_bytes / self._pace)
        self._factor.observe(width, wall_s / _overlapped_s(read_s, compute_s))

    @property
    def is_known(self) -> bool:
        """Whether a pass was seen."""
        return bool(self._compute)

    @property
    def widest(self) -> int:
        """The width of the widest pass that was seen, 0 before one was."""
        return self._compute.widest

    def is_known_near(self, width: int, *, is_settled: bool = False) -> bool:
        """Whether a pass was seen that is not far wider than `width`, as passes of prompts are.

        is_settled: and not for the first time, which may have taken longer.
        """
        return 0 < self._compute.narrowest(is_settled=is_settled) <= FAR_WIDER * width

    def pass_s(self, width: int) -> float:
        """Return the seconds of a pass of `width` tokens now. At least one pass must have been recorded."""
        read_s, compute_s = self._parts_s(width)
        return self._factor.at(width) * _overlapped_s(read_s, compute_s)

    def is_read_bound(self, width: int) -> bool:
        """Whether a pass of `width` tokens reads for longer than it computes. One must have been recorded."""
        read_s, compute_s = self._parts_s(width)
        return read_s > compute_s

    def is_within_reach(self, width: int) -> bool:
        """Return whether a pass of `width` tokens may be tried: the prediction may be wrong, and must not cost much.

        In a mixture of experts, a verification batch can take as long as many passes of one token; in a dense model
        that streams, it takes hardly longer than one.
        """
        widest = self.widest
        return width <= widest or self.pass_s(width) <= MOST_STEP * self.pass_s(widest)

    def _parts_s(self, width: int) -> tuple[float, float]:
        """Return how long a pass of `width` tokens reads, and how long it computes."""
        read_s = self._read_byte_s(width) * self._bytes.at(width, self._union_growth)
        return read_s, self._compute.at(width, self._compute_growth)

    @property
    def _pace(self) -> float:
        """The time of reading a byte now, over the usual time: the median over the bytes read last."""
        half, so_far = sum(n_bytes for _, n_bytes in self._paces) / 2, 0.0
        for pace, n_bytes in sorted(self._paces):
            so_far += n_bytes
            if so_far >= half:
                return pace
        return 1.0

    def _read_byte_s(self, width: int) -> float:
        return self._pace * self._byte_s.at(width) if self._byte_s else 0.0

    def _compute_growth(self, width: int) -> float:
        line = self._compute.line()
        first_s, slope_s = line if line and min(line) > 0 else (1.0, SLOPE)
        return first_s + slope_s * (width - 1)


def _overlapped_s(read_s: float, compute_s: float) -> float:
    """Return the seconds of a pass that reads and computes for so long; see `overlapped_s`."""
    return max(LEAST_PASS_S, overlapped_s(read_s, compute_s))
