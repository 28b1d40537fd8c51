"""The schedule of a pass: its segments, and which chunks each of them acquires and releases. Pure.

A pass of a dense model reads its weights in an order that is known beforehand, so its schedule says what to read next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from edge_run.partition.window import SEGMENT_CHUNKS


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes that are computed without a stop.

    first: the first node.
    last: the last node.
    needs: the chunks that the nodes need.
    acquire: the chunks acquired before the first node, which the segment before did not hold.
    release: the chunks released after the last node, which the next segment does not need.
    rows: where the segment is a slice of one node, the rows of that node's matrix.
    """

    first: int
    last: int
    needs: tuple[int, ...]
    acquire: tuple[int, ...]
    release: tuple[int, ...]
    rows: range | None = None


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

    A chunk that is used twice in a pass is acquired twice, unless in neighbouring segments. A segment of more than
    `segment_chunks` chunks is what lies between two places where a cut is allowed, and nodes that need no other chunks.
    So wherever a pass is cut, no such segment has a part in two segments (`frames_needed`).
    """
    spans: list[tuple[int, int, AbstractSet[int]]] = []
    first, chunks = 0, set[int]()
    forced = frozenset(borders)
    parts = _parts(needs, may_cut, forced)
    for i, (needed, is_cut_allowed) in enumerate(zip(needs, may_cut, strict=True)):
        if i in forced:
            if chunks:
                spans.append((first, i - 1, chunks))
            first, chunks = i, set()
        if not needed:
            continue
        n_more = len(parts[i] - chunks) if is_cut_allowed and chunks else 0
        if n_more and len(chunks) + n_more > segment_chunks:
            spans.append((first, i - 1, chunks))
            first, chunks = i, set()
        chunks |= needed
    if chunks or not spans:
        spans.append((first, len(needs) - 1, chunks))
    befores: list[AbstractSet[int]] = [frozenset(), *(chunks for _, _, chunks in spans[:-1])]
    afters: list[AbstractSet[int]] = [*(chunks for _, _, chunks in spans[1:]), frozenset()]
    return [
        Segment(first, last, tuple(sorted(now)), tuple(sorted(now - before)), tuple(sorted(now - after)))
        for (first, last, now), before, after in zip(spans, befores, afters, strict=True)
    ]


def _parts(
    needs: Sequence[AbstractSet[int]], may_cut: Sequence[bool], borders: AbstractSet[int]
) -> list[AbstractSet[int]]:
    """Return what each node and those after it need, up to the next node before which a pass may be cut."""
    parts: list[AbstractSet[int]] = []
    part: AbstractSet[int] = frozenset()
    for i in range(len(needs) - 1, -1, -1):
        part = part | needs[i] if needs[i] else part
        parts.append(part)
        if i in borders or (may_cut[i] and needs[i]):
            part = frozenset()
    return parts[::-1]
