"""The schedule of a pass: its segments, and which chunks each of them acquires and releases. Pure.

A pass of a dense model reads its weights in an order that is known beforehand, so its schedule says what to read next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

SEGMENT_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes that are computed without a stop.

    first: the first node.
    last: the last node.
    needs: the chunks that the nodes need.
    acquire: the chunks acquired before the first node, which the segment before did not hold.
    release: the chunks released after the last node, which the next segment does not need.
    """

    first: int
    last: int
    needs: tuple[int, ...]
    acquire: tuple[int, ...]
    release: tuple[int, ...]


def join_stage_visits(segments: Sequence[Segment], borders: Collection[int]) -> list[Segment]:
    """Return `segments` joined to one for each stage visit, which is computed between two of `borders`.

    A stage visit acquires its chunks in the order of use, and a chunk that it uses twice stands there twice.
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
    """Return the segments of a pass.

    needs: the chunks that each node needs.
    may_cut: whether the pass may be cut before each node.
    segment_chunks: the most chunks of a segment, where its nodes allow that. The smaller the segments, the smaller the
        window, and the better reading and computing overlap.
    borders: nodes before which the pass is always cut. Where no node between two borders needs a chunk, these nodes
        are in no segment.

    A chunk that is used twice in a pass is acquired twice, unless in neighbouring segments.
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
