"""The units of a graph, which different devices can compute, and the activations handed from one to the next. Pure.

A unit is a run of nodes between two cuts, as a rule one layer. Units are found by structure. Consecutive nodes that
read weights of one block (`blk.7.`) belong together, and two such groups are cut apart where the fewest bytes are
alive: in most models the residual stream, in some several tensors. The head comes before the first block, the tail
after the last one. A block that is used several times makes as many units. Memory that outlives a pass (keys and
values, recurrent state) must not be used on two devices, so units that share it become one.

Strays are an exception: llama.cpp may place nodes that prepare a layer's state inside the layer before. If these nodes
depend on nothing that was computed before, and nothing else depends on them, they belong to the unit that uses the
state.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_run.base.errors import NotSupported
from edge_run.runtime.graph.flow import Flow, Life, lives, users
from edge_run.runtime.graph.nodes import GraphMap, Node

_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")
_FUSED = ("RMS_NORM", "MUL")  # ggml computes the two as one


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit.

    blocks: the numbers of its blocks.
    weight_bytes: the weights that it reads.
    kept_bytes: keys, values and state that it keeps between passes.
    entry_bytes: the activations that are alive where it begins.
    """

    blocks: tuple[int, ...]
    weight_bytes: int
    kept_bytes: int
    entry_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The units of one graph. The first unit is the head, the last one the tail.

    starts: the first node of each unit.
    n_nodes: the nodes of the graph.
    units: the units, in order.
    kept: address, bytes and unit of each leaf that outlives passes.
    flow: the data flow of the graph.
    lives: the lifetime of each storage.
    strays: the nodes that belong to another unit than the one they stand in, with that unit.
    """

    starts: tuple[int, ...]
    n_nodes: int
    units: tuple[Unit, ...]
    kept: tuple[tuple[int, int, int], ...]
    flow: Flow
    lives: tuple[Life | None, ...]
    strays: Mapping[int, int]

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each unit, which all graphs of one model must have in common."""
        return tuple(unit.blocks for unit in self.units)

    def start_of(self, unit: int) -> int:
        """Return the first node of `unit`; the number of nodes after the last unit."""
        return self.starts[unit] if unit < len(self.starts) else self.n_nodes

    def alive(self, ordinal: int) -> list[int]:
        """Return the storages of nodes that are written before node `ordinal` and touched from there on."""
        return [
            s
            for s, life in enumerate(self.lives)
            if life and life.first < ordinal <= life.last and self.flow.storages[s].producer is not None
        ]

    def passed_on(self, owners: Sequence[str], unit: int) -> list[int]:
        """Return the storages that the owner of the unit before must hand over for `unit` to begin."""
        previous = next((u + 1 for u in range(unit - 1, -1, -1) if owners[u] == owners[unit]), None)
        start = self.start_of(unit)
        alive = self.alive(start)
        if previous is None:
            return alive
        since = self.start_of(previous)
        had, written = set(self.alive(since)), set(self.flow.writes[since:start])
        return [storage for storage in alive if storage not in had or storage in written]


def lay_out(graph: GraphMap, flow: Flow) -> Layout:
    """Return the units of `graph`. Raises NotSupported where nothing in it can be cut."""
    rows = _rows_of_blocks(graph)
    if not rows:
        raise NotSupported("this model cannot be spread over devices: its graph shows no blocks of weights")
    life = lives(flow)
    alive = _alive_bytes(flow, life, len(graph))
    anchors = [
        _head_end(graph, rows[0][1]),
        *((first, last) for _, first, last in rows),
        _tail_start(graph, rows[-1][2]),
    ]
    starts = [0] + [_best_cut(graph, alive, last + 1, first) for (_, last), (first, _) in itertools.pairwise(anchors)]
    strays = find_strays(flow, starts)
    ties = users(flow, strays)
    merged, blocks = _join(starts, [(), *((block,) for block, _, _ in rows), ()], ties)
    homes = {i: bisect_right(merged, starts[unit]) - 1 for i, unit in strays.items()}
    kept = tuple(
        (flow.storages[s].address, flow.storages[s].size_bytes, bisect_right(merged, first) - 1)
        for s, (first, _) in ties.items()
    )
    units = _units(graph, merged, blocks, kept, alive)
    born = [_born(span, homes, merged) for span in life]
    return Layout(tuple(merged), len(graph), units, kept, flow, tuple(born), homes)


