"""What passes of few tokens leave of the memory that a context has for passes of many: found out without computing."""

from __future__ import annotations

from typing import NamedTuple

from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver, PassShape
from edge_run.runtime.graph.flow import Flow
from edge_run.runtime.graph.nodes import GraphMap


class NarrowPass(NamedTuple):
    """The passes that make tokens, or verify guesses, with the part of a prompt that may ride along.

    graph: of a pass of one token.
    flow: what flows through it.
    touched_bytes: what such a pass touches of the compute buffer, whole pages, at most.
    buffer_bytes: the size of that buffer.
    """

    graph: GraphMap
    flow: Flow
    touched_bytes: int
    buffer_bytes: int


def touched_bytes(buffer: ComputeBuffer, flow: Flow) -> int:
    """Return what a pass touches of `buffer`, in which the graph lies that `flow` is of."""
    return buffer.touched_bytes((storage.address, storage.size_bytes) for storage in flow.storages)


def map_narrow_pass(decoder: LocalDecoder, driver: Driver, widest: PassShape) -> NarrowPass:
    """Map the passes up to the `widest`; the context of `decoder` must be empty, and is again."""
    buffer, touched = driver.compute_buffer, 0
    if widest != ONE_TOKEN:
        decoder.map_graph(widest, notes_nodes=False)
        touched = touched_bytes(buffer, driver.take_flow())
    graph = decoder.map_graph(ONE_TOKEN)
    flow = driver.take_flow()
    return NarrowPass(graph, flow, max(touched, touched_bytes(buffer, flow)), buffer.size_bytes)
