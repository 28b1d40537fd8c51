"""What flows through a graph: which memory each node writes and reads. `flow_observer.py` makes it.

A storage is memory that a node, or a leaf, owns and that others see through views. Weights and inputs are no storages:
weights are read from a file, and llama.cpp sets inputs itself, on every device alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory of `size_bytes`. producer: the ordinal of its node; None for a leaf, which is at `address` for good."""

    producer: int | None
    size_bytes: int
    address: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """Of node i: `writes[i]`, the storage it writes (None for a mere view), and `reads[i]`, those it reads."""

    storages: tuple[Storage, ...]
    writes: tuple[int | None, ...]
    reads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Life:
    """When a storage counts: written first at `first`, and last written or read at `last`."""

    first: int
    last: int


def lives(flow: Flow) -> list[Life | None]:
    """Return the life of each storage, None for one that no node writes."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, (written, read) in enumerate(zip(flow.writes, flow.reads, strict=True)):
        for storage in read:
            last[storage] = i
        if written is not None:
            first.setdefault(written, i)
            last[written] = i
    return [Life(first[s], last[s]) if s in first else None for s in range(len(flow.storages))]


def users(flow: Flow, apart: Collection[int] = ()) -> dict[int, tuple[int, int]]:
    """Return the first and the last node, but for those `apart`, that touches each leaf that is written.

    Such a leaf outlives a pass.
    """
    found: dict[int, tuple[int, int]] = {}
    written = {storage for storage in flow.writes if storage is not None}
    for i, (write, read) in enumerate(zip(flow.writes, flow.reads, strict=True)):
        touched: Sequence[int] = () if i in apart else read if write is None else (*read, write)
        for storage in touched:
            if storage in written and flow.storages[storage].producer is None:
                found[storage] = found.get(storage, (i, i))[0], i
    return found
