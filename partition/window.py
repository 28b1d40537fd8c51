"""How many chunks may be pinned, and which, so that the frames that remain are enough for a pass. Pure.

A segment needs a frame for each of its chunks that streams, and so do two segments in a row, one of which is read while
the other one is computed, with frames to read ahead through besides. One large matrix would make the window as large as
itself. Where most of the matrix is pinned, it needs few frames, and all other frames' memory holds weights.

These needs are rules of one form. Of P places, p are for pinned chunks, and P - p frames remain. Of a group of g
chunks, q are pinned, and g - q stream. That these fit the frames with k to spare, g - q <= P - p - k, says that at most
P - g - k chunks outside the group are pinned (p - q). So a group must have many pinned chunks itself if it is large.
The most chunks that may be pinned are found as a covering of intervals by points: for each group in the order of use,
chunks used last are pinned, which count for the next groups too. Where each chunk is used once this is the optimum, but
for what the two smallest segments in a row cost, between which the cycle is cut open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

SEGMENT_CHUNKS = 4
SHORT_SEGMENT_CHUNKS = 2
FEW_FRAMES = 4 * SEGMENT_CHUNKS  # fewer are read ahead through in short segments, for all their stops


def segment_chunks_in(n_frames: int) -> int:
    """Return the most chunks of a segment, its largest matrix aside, that computing goes on by in so many frames."""
    return SHORT_SEGMENT_CHUNKS if n_frames < FEW_FRAMES else SEGMENT_CHUNKS


class Group(NamedTuple):
    """Chunks that need frames at the same time.

    chunks: the chunks, those to pin first in front.
    most_outside: how many chunks outside the group may be pinned.
    tolerance: how many more may be where the choice is more even then.
    """

    chunks: tuple[int, ...]
    most_outside: int
    tolerance: int = 0


def frames_needed(
    segments: Sequence[Sequence[int]], streamed: Collection[int], segment_chunks: int = SEGMENT_CHUNKS
) -> int:
    """Return the frames that every segment can do with if `streamed` streams, wherever a pass is cut.

    segments: the chunks of each segment of one pass.
    segment_chunks: the most chunks of a segment that may be more than one matrix.

    Passes of more tokens or without logits have other graphs, which may be cut elsewhere. But all graphs of a model
    multiply by the same matrices in the same order, and may be cut before each of these and nowhere else. A segment of
    more than `segment_chunks` chunks is what lies between two matrices in a row (`schedule_pass`), or a piece of that
    up to a border. No graph has a cut there, so all its chunks are in one of `segments`. All other segments have at
    most `segment_chunks` chunks. A node of an unknown graph, which comes alone, lies between two matrices as well.
    """
    chosen = frozenset(streamed)
    most = max((len(chosen.intersection(segment)) for segment in segments), default=0)
    return max(most, min(segment_chunks, len(chosen)))


def needed_together(segments: Sequence[Sequence[int]], uses: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return the chunks of each segment, and of it and the next one, in turn; the last and the first count as two too.

    They begin between the two smallest segments in a row, where the order matters least: a cycle has no first group.

    segments: the chunks of each segment that can move.
    uses: how often each chunk is used.
    """
    sizes = list(map(len, segments))
    start = min(range(len(sizes)), key=lambda i: sizes[i - 1] + sizes[i])
    cycle = [*segments[start:], *segments[:start]]
    last = {chunk: i for i, segment in enumerate(cycle) for chunk in segment}
    orders = [sorted(segment, key=lambda chunk: (uses[chunk], last[chunk]), reverse=True) for segment in cycle]
    together: list[tuple[int, ...]] = []
    for order, after in zip(orders, [*orders[1:], orders[0]], strict=True):
        together += tuple(order), tuple(dict.fromkeys([*after, *order]))
    return together


def groups_of(
    together: Sequence[tuple[int, ...]],
    n_places: int,
    n_ahead: int,
    tolerance: int,
    segment_chunks: int = SEGMENT_CHUNKS,
) -> list[Group]:
    """Return the groups of a pass.

    together: as of `needed_together`.
    n_places: how many chunks memory has room for.
    n_ahead: the frames that two segments leave for reading ahead. Where there is no room for that, no chunk outside the
        two may be pinned, so that they leave as many as they can.
    tolerance: how many of these a more even choice may take.
    segment_chunks: as of `frames_needed`.
    """
    groups = [Group((), max(0, n_places - segment_chunks))]
    for one, both in zip(together[::2], together[1::2], strict=True):
        groups.append(Group(one, n_places - len(one)))
        groups.append(Group(both, max(0, n_places - len(both) - n_ahead), tolerance))
    return groups


def most_pinned(groups: Sequence[Group], limit: int) -> int:
    """Return how many chunks may be pinned, at most `limit`."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if pins_for(groups, middle) is None:
            high = middle - 1
        else:
            low = middle
    return low


def pins_for(groups: Sequence[Group], n_pinned: int) -> frozenset[int] | None:
    """Return chunks that must be among `n_pinned` pinned ones, as few as suffice; None where there are too many."""
    pinned: set[int] = set()
    for chunks, most_outside, _ in groups:
        if n_pinned <= most_outside:  # whichever they are
            continue
        lacking = n_pinned - most_outside - len(pinned.intersection(chunks))
        if lacking <= 0:
            continue
        free = [chunk for chunk in chunks if chunk not in pinned][:lacking]
        pinned.update(free)
        if len(free) < lacking or len(pinned) > n_pinned:
            return None
    return frozenset(pinned)


def is_enough(groups: Sequence[Group], streamed: Collection[int], n_pinned: int) -> bool:
    """Return whether the frames are enough if `streamed` streams, and `n_pinned` chunks are pinned."""
    chosen = frozenset(streamed)
    return all(
        n_pinned <= most_outside + tolerance  # whichever they are
        or n_pinned - len(chunks) + len(chosen.intersection(chunks)) <= most_outside + tolerance
        for chunks, most_outside, tolerance in groups
    )
