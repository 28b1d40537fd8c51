"""The data flow of a graph: which memory each node writes and reads. `flow_observer.py` makes a `Flow`.

A storage is memory that a node or a leaf owns, and that other nodes see through views. Weights and inputs are not
storages: weights are read from a file, and llama.cpp sets the same inputs on every device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that nodes read and write.

    producer: the ordinal of the node that owns it; None for a leaf.
    size_bytes: its size.
    address: where it is; a leaf keeps its address.
    """

    producer: int | None
    size_bytes: int
    address: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """The storages of a graph, and which of them each node touches.

    storages: all storages, by number.
    writes: the storage that each node writes; None for a mere view.
    reads: the storages that each node reads.
    """

    storages: tuple[Storage, ...]
    writes: tuple[int | None, ...]
    reads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Life:
    """The lifetime of a storage.

    first: the node that writes it first.
    last: the last node that writes or reads it.
    """

    first: int
    last: int


def lives(flow: Flow) -> list[Life | None]:
    """Return the lifetime of each storage, None for one that no node writes."""
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
    """Return the first and the last node that touch each leaf that is written; the nodes `apart` do not count.

    Such a leaf (keys and values, recurrent state) outlives a pass.
    """
    found: dict[int, tuple[int, int]] = {}
    written = {storage for storage in flow.writes if storage is not None}
    for i, (write, read) in enumerate(zip(flow.writes, flow.reads, strict=True)):
        touched: Sequence[int] = () if i in apart else read if write is None else (*read, write)
        for storage in touched:
            if storage in written and flow.storages[storage].producer is None:
                found[storage] = found.get(storage, (i, i))[0], i
    return found
