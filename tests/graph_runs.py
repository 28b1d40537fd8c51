"""Stand-ins for llama.cpp's graphs, its scheduler, and features of a pass that note what happens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.decoding.driver import Driver, Steps
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.llama import _ggml as ggml


class Graph:
    """A graph of llama.cpp: tensor structs in memory, and the nodes that an observer would see in them."""

    def __init__(self, names: Sequence[str], uncomputed: Sequence[str] = ()) -> None:
        self.tensors = []
        self.nodes: dict[int, Node] = {}
        for name in names:
            tensor = ggml.Tensor()
            tensor.name = name.encode()
            tensor.flags = 0 if name in uncomputed else ggml.FLAG_COMPUTE
            reads = (WeightRead(name, 0, 1),) if name.startswith("w") else ()
            node = Node(name.encode(), "MUL_MAT" if reads else "ADD", reads, name not in uncomputed)
            self.tensors.append(tensor)
            self.nodes[ctypes.addressof(tensor)] = node

    @property
    def map(self) -> GraphMap:
        return tuple(self.nodes.values())


class Observer:
    """Sees what the graphs hold, and counts how often it had to look."""

    def __init__(self, *graphs: Graph) -> None:
        self.nodes = {address: node for graph in graphs for address, node in graph.nodes.items()}
        self.n_looks = 0

    def observe(self, address: int, seen: Sequence[Node]) -> Node:
        self.n_looks += 1
        return self.nodes[address]


@dataclass
class Feature:
    """Holds what nodes read from one stop to the next, as streaming does; notes all that happens."""

    events: list[str] = field(default_factory=list)
    on_event: Callable[[str], None] = lambda event: None

    def note(self, event: str) -> None:
        self.events.append(event)
        self.on_event(event)

    def _noting(self, event: str) -> Callable[[int], None]:
        return lambda address: self.note(event)

    def register(self, graph: GraphMap, steps: Steps) -> None:
        for i, node in enumerate(graph):
            if node.reads:
                steps.add_before(i, self._noting(f"take {node.name.decode()}"))
                steps.add_after(i, self._noting(f"give {node.name.decode()}"))

    def before_unknown(self, node: Node, address: int) -> bool:
        if node.reads:
            self.note(f"meet {node.name.decode()}")
        return bool(node.reads)

    def after_unknown(self) -> None:
        self.note("part")

    def abandon(self) -> None:
        self.events.append("abandon")


def compute(driver: Driver, feature: Feature, graph: Graph) -> None:
    """Run a graph as ggml's scheduler does: ask up to a stop, compute what is flagged, tell; False then ends it."""
    first = 0
    while first < len(graph.tensors):
        last = first
        while not (must_stop := driver.callback(ctypes.addressof(graph.tensors[last]), True, 0)):
            if last + 1 == len(graph.tensors):
                break
            last += 1
        for tensor in graph.tensors[first : last + 1]:
            if tensor.flags & ggml.FLAG_COMPUTE:
                feature.events.append(tensor.name.decode())
        if must_stop and not driver.callback(ctypes.addressof(graph.tensors[last]), False, 0):
            break
        first = last + 1


class KnownComputeBuffer(ComputeBuffer):
    """The memory that the graphs are computed in, which is never touched: known, so that quiet nodes pass quietly."""

    def __init__(self, is_known: bool) -> None:
        super().__init__()
        self._is_known = is_known

    @property
    def size_bytes(self) -> int:
        return int(self._is_known)

    def note(self, address: int) -> bool:
        return self._is_known


def driver_for(feature: Feature, *graphs: Graph, knows_buffer: bool = True) -> Driver:
    driver = Driver()
    driver.compute_buffer = KnownComputeBuffer(knows_buffer)
    driver.features.append(feature)
    driver.observer = Observer(*graphs)  # type: ignore[assignment]
    return driver
