"""Which chunks stay in memory and which stream, under a budget. Pure: figures in, a decision out.

A dense model streams in a cycle, so each pass reads all that is not pinned, whatever the policy. Two decisions remain:
the window, which is as small as keeps the drive busy, and which chunks stream. These are spread evenly over the pass,
so that reading never has to wait for computing, nor computing for reading.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from edge_run.base.errors import BudgetError, option
from edge_run.base.units import KIB, MIB, format_size, round_up
from edge_run.partition.window import (
    SEGMENT_CHUNKS,
    Group,
    frames_needed,
    groups_of,
    is_enough,
    most_pinned,
    needed_together,
    pins_for,
)

LOOKAHEAD_CHUNKS = 16
LOOKAHEAD_SHARE = 8  # of the memory for weights beyond what must be there at once: the most that is for reading ahead
SHARED_LOOKAHEAD_SHARE = 2  # where answers share passes, which compute longer than they read
MARGIN_SHARE, MARGIN_BYTES = 256, 2 * MIB  # of the smallest budget named: what was measured varies from run to run
MOST_RUNS = 512  # longer reads cost less CPU; and each run is a mapping, of which Linux allows 65,530


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Which chunks stay in memory and which stream.

    pinned: the chunks that stay.
    streamed: the chunks that stream, in order of use.
    n_frames: the frames that the streamed chunks share.
    streamed_uses: the reads of streamed chunks in a pass; where chunks have lent memory, in a pass in which they do.
    minimum_chunks: the fewest chunks that must fit in memory where segments are as long as here.
    lent: the streamed chunks that stay while they have lent memory.
    n_always_lent: of these, the first that have it in every pass of one token, however long the text is.
    spare: the pinned chunks that can stream too where memory is short, in the order in which to unpin them.
    by_stage_visits: whether the frames hold all that streams in a stage visit while those stay that are always lent.
    segment_chunks: the most chunks of a segment that may be more than one matrix.
    """

    pinned: tuple[int, ...]
    streamed: tuple[int, ...]
    n_frames: int
    streamed_uses: int
    minimum_chunks: int
    lent: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()
    by_stage_visits: bool = False
    n_always_lent: int = 0
    segment_chunks: int = SEGMENT_CHUNKS


NOTHING_STAYS = ResidencyPlan((), (), 0, 0, 0)