def find_strays(flow: Flow, starts: Sequence[int]) -> dict[int, int]:
    """Return the nodes that only prepare the state of a later unit, each with that unit."""
    strays: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, read in enumerate(flow.reads):
        for storage in read:
            readers.setdefault(storage, []).append(i)
    for leaf, (_, last) in users(flow).items():
        unit = bisect_right(starts, last) - 1
        group, waiting = set[int](), [i for i in _touching(flow, leaf, readers) if i < starts[unit]]
        while waiting:
            i = waiting.pop()
            if i not in group:
                group.add(i)
                made = flow.writes[i]
                if made is not None and flow.storages[made].producer is not None:
                    waiting += [j for j in readers.get(made, ()) if j < starts[unit]]
        if all(_is_on_its_own(flow, i, group) for i in group):
            strays.update(dict.fromkeys(group, unit))
    return strays


def _touching(flow: Flow, leaf: int, readers: Mapping[int, Sequence[int]]) -> list[int]:
    return [*readers.get(leaf, ()), *(i for i, written in enumerate(flow.writes) if written == leaf)]


def _is_on_its_own(flow: Flow, i: int, group: set[int]) -> bool:
    """Return whether node `i` depends on leaves and on nodes of `group` only."""
    made = (flow.storages[storage].producer for storage in flow.reads[i])
    return all(producer is None or producer in group for producer in made)


def _born(life: Life | None, homes: Mapping[int, int], starts: Sequence[int]) -> Life | None:
    """Return the lifetime `life` as if a stray's storage were written where the stray's unit begins."""
    if life is None or life.first not in homes:
        return life
    return Life(max(life.first, starts[homes[life.first]]), life.last)


def _block_of(node: Node) -> int | None:
    """Return the block whose weights `node` reads."""
    return next((int(found.group(1)) for read in node.reads if (found := _BLOCK.search(read.name))), None)


def _rows_of_blocks(graph: GraphMap) -> list[tuple[int, int, int]]:
    """Return (block, first node, last node) of each group of consecutive nodes that read weights of one block."""
    rows: list[tuple[int, int, int]] = []
    for i, node in enumerate(graph):
        block = _block_of(node)
        if block is None:
            continue
        if rows and rows[-1][0] == block:
            rows[-1] = block, rows[-1][1], i
        else:
            rows.append((block, i, i))
    return rows


def _head_end(graph: GraphMap, first: int) -> tuple[int, int]:
    """Return the last node before `first` that reads weights, twice (as first and last): the head ends there."""
    last = next((i for i in range(first - 1, -1, -1) if graph[i].reads), 0)
    return last, last


def _tail_start(graph: GraphMap, last: int) -> tuple[int, int]:
    """Return the first node after `last` that reads weights, twice (as first and last): the tail has it."""
    first = next((i for i in range(last + 1, len(graph)) if graph[i].reads), len(graph) - 1)
    return first, first


def _alive_bytes(flow: Flow, life: Sequence[Life | None], n_nodes: int) -> list[int]:
    """Return the bytes that are alive before each node, and at the end."""
    change = [0] * (n_nodes + 2)
    for storage, span in zip(flow.storages, life, strict=True):
        if span and storage.producer is not None:
            change[span.first + 1] += storage.size_bytes
            change[span.last + 1] -= storage.size_bytes
    alive, total = [], 0
    for delta in change[: n_nodes + 1]:
        total += delta
        alive.append(total)
    return alive


def _best_cut(graph: GraphMap, alive: Sequence[int], low: int, high: int) -> int:
    """Return the node from `low` to `high` before which the fewest bytes are alive; nodes that fuse stay together."""
    places = [i for i in range(low, high + 1) if not 0 < i < len(graph) or not _fuses(graph, i)] or [low]
    return min(places, key=lambda i: (alive[i], i))


def _fuses(graph: GraphMap, i: int) -> bool:
    return (graph[i - 1].op, graph[i].op) == _FUSED


def _join(
    starts: Sequence[int], blocks: Sequence[tuple[int, ...]], ties: dict[int, tuple[int, int]]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the starts and blocks of the units, joined so that no two units use the same leaf."""
    needed = set(range(len(starts)))
    for first, last in ties.values():
        low, high = bisect_right(starts, first) - 1, bisect_right(starts, last) - 1
        needed -= set(range(low + 1, high + 1))
    needed |= {0}
    kept = sorted(needed)
    ends = [*kept[1:], len(starts)]
    return [starts[i] for i in kept], [sum(blocks[i:j], ()) for i, j in zip(kept, ends, strict=True)]


def _units(
    graph: GraphMap,
    starts: Sequence[int],
    blocks: Sequence[tuple[int, ...]],
    kept: Sequence[tuple[int, int, int]],
    alive: Sequence[int],
) -> tuple[Unit, ...]:
    units = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(graph)], strict=True)):
        reads = {(read.address, read.length) for node in graph[start:end] for read in node.reads if not read.row_bytes}
        held = sum(size for _, size, unit in kept if unit == number)
        units.append(Unit(blocks[number], sum(length for _, length in reads), held, alive[start]))
    return tuple(units)
