"""Which chunks stay in memory and which stream, under a budget. Pure: figures in, a decision out.

A dense model streams in a cycle, so each pass reads all that is not pinned, whatever the policy. Two decisions remain:
the window, which is as small as keeps the drive busy, and which chunks stream. These are spread evenly over the pass,
so that reading never has to wait for computing, nor computing for reading.
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
    """Which chunks stay in memory and which stream.

    pinned: the chunks that stay.
    streamed: the chunks that stream, in order of use.
    n_frames: the frames that the streamed chunks share.
    streamed_uses: the reads of streamed chunks in a pass; where chunks have lent memory, in a pass in which they do.
    minimum_chunks: the fewest chunks that must fit in memory.
    lent: the streamed chunks that stay while they have lent memory.
    by_stage_visits: whether the frames hold all that streams in a stage visit while the lent chunks stay.
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
    """Decide for one pass which chunks stay.

    segments: the chunks that each segment of the pass needs at once.
    must_pin: chunks that cannot move.
    chunk_bytes: the size of a chunk.
    available_bytes: what the budget leaves for weights.
    other_bytes: the rest of the budget, for the error message.

    Raises BudgetError, with the smallest budget that works, when the largest segment does not fit.
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
    """Return the frames that every segment can do with if `streamed` streams, wherever a pass is cut.

    They hold the streamed chunks of any uses in a row, as many as the longest segment has, but at most `largest`.
    """
    chosen = frozenset(streamed)
    reach = longest_segment(segments)
    sums = [0, *accumulate(chunk in chosen for chunk in chain.from_iterable(segments))]
    return min(largest, max(map(sub, sums[reach:], sums), default=0))


def longest_segment(segments: Sequence[Sequence[int]]) -> int:
    """Return the number of chunks in the longest segment."""
    return max(map(len, segments), default=0)


def with_lent(plan: ResidencyPlan, segments: Sequence[Sequence[int]], most_lent: int) -> ResidencyPlan:
    """Return `plan` with lent memory for at most `most_lent` of its streamed chunks, spread evenly over the pass."""
    if not most_lent:
        return plan
    lent = spread_evenly(plan.streamed, min(most_lent, len(plan.streamed)))
    left = frozenset(plan.streamed).difference(lent)
    taken = _taken(segments)
    largest = max((len(left.intersection(segment)) for segment in segments), default=0)
    n_reads = _count_reads(taken, left, Counter(chain.from_iterable(taken)), plan.n_frames - largest)
    return replace(plan, lent=tuple(lent), streamed_uses=n_reads)


def _taken(segments: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the chunks of each segment that the segment before it did not hold, in order."""
    taken = []
    before: frozenset[int] = frozenset()
    for segment in segments:
        now = frozenset(segment)
        taken.append(sorted(now - before))
        before = now
    return taken


def _count_reads(taken: Sequence[Sequence[int]], streamed: frozenset[int], uses: Counter[int], reach: int) -> int:
    """Return the reads of streamed chunks in a pass; a chunk that is used again within `reach` other uses stays."""
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
    """Return `count` chunks, spread evenly over the pass; chunks that are used once are taken first."""
    once = [chunk for chunk in movable if uses[chunk] == 1]
    if count <= len(once):
        return _spread(once, count, run)
    more = [chunk for chunk in movable if uses[chunk] > 1]
    chosen = frozenset(once + _spread(more, count - len(once), run))
    return [chunk for chunk in movable if chunk in chosen]


def spread_evenly(chunks: Sequence[int], count: int) -> list[int]:
    """Return `count` of `chunks`, in order and evenly spread; of very many, neighbours are taken together."""
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
