"""Which chunks stay in memory and which stream, under a budget. Pure: figures in, a decision out.

Streaming a dense model is a cycle, so the bytes that must be read in a pass are all that is not pinned, whatever the
policy. What is left to decide is the window (as small as keeps the drive busy) and which chunks stream: they are spread
evenly over the pass, so that reading never has to wait for computing nor the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from operator import sub

from edge_run.base.errors import BudgetError
from edge_run.base.units import MIB, format_size, round_up

LOOKAHEAD_CHUNKS = 16
MARGIN_SHARE, MARGIN_BYTES = 256, 2 * MIB  # of the smallest budget named: what was measured varies from run to run
MOST_RUNS = 512  # longer reads cost less CPU; and each run is a mapping, of which Linux allows 65,530


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """pinned: chunks that stay. streamed: those that come and go, in order of use. n_frames: what they share.

    streamed_uses: reads of streamed chunks in a pass. minimum_chunks: the least that could work. lent: streamed
    chunks that stay too while memory is lent for them; streamed_uses is then for passes in which they do.
    by_stage_visits: what streams of each stage visit fits the frames, if the lent chunks stay.
    """

    pinned: tuple[int, ...]
    streamed: tuple[int, ...]
    n_frames: int
    streamed_uses: int
    minimum_chunks: int
    lent: tuple[int, ...] = ()
    by_stage_visits: bool = False


def plan_residency(
    segments: Sequence[Sequence[int]],
    must_pin: frozenset[int],
    chunk_bytes: int,
    available_bytes: int,
    other_bytes: int,
) -> ResidencyPlan:
    """Decide for one pass, given as the chunks that each of its segments needs at once.

    must_pin: chunks that cannot move. available_bytes: what is left for weights. other_bytes: what the budget spends
    besides, for the message. Raises BudgetError, with the smallest budget that works, when the largest segment does not
    fit.
    """
    taken = _taken(segments)
    uses = Counter(chain.from_iterable(taken))
    movable = [chunk for chunk in uses if chunk not in must_pin]
    fixed = must_pin.intersection(uses)
    n_places = available_bytes // chunk_bytes - len(fixed)
    sizes = [len(segment) - len(must_pin.intersection(segment)) for segment in segments]
    largest = max(sizes, default=0)
    least = other_bytes + (len(fixed) + largest) * chunk_bytes
    minimum = round_up(least + least // MARGIN_SHARE + MARGIN_BYTES, MIB)
    if n_places < largest:
        raise BudgetError(
            f"memory budget {format_size(available_bytes + other_bytes)}: too small for this model, it needs at least "
            f"{minimum // MIB} MiB ({format_size(other_bytes)} besides weights, "
            f"{format_size(minimum - other_bytes)} of weights at once); raise --memory or shorten the context (-c)",
            found_bytes=available_bytes + other_bytes,
            minimum_bytes=minimum,
        )
    if n_places >= len(movable):
        return ResidencyPlan(tuple(uses), (), 0, 0, len(fixed) + largest)
    pair = max((a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True)), default=0)
    run = -(-len(movable) // MOST_RUNS)
    spare = n_places - pair - 2 * run - LOOKAHEAD_CHUNKS
    n_pinned = min(max(0, int(spare / max(1 - pair / len(movable), 1e-9))), n_places - 1, len(movable) - 1)
    streamed = _choose_streamed(movable, uses, len(movable) - n_pinned, run)
    while n_places - n_pinned < (needed := frames_needed(segments, streamed, largest)):
        n_pinned = n_places - needed
        streamed = _choose_streamed(movable, uses, len(movable) - n_pinned, run)
    chosen = frozenset(streamed)
    pinned = tuple(chunk for chunk in uses if chunk not in chosen)
    n_frames = n_places - n_pinned
    n_reads = _count_reads(taken, chosen, uses, n_frames - needed)
    return ResidencyPlan(pinned, tuple(streamed), n_frames, n_reads, len(fixed) + largest)


def frames_needed(segments: Sequence[Sequence[int]], streamed: Collection[int], largest: int) -> int:
    """Return the frames that any segment can do with, also of a pass that is cut elsewhere, if `streamed` streams.

    They hold all that streams of as many uses in a row as a segment has at most; that are no more than the `largest`.
    """
    chosen = frozenset(streamed)
    reach = longest_segment(segments)
    sums = [0, *accumulate(chunk in chosen for chunk in chain.from_iterable(segments))]
    return min(largest, max(map(sub, sums[reach:], sums), default=0))


def longest_segment(segments: Sequence[Sequence[int]]) -> int:
    """Return the chunks of the one that has the most."""
    return max(map(len, segments), default=0)


def with_lent(plan: ResidencyPlan, segments: Sequence[Sequence[int]], most_lent: int) -> ResidencyPlan:
    """Return `plan` with at most `most_lent` of its streamed chunks as guests, spread evenly over the pass."""
    if not most_lent:
        return plan
    lent = spread_evenly(plan.streamed, min(most_lent, len(plan.streamed)))
    left = frozenset(plan.streamed).difference(lent)
    taken = _taken(segments)
    largest = max((len(left.intersection(segment)) for segment in segments), default=0)
    n_reads = _count_reads(taken, left, Counter(chain.from_iterable(taken)), plan.n_frames - largest)
    return replace(plan, lent=tuple(lent), streamed_uses=n_reads)


def _taken(segments: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what each segment needs and the one before did not hold, in order."""
    taken = []
    before: frozenset[int] = frozenset()
    for segment in segments:
        now = frozenset(segment)
        taken.append(sorted(now - before))
        before = now
    return taken


def _count_reads(taken: Sequence[Sequence[int]], streamed: frozenset[int], uses: Counter[int], reach: int) -> int:
    """Return the reads of streamed chunks in a pass: a chunk stays when it is used again within `reach` others."""
    order = [chunk for chunks in taken for chunk in chunks if chunk in streamed]
    if len(order) <= reach:
        return 0
    last = {chunk: i - len(order) for i, chunk in enumerate(order) if uses[chunk] > 1}
    n_reads = len(order)
    for i, chunk in enumerate(order):
        if chunk in last:
            n_reads -= i - last[chunk] <= reach
            last[chunk] = i
    return n_reads


def _choose_streamed(movable: Sequence[int], uses: Counter[int], count: int, run: int) -> list[int]:
    """Return `count` chunks, spread evenly over the pass; those read once before those that would be read again."""
    once = [chunk for chunk in movable if uses[chunk] == 1]
    if count <= len(once):
        return _spread(once, count, run)
    more = [chunk for chunk in movable if uses[chunk] > 1]
    chosen = frozenset(once + _spread(more, count - len(once), run))
    return [chunk for chunk in movable if chunk in chosen]


def spread_evenly(chunks: Sequence[int], count: int) -> list[int]:
    """Return `count` of `chunks`, in order, spread evenly over them, neighbours together where there are very many."""
    return _spread(chunks, count, -(-len(chunks) // MOST_RUNS)) if count else []


def _spread(chunks: Sequence[int], count: int, run: int) -> list[int]:
    """Return `count` of `chunks`, in order: runs of `run` neighbours, evenly spaced."""
    n_runs = -(-count // run)
    starts = dict.fromkeys(int((i + 0.5) * len(chunks) / n_runs) // run * run for i in range(n_runs))
    places = [i for start in starts for i in range(start, min(start + run, len(chunks)))][:count]
    if len(places) < count:
        chosen = frozenset(places)
        places += islice((i for i in range(len(chunks)) if i not in chosen), count - len(places))
    return [chunks[i] for i in sorted(places)]
