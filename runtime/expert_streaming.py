"""Streaming by expert as a feature of a pass: at each layer what the router has chosen is brought, and no more.

The pass stops before a layer's first multiplication by experts, where the ids are known. What is missing is read,
piece after piece in the order of use; what the cache of experts gives up makes room for it. Many tokens touch many
experts, more than there may be room for: then one tensor after the other is brought, and the next meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_run.prefetch.experts import ExpertCache
from edge_run.runtime.driver import Steps
from edge_run.runtime.graph import GraphMap, Node
from edge_run.runtime.mixture import ExpertMap, ExpertTensor, routed_read
from edge_run.runtime.observer import chosen_experts, makes_ids
from edge_run.tiers.weights import Weights

MOST_SHARE = 0.9  # of a layer's experts: the next layer will want most of its own


class ExpertStreaming:
    """The feature. n_frames: what experts have, kept and in use. n_used: experts that a token uses in a layer.

    check runs while a pass waits and may raise to stop it. wait_s counts those waits.
    """

    def __init__(self, experts: ExpertMap, cache: ExpertCache, weights: Weights, n_frames: int, n_used: int) -> None:
        self._experts, self._cache, self._weights = experts, cache, weights
        self._n_frames, self._n_used = n_frames, n_used
        self._order = [tensor for layer in experts.layers for tensor in layer]
        self._next = dict(zip(self._order, [*self._order[1:], None], strict=True))
        self._ready: dict[ExpertTensor, set[int]] = {tensor: set() for tensor in self._order}
        self._layer = -1
        self._chosen: tuple[int, ...] = ()
        self._is_ahead = False
        self._in_use: list[int] = []
        self._transient: list[int] = []
        self.check: Callable[[], None] = lambda: None
        self.wait_s = 0.0

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Stop before each multiplication by experts; there the ids are known, and the one before is done."""
        for i, node in enumerate(graph):
            if tensor := self._tensor(node):
                steps.add_after(i - 1, _nothing)
                steps.add_before(i, self._step(tensor))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Bring what `node` needs; stop where ids may have been made, and after each multiplication."""
        if tensor := self._tensor(node):
            self._prepare(tensor, address)
            return True
        return makes_ids(address)

    def after_unknown(self) -> None:
        """Nothing is done after a stop."""

    def abandon(self) -> None:
        """Let go of what the pass used; the cache keeps what it has."""
        self._let_go()
        self._layer = -1

    def _tensor(self, node: Node) -> ExpertTensor | None:
        read = routed_read(node)
        return self._experts.at.get(read.address) if read else None

    def _step(self, tensor: ExpertTensor) -> Callable[[int], None]:
        return lambda address: self._prepare(tensor, address)

    def _prepare(self, tensor: ExpertTensor, address: int) -> None:
        rows = chosen_experts(address, tensor.n_experts)
        if len(rows) == 0:
            return
        n_tokens, chosen = (
            len(rows),
            tuple(sorted(set(rows.flat)) if len(rows) > 1 else dict.fromkeys(rows[0].tolist())),
        )
        if tensor is self._experts.layers[tensor.layer][0] or (tensor.layer, chosen) != (self._layer, self._chosen):
            self._choose(tensor.layer, chosen, n_tokens)
        self._use(tensor)

    def _choose(self, layer: int, chosen: tuple[int, ...], n_tokens: int) -> None:
        """Look the chosen experts up, and begin to read those that are missing."""
        if not self._is_ahead:
            self._let_go_of_transient()
        self._layer, self._chosen = layer, chosen
        largest = max(self._experts.piece_size(tensor) for tensor in self._experts.layers[layer]) * len(chosen)
        unit = max(self._experts.sizes) * self._n_used
        self._is_ahead = n_tokens > 1 and 2 * self._experts.largest_tensor + unit <= self._n_frames
        reserve = unit if n_tokens == 1 else largest
        if self._is_ahead:
            reserve = 2 * self._experts.largest_tensor
        self._drop(self._cache.resize(self._n_frames - reserve))
        outcome = self._cache.look_up(layer, chosen, is_prefill=n_tokens > 1)
        self._drop(outcome.evicted)
        bypassed = frozenset(outcome.bypassed)
        kept = [expert for expert in outcome.missing if expert not in bypassed]
        for tensor in self._experts.layers[layer]:
            pieces = self._experts.pieces(tensor)
            self._weights.hold([chunk for expert in kept for chunk in pieces[expert]])
        if n_tokens == 1 and bypassed:
            for tensor in self._experts.layers[layer]:
                self._borrow(tensor, outcome.bypassed)

    def _use(self, tensor: ExpertTensor) -> None:
        """Wait for the chosen pieces of `tensor`, and let go of those of the tensor before."""
        pieces, ready = self._experts.pieces(tensor), self._ready[tensor]
        wanted = [expert for expert in self._chosen if expert not in ready]
        before, self._in_use = self._in_use, []
        if before:
            self._weights.release(before)
        if wanted:
            chunks = [chunk for expert in wanted for chunk in pieces[expert]]
            self.wait_s += self._weights.acquire(chunks, self.check)
            self._in_use = chunks
            ready.update(expert for expert in wanted if (tensor.layer, expert) in self._cache)
        if self._is_ahead:
            self._read_ahead(tensor)

    def _read_ahead(self, tensor: ExpertTensor) -> None:
        """Begin to read what the next tensor will need; nearly all of it where this layer needs nearly all."""
        following = self._next[tensor]
        transient, self._transient = self._transient, []
        if following is not None:
            if following.layer == tensor.layer:
                self._borrow(following, self._chosen)
            elif len(self._chosen) >= MOST_SHARE * tensor.n_experts:
                self._borrow(following, range(following.n_experts))
        if transient:
            self._weights.release(transient)

    def _borrow(self, tensor: ExpertTensor, experts: Sequence[int]) -> None:
        """Hold pieces that the cache does not keep, until the layer is done or the tensor was used."""
        pieces, layer = self._experts.pieces(tensor), tensor.layer
        chunks = [chunk for expert in experts if (layer, expert) not in self._cache for chunk in pieces[expert]]
        self._weights.hold(chunks)
        self._transient += chunks

    def _drop(self, units: Sequence[tuple[int, int]]) -> None:
        for layer, expert in units:
            for tensor in self._experts.layers[layer]:
                self._ready[tensor].discard(expert)
                self._weights.release(self._experts.pieces(tensor)[expert])

    def _let_go_of_transient(self) -> None:
        transient, self._transient = self._transient, []
        if transient:
            self._weights.release(transient)

    def _let_go(self) -> None:
        in_use, self._in_use = self._in_use, []
        if in_use:
            self._weights.release(in_use)
        self._let_go_of_transient()


def _nothing(address: int) -> None:
    """Only stop."""