class PassPlans:
    """Plans of one pass, for any room that there may be: which chunks stay.

    minimum_chunks: the fewest chunks that must fit in memory where segments are as long as here.
    """

    def __init__(
        self, segments: Sequence[Sequence[int]], must_pin: frozenset[int], segment_chunks: int = SEGMENT_CHUNKS
    ) -> None:
        """Plan the pass with `segments`; the arguments are those of `plan_residency`."""
        self._segments, self._segment_chunks = segments, segment_chunks
        self._uses = uses = Counter(_order(segments))
        self._movable = [chunk for chunk in uses if chunk not in must_pin]
        self._n_fixed = len(uses) - len(self._movable)
        self._moving = [[chunk for chunk in segment if chunk not in must_pin] for segment in segments]
        self._run = -(-len(self._movable) // MOST_RUNS)
        self.minimum_chunks = least_chunks(segments, must_pin, segment_chunks)

    def plan(
        self, n_chunks: int, lookahead_chunks: int | None = None, lookahead_share: int = LOOKAHEAD_SHARE
    ) -> ResidencyPlan:
        """Return the plan where memory has room for `n_chunks`, at least the fewest; see `plan_residency`."""
        n_places, minimum, uses = n_chunks - self._n_fixed, self.minimum_chunks, self._uses
        if n_places >= len(self._movable):
            return ResidencyPlan(tuple(uses), (), 0, 0, minimum, segment_chunks=self._segment_chunks)
        groups, n_pinned = self._most_pinned(n_places, lookahead_chunks, lookahead_share)
        streamed = _choose(groups, self._moving, uses, len(self._movable) - n_pinned, self._run)
        chosen = frozenset(streamed)
        pinned = tuple(chunk for chunk in uses if chunk not in chosen)
        n_frames = n_places - n_pinned
        n_reads = len(_reads(self._segments, chosen, n_frames))
        return ResidencyPlan(pinned, tuple(streamed), n_frames, n_reads, minimum, segment_chunks=self._segment_chunks)

    def least_reads(self, n_chunks: int, n_lent: int) -> int:
        """Return about how many chunks the same plan reads in a pass, of which `n_lent` have lent memory; quickly.

        Those that a pass uses more than once are taken to be read once: few of them stream.
        """
        n_places = n_chunks - self._n_fixed
        if n_places >= len(self._movable):
            return 0
        _, n_pinned = self._most_pinned(n_places, None, LOOKAHEAD_SHARE)
        n_left = max(0, len(self._movable) - n_pinned - n_lent)
        return n_left if n_left > n_places - n_pinned else 0

    @functools.cached_property
    def _together(self) -> Sequence[tuple[int, ...]]:
        return needed_together(self._moving, self._uses)

    def _most_pinned(
        self, n_places: int, lookahead_chunks: int | None, lookahead_share: int
    ) -> tuple[Sequence[Group], int]:
        """Return what frames have to be enough for, and how many chunks may be pinned then."""
        if lookahead_chunks is None:
            n_beyond = n_places - self.minimum_chunks + self._n_fixed
            lookahead_chunks = min(LOOKAHEAD_CHUNKS, n_beyond // lookahead_share)
        n_ahead, tolerance = lookahead_chunks + 2 * self._run, 2 * self._run
        groups = groups_of(self._together, n_places, n_ahead, tolerance, self._segment_chunks)
        return groups, most_pinned(groups, min(n_places, len(self._movable)) - 1)


def plan_residency(
    segments: Sequence[Sequence[int]],
    must_pin: frozenset[int],
    chunk_bytes: int,
    available_bytes: int,
    other_bytes: int,
    lookahead_chunks: int | None = None,
    segment_chunks: int = SEGMENT_CHUNKS,
    lookahead_share: int = LOOKAHEAD_SHARE,
) -> ResidencyPlan:
    """Decide for one pass which chunks stay.

    segments: the chunks that each segment of the pass needs at once.
    must_pin: chunks that cannot move.
    chunk_bytes: the size of a chunk.
    available_bytes: what the budget leaves for weights.
    other_bytes: the rest of the budget, for the error message.
    lookahead_chunks: the frames to read ahead through, besides those of two segments in a row; None: at most
        LOOKAHEAD_CHUNKS, and fewer where memory is so short that they would take what saves reading.
    segment_chunks: the most chunks of a segment that may be more than one matrix.
    lookahead_share: the part of the memory beyond what must be there that these frames take at most.

    Raises BudgetError, with the smallest budget that works, when the largest segment does not fit.
    """
    plans, n_chunks = PassPlans(segments, must_pin, segment_chunks), available_bytes // chunk_bytes
    if n_chunks < plans.minimum_chunks:
        least = other_bytes + plans.minimum_chunks * chunk_bytes
        raise too_small(available_bytes + other_bytes, named_minimum(least), other_bytes)
    return plans.plan(n_chunks, lookahead_chunks, lookahead_share)


def least_chunks(segments: Sequence[Sequence[int]], must_pin: frozenset[int], segment_chunks: int) -> int:
    """Return the fewest chunks that must fit in memory, where segments have at most `segment_chunks`, or one matrix."""
    chunks = frozenset(chain.from_iterable(segments))
    return len(must_pin.intersection(chunks)) + frames_needed(segments, chunks - must_pin, segment_chunks)


def too_small(found_bytes: int, minimum_bytes: int, other_bytes: int) -> BudgetError:
    """Return the error of a budget of `found_bytes`, where `minimum_bytes` work: `other_bytes` and weights."""
    unit = " (a number without a unit is bytes)" if found_bytes < KIB else ""
    return BudgetError(
        f"memory budget {format_size(found_bytes)}{unit}: too small for this model, it needs at least "
        f"{minimum_bytes // MIB} MiB ({format_size(other_bytes)} besides weights, "
        f"{format_size(minimum_bytes - other_bytes)} of weights at once); raise {option('memory')} or shorten the "
        f"context ({option('context_tokens')})",
        found_bytes=found_bytes,
        minimum_bytes=minimum_bytes,
    )


def named_minimum(least_bytes: int) -> int:
    """Return the smallest budget to name where `least_bytes` are needed: whole MiB, and a margin."""
    return round_up(least_bytes + least_bytes // MARGIN_SHARE + MARGIN_BYTES, MIB)


def frames_in_use(segments: Sequence[Sequence[int]]) -> int:
    """Return the frames that two segments in a row take where nearly everything streams, those for reading ahead aside.

    Large matrices are pinned first, so these are fewer than the chunks of the largest two segments. They are taken from
    the plan for half of what the largest segment leaves.
    """
    n_chunks = len(set(chain.from_iterable(segments)))
    n_lacking = (n_chunks - max(map(len, segments), default=0)) // 2
    if not n_lacking:
        return n_chunks
    plan = plan_residency(segments, frozenset(), 1, n_chunks - n_lacking, 0, lookahead_chunks=0)
    n_in_use = plan.n_frames - 2 * -(-n_chunks // MOST_RUNS)
    return min(n_chunks, max(1, round(n_in_use * n_chunks / n_lacking)))


def with_lent(plan: ResidencyPlan, segments: Sequence[Sequence[int]], most_lent: int) -> ResidencyPlan:
    """Return `plan` with lent memory for at most `most_lent` of its streamed chunks.

    Those that a pass reads more often come first. Of those that it reads equally often, any number of the first are
    spread evenly over the pass.
    """
    if not most_lent:
        return plan
    reads = Counter(_reads(segments, frozenset(plan.streamed), plan.n_frames))
    lent: list[int] = []
    for n_reads in sorted({reads[chunk] for chunk in plan.streamed}, reverse=True):
        group = [chunk for chunk in plan.streamed if reads[chunk] == n_reads]
        n_taken = min(most_lent - len(lent), len(group))
        lent += halved_evenly(spread_evenly(group, n_taken) if n_reads == 1 else group)[:n_taken]
    left = frozenset(plan.streamed).difference(lent)
    return replace(plan, lent=tuple(lent), streamed_uses=len(_reads(segments, left, plan.n_frames)))


def reads_beside(plan: ResidencyPlan, segments: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
    """Return the reads of streamed chunks in a pass while the first lent chunks of `plan` have memory.

    counts: how many of them, for each number that is returned.
    """
    streamed = frozenset(plan.streamed)
    found = {n: len(_reads(segments, streamed.difference(plan.lent[:n]), plan.n_frames)) for n in set(counts)}
    return [found[n] for n in counts]


def with_spare(
    plan: ResidencyPlan,
    segments: Sequence[Sequence[int]],
    must_pin: frozenset[int],
) -> ResidencyPlan:
    """Return `plan` with those of its pinned chunks found that could stream too, through its frames.

    Any number of the first of them are spread evenly over the pass.
    """
    places: dict[int, list[int]] = {}
    for i, segment in enumerate(segments):
        for chunk in segment:
            places.setdefault(chunk, []).append(i)
    streamed, spare = frozenset(plan.streamed), list[int]()
    n_streamed = [len(streamed.intersection(segment)) for segment in segments]
    may_stream = (
        [chunk for chunk in plan.pinned if chunk not in must_pin] if plan.n_frames >= plan.segment_chunks else []
    )
    for chunk in halved_evenly(may_stream):
        if all(n_streamed[i] < plan.n_frames for i in places[chunk]):
            spare.append(chunk)
            for i in places[chunk]:
                n_streamed[i] += 1
    return replace(plan, spare=tuple(spare))


def _order(segments: Sequence[Sequence[int]]) -> list[int]:
    """Return the chunks that segments take which the segment before did not hold, in the order of use."""
    order: list[int] = []
    before: frozenset[int] = frozenset()
    for segment in segments:
        now = frozenset(segment)
        order += sorted(now - before)
        before = now
    return order


def _reads(segments: Sequence[Sequence[int]], streamed: frozenset[int], n_frames: int) -> list[int]:
    """Return the streamed chunks that a pass reads, as often as it does.

    A chunk that is used again stays where reading ahead gets as far as that use before it takes the chunk's frame: of
    the chunks that a segment releases, the last one's frame is taken first (`Residency`).
    """
    needs = [streamed.intersection(segment) for segment in segments]
    befores, afters = [frozenset[int](), *needs[:-1]], [*needs[1:], frozenset[int]()]
    used: list[int] = []
    ends: list[int] = []  # of the uses of each segment
    for now, before in zip(needs, befores, strict=True):
        used += sorted(now - before)
        ends.append(len(used))
    n_uses = Counter(used)
    if len(n_uses) <= n_frames:
        return []
    again = frozenset(chunk for chunk, n in n_uses.items() if n > 1)
    holders: dict[int, list[int]] = {chunk: [] for chunk in again}  # the last segment of each time it is acquired for
    places: dict[int, list[int]] = {chunk: [] for chunk in again}  # of its uses
    for place, chunk in enumerate(used):
        if chunk in again:
            places[chunk].append(place)
    for number, (now, before) in enumerate(zip(needs, befores, strict=True)):
        for chunk in again.intersection(now):
            if chunk in before:
                holders[chunk][-1] = number
            else:
                holders[chunk].append(number)
    cycle, kept = [*used, *used], set[int]()
    for chunk, uses in places.items():
        for holder, place in zip(holders[chunk], [*uses[1:], uses[0] + len(used)], strict=True):
            if place - ends[holder] > 2 * n_frames:
                continue
            between, held = frozenset(cycle[ends[holder] : place]), needs[holder] & afters[holder]
            staying = {other for other in needs[holder] if other <= chunk}  # whose frames are not taken before its own
            if held.isdisjoint(between) and len(between.union(held, staying)) <= n_frames:
                kept.add(place % len(used))
    return [chunk for place, chunk in enumerate(used) if place not in kept]


def _choose(
    groups: Sequence[Group],
    segments: Sequence[Sequence[int]],
    uses: Counter[int],
    count: int,
    run: int,
) -> list[int]:
    """Return `count` chunks to stream, spread evenly over the pass as far as the frames allow that.

    For that, of two segments in a row at most so many may stream: as many as possible. Where no such number will do, as
    few as must be are pinned first, and what streams is spread evenly over the rest.
    """
    movable = list(dict.fromkeys(chain.from_iterable(segments)))
    n_pinned = len(movable) - count
    chosen = None
    low, high = 1, 2 * max(map(len, segments))
    most_of_two = high
    while low <= high:
        may_stream = _limited(segments, uses, most_of_two, run)
        streamed = _choose_streamed(may_stream, uses, count, run) if len(may_stream) >= count else None
        if streamed is None:
            low = most_of_two + 1
        elif is_enough(groups, streamed, n_pinned):
            chosen, low = streamed, most_of_two + 1
        else:
            high = most_of_two - 1
        most_of_two = (low + high) // 2
    if chosen is None:
        pins = pins_for(groups, n_pinned)
        assert pins is not None, "so many chunks cannot be pinned"
        return _choose_streamed([chunk for chunk in movable if chunk not in pins], uses, count, run)
    return chosen


def _limited(segments: Sequence[Sequence[int]], uses: Counter[int], most_of_two: int, run: int) -> list[int]:
    """Return the chunks that may stream if at most `most_of_two` do of two segments in a row."""
    kept = set[int]()
    for i, segment in enumerate(segments):
        most = (most_of_two + i % 2) // 2
        if len(segment) > most:
            kept.update(frozenset(segment).difference(_choose_streamed(segment, uses, most, run)))
    return [chunk for chunk in dict.fromkeys(chain.from_iterable(segments)) if chunk not in kept]


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


def halved_evenly(chunks: Sequence[int]) -> list[int]:
    """Return `chunks` in an order in which the first of them, however many, are spread evenly over all.

    The order is van der Corput's (1935): places in binary with their digits reversed, runs of neighbours together where
    there are very many.
    """
    run = max(1, -(-len(chunks) // MOST_RUNS))
    n_runs = -(-len(chunks) // run)
    digits = max(1, (n_runs - 1).bit_length())
    order = sorted(range(n_runs), key=lambda i: int(f"{i:0{digits}b}"[::-1], 2))
    return [chunk for i in order for chunk in chunks[i * run : (i + 1) * run]]


def _spread(chunks: Sequence[int], count: int, run: int) -> list[int]:
    """Return `count` of `chunks`, in order: runs of `run` neighbours, evenly spaced."""
    if not count:
        return []
    n_runs = -(-count // run)
    starts = dict.fromkeys(int((i + 0.5) * len(chunks) / n_runs) // run * run for i in range(n_runs))
    places = [i for start in starts for i in range(start, min(start + run, len(chunks)))][:count]
    if len(places) < count:
        chosen = frozenset(places)
        places += islice((i for i in range(len(chunks)) if i not in chosen), count - len(places))
    return [chunks[i] for i in sorted(places)]
