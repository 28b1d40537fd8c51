"""The units of a graph: where it is cut, what goes across, and what has to stay together."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from edge_run.base.errors import NotSupported
from edge_run.runtime.graph.flow import Flow, Storage
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.graph.units import lay_out
from edge_run.runtime.slices.slice import Share


@dataclass
class Sketch:
    """A graph in the making: each node makes a storage of `size` bytes from others, and may read a weight."""

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    writes: list[int | None] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)

    def leaf(self, size: int = 100) -> int:
        self.storages.append(Storage(None, size, 4096 * len(self.storages)))
        return len(self.storages) - 1

    def add(self, *sources: int, weight: str = "", size: int = 10, op: str = "MUL_MAT", into: int | None = None) -> int:
        reads = (WeightRead(weight, hash(weight) & 0xFFFF, 1000),) if weight else ()
        self.nodes.append(Node(f"node{len(self.nodes)}".encode(), op, reads, True))
        if into is None:
            self.storages.append(Storage(len(self.nodes) - 1, size))
            into = len(self.storages) - 1
        self.writes.append(into)
        self.reads.append(sources)
        return into

    def layer(self, block: int, state: int, cache: int | None = None) -> int:
        """Attention that keeps what it saw, and a sum with what came in."""
        norm = self.add(state, op="RMS_NORM")
        scaled = self.add(norm, weight=f"blk.{block}.norm.weight", op="MUL")
        kept = self.leaf() if cache is None else cache
        if cache is None:
            self.add(scaled, kept, op="SET_ROWS", into=kept)
        seen = self.add(scaled, kept, op="FLASH_ATTN_EXT")
        out = self.add(seen, weight=f"blk.{block}.out.weight")
        return self.add(state, out, op="ADD")

    def done(self) -> tuple[GraphMap, Flow]:
        return tuple(self.nodes), Flow(tuple(self.storages), tuple(self.writes), tuple(self.reads))


def model(n_layers: int, extra_alive: bool = False) -> Sketch:
    sketch = Sketch()
    state = sketch.add(weight="token_embd.weight", op="GET_ROWS")
    side = sketch.add(state, weight="side.weight", size=7)
    for block in range(n_layers):
        state = sketch.layer(block, state)
    sources = (state, side) if extra_alive else (state,)
    sketch.add(*sources, weight="output.weight")
    return sketch


def test_a_layer_is_a_unit_and_the_residual_stream_goes_across() -> None:
    layout = lay_out(*model(3).done())
    assert [unit.blocks for unit in layout.units] == [(), (0,), (1,), (2,), ()]
    assert [unit.entry_bytes for unit in layout.units] == [0, 10, 10, 10, 10]
    assert [unit.kept_bytes for unit in layout.units] == [0, 100, 100, 100, 0]


def test_what_is_alive_from_before_the_layers_goes_across_too() -> None:
    layout = lay_out(*model(2, extra_alive=True).done())
    assert [unit.entry_bytes for unit in layout.units] == [0, 17, 17, 17]
    owners = ("a", "b", "b", "a")
    names = [layout.flow.storages[s].producer for s in layout.passed_on(owners, 1)]
    assert names == [0, 1]
    back = [layout.flow.storages[s].producer for s in layout.passed_on(owners, 3)]
    assert 1 not in back, "who has it already is not sent it again"


def test_no_cut_between_two_nodes_that_fuse() -> None:
    graph, flow = model(3).done()
    layout = lay_out(graph, flow)
    assert all((graph[i - 1].op, graph[i].op) != ("RMS_NORM", "MUL") for i in layout.starts[1:])


def test_layers_that_share_a_cache_stay_together() -> None:
    sketch = Sketch()
    state = sketch.layer(0, sketch.add(weight="token_embd.weight", op="GET_ROWS"))
    shared = len(sketch.storages)
    state = sketch.layer(1, state)
    shared = next(s for s in range(shared, len(sketch.storages)) if sketch.storages[s].producer is None)
    state = sketch.layer(2, state, cache=shared)
    sketch.add(state, weight="output.weight")
    assert [unit.blocks for unit in lay_out(*sketch.done()).units] == [(), (0,), (1, 2), ()]


def test_what_prepares_a_later_layers_state_is_no_tie() -> None:
    sketch = Sketch()
    state = sketch.add(weight="token_embd.weight", op="GET_ROWS")
    cache = sketch.leaf()
    state = sketch.add(state, weight="blk.0.in.weight")
    sketch.add(cache, op="SCALE", into=cache)
    early = sketch.add(cache, op="GET_ROWS")
    state = sketch.add(state, weight="blk.0.out.weight")
    state = sketch.add(state, early, weight="blk.1.in.weight")
    sketch.add(state, op="CPY", into=cache)
    state = sketch.add(state, weight="blk.1.out.weight")
    sketch.add(state, weight="output.weight")
    layout = lay_out(*sketch.done())
    assert [unit.blocks for unit in layout.units] == [(), (0,), (1,), ()]
    assert layout.strays == {2: 2, 3: 2}
    assert layout.kept[0][2] == 2
    passed = [layout.flow.storages[s].producer for s in layout.passed_on(("a", "b", "c", "a"), 2)]
    assert 3 not in passed, "the unit that uses the state computes it itself"


def test_blocks_that_run_twice_are_two_units_each() -> None:
    sketch = Sketch()
    state = sketch.add(weight="token_embd.weight", op="GET_ROWS")
    for block in (0, 1, 0, 1):
        state = sketch.layer(block, state)
    sketch.add(state, weight="output.weight")
    assert [unit.blocks for unit in lay_out(*sketch.done()).units] == [(), (0,), (1,), (0,), (1,), ()]


def test_a_graph_without_blocks_is_refused() -> None:
    sketch = Sketch()
    sketch.add(weight="output.weight")
    with pytest.raises(NotSupported, match="no blocks"):
        lay_out(*sketch.done())


def test_ranges_of_a_share() -> None:
    owners = ("a", "b", "b", "a", "b", "a", "a")
    assert Share(owners, "a").ranges == [(0, 1), (3, 4), (5, 7)]
    assert Share(owners, "b").ranges == [(1, 3), (4, 5)]
    assert Share(owners, "c").ranges == []
