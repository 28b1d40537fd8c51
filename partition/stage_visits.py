"""Which chunks stream where the stage visits of a device alternate with those of other devices. Pure.

A stage visit is one visit of a pass at a device, which computes some consecutive layers. In a mesh of several rounds, a
device waits longer for its next stage visit than it computes. Where all chunks that stream in a stage visit fit the
frames, they are read while other devices compute, and held for the whole stage visit. Then no pass stops inside a stage
visit, reads are long, and fewer frames are needed than for reading ahead segment by segment. For D chunks without a
place and R stage visits, D / (R - 1) frames are enough: as many chunks of each stage visit stream, and all others stay.
More frames are needed only for prefill batches, which are not held by stage visits. What keys and values leave while a
text is short is lent besides: then less streams in each stage visit, and whatever it is, the frames hold it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, islice

from edge_run.partition.plan import ResidencyPlan, halved_evenly, spread_evenly
from edge_run.partition.window import frames_needed

LONG_RUN = 8  # chunks: longer reads gain nothing


def plan_stage_visits(
    plan: ResidencyPlan,
    segments: Sequence[Sequence[int]],
    visits: Sequence[Sequence[int]],
    must_pin: Collection[int],
    always_lent: int,
    most_lent: int | None = None,
) -> ResidencyPlan | None:
    """Return `plan` with frames for the streamed chunks of one stage visit, or None where these are more frames.

    segments: the chunks of each segment of the pass.
    visits: the chunks of each stage visit, in order of use.
    must_pin: chunks that cannot move.
    always_lent: how many chunks have lent memory besides. Passes that are not held by stage visits lend none, so these
        chunks stream in them.
    most_lent: as many have it at most, at first; None for no more.
    """
    if len(visits) < 2:
        return None
    fixed = [chunk for chunk in plan.pinned if chunk in must_pin]
    uses = Counter(chain.from_iterable(visits))
    order = [chunk for chunk in uses if chunk not in must_pin]
    n_places = len(plan.pinned) - len(fixed) + plan.n_frames
    n_lacking = len(order) - n_places - always_lent
    own = [[chunk for chunk in visit if uses[chunk] == 1 and chunk not in must_pin] for visit in visits]
    n_frames = max(1, -(-n_lacking // (len(visits) - 1)))
    while n_frames <= plan.n_frames:
        n_streamed = max(0, n_lacking + n_frames)
        counts = [n_streamed * (i + 1) // len(visits) - n_streamed * i // len(visits) for i in range(len(visits))]
        if any(count > len(chunks) for chunks, count in zip(own, counts, strict=True)):
            return None
        chosen = frozenset(chain.from_iterable(map(_in_runs, own, counts)))
        rest = [chunk for chunk in order if chunk not in chosen]
        n_lent = max(0, len(rest) - (n_places - n_frames))
        lendable = _lendable(chosen, rest, segments, n_frames)
        lent = frozenset(spread_evenly(lendable if len(lendable) >= n_lent else rest, n_lent))
        needed = frames_needed(segments, chosen | lent, plan.segment_chunks)
        if needed <= n_frames:
            n_more = min(n_streamed, max(0, (most_lent or 0) - n_lent))
            more = halved_evenly(spread_evenly([chunk for chunk in order if chunk in chosen], n_more))
            n_left = n_streamed - n_more
            return replace(
                plan,
                pinned=(*fixed, *(chunk for chunk in rest if chunk not in lent)),
                streamed=tuple(chunk for chunk in order if chunk in chosen or chunk in lent),
                n_frames=n_frames,
                streamed_uses=n_left if n_left > n_frames else 0,
                lent=(*(chunk for chunk in order if chunk in lent), *more),
                n_always_lent=n_lent,
                by_stage_visits=True,
            )
        n_frames = needed
    return None


def _lendable(
    chosen: frozenset[int], rest: Sequence[int], segments: Sequence[Sequence[int]], n_frames: int
) -> list[int]:
    """Return the chunks of `rest` in segments with none of `chosen`, of each segment at most as many as frames hold."""
    left: set[int] = set(rest)
    for segment in segments:
        here = [chunk for chunk in segment if chunk in left]
        if not chosen.isdisjoint(segment):
            left.difference_update(here)
        elif len(here) > n_frames:
            left.difference_update(frozenset(here).difference(spread_evenly(here, n_frames)))
    return [chunk for chunk in rest if chunk in left]


def _in_runs(chunks: Sequence[int], count: int) -> list[int]:
    """Return `count` of `chunks`, in order: those of the longest runs, each read at once, and of the earliest runs."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1 and len(runs[-1]) < LONG_RUN:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    longest = sorted(runs, key=len, reverse=True)
    chosen = frozenset(islice(chain.from_iterable(longest), count))
    return [chunk for chunk in chunks if chunk in chosen]
