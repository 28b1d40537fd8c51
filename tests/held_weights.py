"""Weights in chunks of which a test sees which are held, and nodes of a graph that read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edge_run.base.errors import TierReadError
from edge_run.runtime.graph.nodes import Node, WeightRead
from edge_run.tiers.address_space import AddressSpace
from mapped import PAGE

CHUNK = PAGE
N_CHUNKS = 40


@dataclass
class Weights:
    """Notes what is held, refuses what a Residency would refuse, and fails at one chunk."""

    held: set[int] = field(default_factory=set)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    exposed: list[frozenset[int] | None] = field(default_factory=list)
    pins: list[tuple[int, ...]] = field(default_factory=list)
    unpins: list[tuple[int, ...]] = field(default_factory=list)
    fails_at: int = -1

    def acquire(self, chunks: Iterable[int]) -> float:
        chunks = tuple(chunks)
        self.asked.append(chunks)
        if self.fails_at in chunks:
            raise TierReadError("the drive is gone")
        assert not self.held & set(chunks), "held already"
        self.held |= set(chunks)
        return 0.5

    def release(self, chunks: Iterable[int]) -> None:
        assert set(chunks) <= self.held, "released what was not held"
        self.held -= set(chunks)

    release_soon = release

    def pin(self, chunks: tuple[int, ...]) -> None:
        self.pins.append(chunks)

    def unpin(self, chunks: tuple[int, ...]) -> None:
        self.unpins.append(chunks)

    def expose(self, but: frozenset[int]) -> None:
        self.exposed.append(but)

    def hide(self) -> None:
        self.exposed.append(None)


class Nodes:
    """Makes nodes whose weights lie in the chunks named."""

    def __init__(self, address_space: AddressSpace) -> None:
        self.base = address_space.spans[0].start

    def read(self, chunks: range, row_bytes: int = 0) -> WeightRead:
        return WeightRead("w", self.base + chunks.start * CHUNK, len(chunks) * CHUNK, row_bytes)

    def __call__(self, *chunks: range, op: str = "MUL_MAT") -> Node:
        return Node(b"node", op, tuple(map(self.read, chunks)), True)
