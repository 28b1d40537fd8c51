"""Where a pass shows the state that the next layers' routers will see, found in the graph by structure.

A router multiplies a state, which a norm made from the residual stream. The experts of its layer multiply the same
state, and the first weights of the next layer a similar one. There the state can be read, divided by the norm's
weights, and given to another layer's router.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_run.prefetch.predictors import Router, Vector
from edge_run.runtime.graph.nodes import GraphMap, WeightRead
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.planning.experts import routed_read
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import F32

FLOAT_BYTES = 4
_LEAST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Tap:
    """A node that multiplies a state by weights.

    ordinal: the node.
    norm: the weights of the norm that made the state.
    """

    ordinal: int
    norm: WeightRead

    def read(self, address: int) -> Vector:
        """Return the state of the last token, (width,); the pass must be stopped before the node at `address`."""
        source = ggml.tensor_at(ggml.tensor_at(address).src[1])
        width = source.ne[0]
        n_rows = source.ne[1] * source.ne[2] * source.ne[3]
        state = ggml.floats_at(source.data + (n_rows - 1) * source.nb[1], width)
        scale = _floats(self.norm)
        return np.divide(state, scale, out=np.zeros(width, np.float32), where=np.abs(scale) > _LEAST_SCALE)


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """A layer with experts.

    chosen: where its router's state can be read, once the ids are known; None in a graph of another kind.
    output: where the next layer begins with this layer's output; None in a graph of another kind.
    router: the router's weights.
    bias: the router's bias, if it has one.
    choice_bias: the bias of the choice of experts, if there is one.
    has_sigmoid: whether the gates are sigmoids of the router's output.
    """

    chosen: Tap | None
    output: Tap | None
    router: WeightRead
    bias: WeightRead | None = None
    choice_bias: WeightRead | None = None
    has_sigmoid: bool = False

    def open_router(self) -> Router | None:
        """Return the router, which uses its weights in place, so they must be readable; None where `chosen` is None."""
        if self.chosen is None:
            return None
        scale = _floats(self.chosen.norm)
        weights = _floats(self.router).reshape(-1, len(scale))
        bias, choice_bias = (_floats(read) if read else None for read in (self.bias, self.choice_bias))
        return Router(weights, scale, bias, choice_bias, self.has_sigmoid)


def routed_layers(graph: GraphMap, gguf: GgufModel) -> list[RoutedLayer | None]:
    """Return the layers with experts, in order; None for a layer whose router is not found, or not of float32."""
    shapes = {tensor.name: tensor.shape for tensor in gguf.tensors if tensor.type_id == F32}
    uses: dict[int, list[int]] = {}
    for i, node in enumerate(graph):
        if routed_read(node) and node.expert_ids is not None:
            uses.setdefault(node.expert_ids, []).append(i)

    @functools.cache
    def norms(width: int) -> list[int]:  # for all layers at once, as a graph has thousands of nodes
        return [i for i, node in enumerate(graph) if node.op == "MUL" and _vector(graph, i, shapes, width)]

    layers = [_layer(graph, shapes, ids, nodes, norms) for ids, nodes in uses.items()]
    rows = {tensor.name: tensor.shape[0] for tensor in gguf.tensors}
    return [_if_alike(graph, rows, layer, nodes) for layer, nodes in zip(layers, uses.values(), strict=True)]


def _if_alike(
    graph: GraphMap, rows: Mapping[str, int], layer: RoutedLayer | None, uses: Sequence[int]
) -> RoutedLayer | None:
    """Return `layer`, or None where its experts see another state than its router."""
    if layer is None or rows.get(graph[uses[0]].reads[0].name) != rows.get(layer.router.name):
        return None
    return layer


def _layer(
    graph: GraphMap,
    shapes: Mapping[str, tuple[int, ...]],
    ids: int,
    uses: Sequence[int],
    norms_of: Callable[[int], Sequence[int]],
) -> RoutedLayer | None:
    found = next((j for j in range(ids - 1, -1, -1) if _is_router(graph, j, shapes)), None)
    if found is None:
        return None
    router = graph[found].reads[0]
    width, n_experts = shapes[router.name]
    norms = norms_of(width)
    gates = next((j for j in range(found, ids) if graph[j].op in ("SOFT_MAX", "UNARY")), ids)
    biases = [j for j in range(found, ids) if graph[j].op == "ADD" and _vector(graph, j, shapes, n_experts)]
    before = [i for i in norms if i < found]
    is_same_state = before and not any(found < i < uses[0] for i in norms)
    after = next((i for i in norms if i > uses[-1]), None)
    use = next((i for i in range(after, len(graph)) if graph[i].op == "MUL_MAT"), None) if after else None
    use = None if use is not None and graph[use].is_on_gpu else use
    return RoutedLayer(
        chosen=Tap(uses[0], graph[before[-1]].reads[0]) if is_same_state else None,
        output=Tap(use, graph[after].reads[0]) if after and use else None,
        router=router,
        bias=next((graph[j].reads[0] for j in biases if j < gates), None),
        choice_bias=next((graph[j].reads[0] for j in biases if j > gates), None),
        has_sigmoid=gates < ids and graph[gates].op == "UNARY",
    )


def _is_router(graph: GraphMap, ordinal: int, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    node = graph[ordinal]
    return node.op == "MUL_MAT" and bool(node.reads) and len(shapes.get(node.reads[0].name, ())) == 2


def _vector(graph: GraphMap, ordinal: int, shapes: Mapping[str, tuple[int, ...]], length: int) -> bool:
    reads = graph[ordinal].reads
    return bool(reads) and shapes.get(reads[0].name) == (length,)


def _floats(read: WeightRead) -> Vector:
    return ggml.floats_at(read.address, read.length // FLOAT_BYTES)
