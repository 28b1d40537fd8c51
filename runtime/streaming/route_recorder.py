"""Records which experts the routers choose, as a feature of passes; it changes nothing else in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from edge_run.prefetch.routes import DECODE, PREFILL, Route, RouteHeader, RouteWriter
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.graph.nodes import GraphMap, Node
from edge_run.runtime.graph.observer import chosen_experts, makes_ids
from edge_run.runtime.planning.experts import routed_read
from edge_run.tiers.gguf import GgufModel

_LAYER = re.compile(r"blk\.(\d+)\.")


def route_header(gguf: GgufModel) -> RouteHeader:
    """Return the header of a trace of `gguf`; its `expert_bytes` are empty where the model has no experts."""
    experts, dense = dict[int, int](), dict[int, int]()
    count = gguf.value("expert_count")
    n_experts = count if isinstance(count, int) else 0
    for tensor in gguf.tensors:
        if match := _LAYER.match(tensor.name):
            layer = int(match[1])
            is_routed = n_experts > 1 and len(tensor.shape) == 3 and tensor.shape[2] == n_experts
            sizes, size = (experts, tensor.size_bytes // n_experts) if is_routed else (dense, tensor.size_bytes)
            sizes[layer] = sizes.get(layer, 0) + size
    dense_bytes = {layer: dense.get(layer, 0) for layer in experts}
    name = str(gguf.metadata.get("general.name", gguf.shards[0].path.stem))
    return RouteHeader(experts, dense_bytes, name, gguf.architecture, n_experts, gguf.used_experts)


class RouteRecorder:
    """The feature that records routes.

    phase: the phase of the passes to come, PREFILL or DECODE.
    n_tokens: the tokens recorded so far, by phase.
    is_resident: returns whether an expert is in memory, by the address of its layer's first tensor and its number.
    """

    def __init__(self, header: RouteHeader, writer: RouteWriter) -> None:
        self.phase = PREFILL
        self.n_tokens = {PREFILL: 0, DECODE: 0}
        self.is_resident: Callable[[int, int], bool] = lambda address, expert: True
        self._header, self._writer = header, writer
        self._first: dict[int, str] = {}  # by layer, the weight of experts that is multiplied by first
        self._layer = -1

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Stop before the first node of each layer that uses the ids of its experts."""
        for i, node in enumerate(graph):
            if (layer := self._layer_begun(node)) is not None:
                steps.stop_before(i, partial(self._record, node, layer))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Record at the first node of a layer that uses ids of experts; stop after nodes that may make ids."""
        if (layer := self._layer_begun(node)) is not None:
            self._record(node, layer, address)
        return makes_ids(address)

    def after_unknown(self) -> None:
        """Nothing is done after a stop."""

    def abandon(self) -> None:
        """Keep what was recorded."""

    def _layer_begun(self, node: Node) -> int | None:
        """Return the layer whose first multiplication by experts `node` is; None for any other node.

        A layer may choose twice, as those of GroveMoE, whose second experts each go with several of the first.
        """
        read = routed_read(node)
        match = _LAYER.match(read.name) if read else None
        if read is None or match is None or int(match[1]) not in self._header.expert_bytes:
            return None
        layer = int(match[1])
        return layer if self._first.setdefault(layer, read.name) == read.name else None

    def _record(self, node: Node, layer: int, address: int) -> None:
        rows = chosen_experts(address, self._header.n_experts).tolist()
        if layer <= self._layer or self._layer < 0:  # a new pass
            self.n_tokens[self.phase] += len(rows)
        self._layer = layer
        first = self.n_tokens[self.phase] - len(rows)  # the last layer of a prompt routes its last tokens only
        routes = []
        for step, experts in enumerate(rows, first):
            for slot, expert in enumerate(experts):
                is_there = self.is_resident(node.reads[0].address, expert)
                size = 0 if is_there else self._header.expert_bytes[layer]
                routes.append(Route(0, self.phase, step, layer, slot, expert, 0.0, int(is_there), size))
        self._writer.write(routes)
