"""The schedule of a pass: its segments, and which chunks each of them takes and gives back. Pure.

A dense pass reads its weights in an order that is known beforehand; what to bring next is the schedule itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

SEGMENT_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes [first, last] computed in one go, which needs the chunks `needs`.

    Of these it acquires, before its first node, those that the segment before did not hold, and releases, after its
    last, those that the next one does not need.
    """

    first: int
    last: int
    needs: tuple[int, ...]
    acquire: tuple[int, ...]
    release: tuple[int, ...]


def join_stage_visits(segments: Sequence[Segment], borders: Collection[int]) -> list[Segment]:
    """Return `segments` joined to one for each visit: what is computed between two of `borders`.

    A turn acquires use after use, in the order of the segments: a chunk that it uses twice stands there twice.
    """
    starts = sorted(borders)
    visits: dict[int, list[Segment]] = {}
    for segment in segments:
        visits.setdefault(bisect_right(starts, segment.first), []).append(segment)
    orders = [list(dict.fromkeys(c for part in parts for c in part.needs)) for parts in visits.values()]
    befores: list[list[int]] = [[], *orders[:-1]]
    afters: list[list[int]] = [*orders[1:], []]
    return [
        Segment(
            parts[0].first,
            parts[-1].last,
            tuple(order),
            tuple(chunk for part in parts for chunk in part.acquire if chunk not in before),
            tuple(chunk for chunk in order if chunk not in after),
        )
        for parts, order, before, after in zip(visits.values(), orders, befores, afters, strict=True)
    ]


def schedule_pass(
    needs: Sequence[AbstractSet[int]],
    may_cut: Sequence[bool],
    segment_chunks: int = SEGMENT_CHUNKS,
    borders: Collection[int] = (),
) -> list[Segment]:
    """Return the segments of a pass whose node i needs the chunks `needs[i]`; it is cut before nodes that `may_cut`.

    It is always cut before `borders`; nodes between two of them that need nothing are in no segment.

    A segment needs at most `segment_chunks` chunks where its nodes allow that: the smaller the segment, the smaller the
    window and the better reading and computing overlap. Nothing is assumed about other segments but the neighbours: a
    chunk used twice in a pass is acquired twice.
    """
    spans: list[tuple[int, int, AbstractSet[int]]] = []
    first, chunks = 0, frozenset[int]()
    forced = frozenset(borders)
    for i, (needed, is_cut_allowed) in enumerate(zip(needs, may_cut, strict=True)):
        if i in forced:
            if chunks:
                spans.append((first, i - 1, chunks))
            first, chunks = i, frozenset()
        if not needed:
            continue
        together = chunks | needed
        if is_cut_allowed and chunks and len(together) > max(segment_chunks, len(chunks)):
            spans.append((first, i - 1, chunks))
            first, together = i, frozenset(needed)
        chunks = together
    if chunks or not spans:
        spans.append((first, len(needs) - 1, chunks))
    befores = [frozenset[int](), *(chunks for _, _, chunks in spans[:-1])]
    afters = [*(chunks for _, _, chunks in spans[1:]), frozenset[int]()]
    return [
        Segment(first, last, tuple(sorted(now)), tuple(sorted(now - before)), tuple(sorted(now - after)))
        for (first, last, now), before, after in zip(spans, befores, afters, strict=True)
    ]
