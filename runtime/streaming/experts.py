"""Streaming by expert as a feature of a pass: each layer reads the experts that its router has chosen, and no others.

The pass stops before a layer's first multiplication by experts, where the ids of the chosen experts are known. Missing
experts are read piece by piece in the order of use, into the memory of experts that the cache evicts. A batch of many
tokens may use more experts than have room. Then the tensors are read one after the other, each while the one before is
computed; and where not even the pieces of one tensor have room, a few rows of each (`expert_slices.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edge_run.base.results import ExpertUse
from edge_run.prefetch.experts import ExpertCache, LayerExpert
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.forecasting.routing import MOST_SHARE, Usage
from edge_run.runtime.graph.nodes import GraphMap, Node, choice_of_outputs
from edge_run.runtime.graph.observer import chosen_experts, makes_ids
from edge_run.runtime.planning.experts import CROWDED_SHARE, ExpertMap, ExpertTensor, routed_read
from edge_run.runtime.planning.memory_plan import with_page_tables
from edge_run.runtime.streaming.expert_slices import ExpertSlices
from edge_run.runtime.streaming.prefetch import ExpertPrefetch, Named, PrefetchedExperts
from edge_run.runtime.streaming.row_slices import leave_out
from edge_run.runtime.streaming.tuning import Tuning
from edge_run.tiers.weights import WeightsOnDemand

if TYPE_CHECKING:
    from edge_run.runtime.llama.row_products import RowProducts
    from edge_run.tiers.packed import PackedBlocks

VERIFIED_TOKENS = 16  # at most, of a pass that verifies guesses; others come after it


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """The memory of experts, and how many are used.

    n_frames: the frames of experts, cached and in use.
    n_lent: the frames that are lent to them at most.
    n_least: the fewest frames that they can do with.
    n_used: the experts of a layer that a token uses.
    micro_batch_tokens: the tokens of a full pass, which more of the same prompt follows.
    """

    n_frames: int
    n_lent: int
    n_least: int
    n_used: int
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The parts that adapt how experts are read.

    usage: measures what passes took.
    prefetch: predicts the experts of the next layers.
    tuning: sets the tunables.
    packed: the packed file that experts are read from, if there is one.
    """

    usage: Usage
    prefetch: ExpertPrefetch | None = None
    tuning: Tuning | None = None
    packed: PackedBlocks | None = None


class ExpertStreaming:
    """The feature that streams experts.

    wait_s: how long passes waited for weights.
    choosing_s: how long it took to decide what to read.
    prefetched: what became of the experts that were read ahead.

    It is over 200 lines because each stop of a pass changes the cache, the frames in use and the reads ahead together,
    and their sum must fit the frames at any time.
    """

    def __init__(
        self,
        experts: ExpertMap,
        cache: ExpertCache,
        weights: WeightsOnDemand,
        room: ExpertRoom,
        adaptation: Adaptation,
        products: RowProducts | None = None,
    ) -> None:
        """products: computes products in slices of rows; None where that is never needed."""
        self.usage, self.prefetch = adaptation.usage, adaptation.prefetch
        self.tuning, self.packed = adaptation.tuning, adaptation.packed
        self._experts, self._cache, self._weights = experts, cache, weights
        self.most_loans, self.least_loans = room.n_lent, min(0, room.n_least - room.n_frames)
        self._n_own_frames, self._n_used, self._full_tokens = room.n_frames, room.n_used, room.micro_batch_tokens
        self._order = [tensor for layer in experts.layers for tensor in layer]
        self._next = dict(zip(self._order, [*self._order[1:], None], strict=True))
        self._ready: dict[ExpertTensor, set[int]] = {tensor: set() for tensor in self._order}
        self._first_of_outputs: ExpertTensor | None = None
        self._layer = -1
        self._need = self._n_borrowed = 0
        self._ids: list[int] = []
        self._chosen: list[int] = []
        self._is_ahead = False
        self._in_use: list[int] = []
        self._ahead: list[int] = []
        self._slices = ExpertSlices(experts, weights, products) if products else None
        self._left_out: Callable[[], None] | None = None  # computes what a node of an unknown graph would
        self.prefetched = PrefetchedExperts()
        self.wait_s = self.choosing_s = 0.0

    @property
    def loan_bytes(self) -> int:
        """A frame, and what the kernel keeps to map it."""
        return with_page_tables(self._experts.chunk_bytes)

    def close(self) -> None:
        """Close the packed file, when no reader is at work any more."""
        if self.packed:
            self.packed.close()

    def is_resident(self, address: int, expert: int) -> bool:
        """Return whether the cache has `expert` from an earlier token, in the layer with a tensor at `address`."""
        tensor = self._experts.at.get(address)
        if tensor is None:
            return True
        one = tensor.layer, expert
        return one in self._cache and not self.prefetched.is_new(one)

    @property
    def use(self) -> ExpertUse:
        """How experts were streamed so far, in passes of one token."""
        chunk_bytes, tuning = self._experts.chunk_bytes, self.tuning
        return ExpertUse(
            tokens=self.usage.n_tokens,
            hit_rate=self.usage.hit_rate,
            prefetched_bytes=self.prefetched.n_read * chunk_bytes,
            unused_bytes=self.prefetched.n_unused * chunk_bytes,
            tunables=dict(tuning.settings) if tuning else {},
            decisions=tuning.decisions if tuning else (),
        )

    @property
    def _n_frames(self) -> int:
        return self._n_own_frames + self._n_borrowed

    def borrow(self, n_loans: int) -> None:
        """Have `n_loans` frames more than of its own from now on, or fewer; only between passes."""
        if n_loans > self._n_borrowed:
            self._weights.grow(n_loans - self._n_borrowed)
            self._n_borrowed = n_loans
        elif n_loans < self._n_borrowed:
            self._in_use, self._ahead = self._give_back(self._in_use), self._give_back(self._ahead)
            self._drop(self._cache.resize(min(self._cache.capacity, self._n_own_frames + n_loans)))
        while n_loans < self._n_borrowed:
            self._n_borrowed -= self._weights.shrink(self._n_borrowed - n_loans)

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Stop before each multiplication by experts: there the ids are known, and the one before it is computed."""
        choice = choice_of_outputs(graph)
        for i, node in enumerate(graph):
            if tensor := self._tensor(node):
                steps.stop_before(i, partial(self._before_known, tensor))
                if i > choice and self._first_of_outputs is None:
                    self._first_of_outputs = tensor
        if self.prefetch:
            self.prefetch.register(graph, steps, self._when_done)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Read the experts that `node` needs; stop after nodes that may make ids, and after each multiplication."""
        if tensor := self._tensor(node):
            self._left_out = self._prepare(tensor, address)  # its other input may not be computed yet
            if self._left_out:
                leave_out(address)
            return True
        return makes_ids(address)

    def after_unknown(self) -> None:
        """Compute a product that llama.cpp left out."""
        left_out, self._left_out = self._left_out, None
        if left_out:
            left_out()

    def abandon(self) -> None:
        """Release the experts in use; the cache keeps the others."""
        self._in_use, self._ahead = self._give_back(self._in_use), self._give_back(self._ahead)
        self._left_out = None
        if self._slices:
            self._slices.abandon()
        self._layer = -1
        if self.prefetch:
            self.prefetch.abandon()

    def _tensor(self, node: Node) -> ExpertTensor | None:
        read = routed_read(node)
        return self._experts.at.get(read.address) if read else None

    def _before_known(self, tensor: ExpertTensor, address: int) -> None:
        """Have the node at `address` ready to be computed, or compute it in its place; its inputs are computed."""
        if compute := self._prepare(tensor, address):
            compute()
            leave_out(address)

    def _prepare(self, tensor: ExpertTensor, address: int) -> Callable[[], None] | None:
        """Wait for the experts that a node needs; where they have no room, return what computes it instead."""
        rows = chosen_experts(address, tensor.n_experts)
        if len(rows) == 0:
            return None
        ids = rows.ravel().tolist()
        if tensor is self._experts.layers[tensor.layer][0] or (tensor.layer, ids) != (self._layer, self._ids):
            with self._choosing():
                self._choose(tensor.layer, ids, len(rows))
                if self.prefetch and len(rows) == 1:
                    self._read_predicted(self.prefetch.when_chosen(tensor.layer, self._chosen, address))
        if self._use(tensor):
            return None
        return partial(self._multiply_in_slices, tensor, address)

    def _choose(self, layer: int, ids: list[int], n_tokens: int) -> None:
        """Look up the chosen experts in the cache, and begin to read the missing ones."""
        if layer <= self._layer or self._layer < 0:
            self.usage.begin(n_tokens, self.wait_s, self.choosing_s)
            if self.tuning:
                self.tuning.begin(n_tokens == 1, self._need)
            self._need = 0
        self._layer, self._ids = layer, ids
        self._chosen = sorted(set(ids)) if n_tokens > 1 else list(dict.fromkeys(ids))
        n_right, wrong = self.prefetched.judge(layer, self._chosen)
        self._withdraw(wrong)
        self._leave_room()
        if not self._is_ahead:
            self._ahead = self._give_back(self._ahead)
        outcome = self._cache.look_up(layer, ids, self._next_tokens(n_tokens))
        self._drop(outcome.evicted)
        self._need += len(outcome.missing) + n_right
        bypassed = frozenset(outcome.bypassed)
        kept = [expert for expert in outcome.missing if expert not in bypassed]
        for tensor in self._experts.layers[layer]:
            pieces = self._experts.pieces(tensor)
            self._weights.hold([chunk for expert in kept for chunk in pieces[expert]])

    def _next_tokens(self, n_tokens: int) -> int:
        """Return the tokens that the layer is expected to have in the next pass: as many, or 1 after a prompt's end."""
        return n_tokens if n_tokens <= VERIFIED_TOKENS or n_tokens == self._full_tokens else 1

    def _when_done(self, layer: int, address: int) -> None:
        if self.prefetch and layer == self._layer and len(self._ids) == self._n_used:
            with self._choosing():
                self._read_predicted(self.prefetch.when_done(layer, address))

    @contextlib.contextmanager
    def _choosing(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.choosing_s += time.monotonic() - started

    def _read_predicted(self, named: Named) -> None:
        """Begin to read the predicted experts, in place of cached ones that are worth less."""
        for layer, experts in named:
            n_experts = self._experts.layers[layer][0].n_experts  # layers may have different numbers of them
            outcome = self._cache.admit(layer, [expert for expert in experts if expert < n_experts])
            self._drop(outcome.evicted)
            for expert in outcome.missing:
                chunks = self._chunks((layer, expert))
                self.prefetched.add((layer, expert), len(chunks))
                self._weights.hold(chunks, is_guess=True)

    def _withdraw(self, wrong: Sequence[LayerExpert]) -> None:
        """Cancel the reads of experts that were predicted and not chosen, as far as they have not begun."""
        for expert in wrong:
            if n_unread := self._weights.unread(self._chunks(expert)):
                self.prefetched.note_withdrawn(expert, n_unread)
                self._cache.drop(expert)
                self._drop([expert])

    def _chunks(self, expert: LayerExpert) -> list[int]:
        layer, number = expert
        return [chunk for tensor in self._experts.layers[layer] for chunk in self._experts.pieces(tensor)[number]]

    def _leave_room(self) -> None:
        """Shrink the cache until the experts that are used and not cached have enough frames.

        Each eviction may make one more of the chosen experts uncached, so this is repeated.
        """
        while evicted := self._cache.resize(self._n_frames - self._reserve()):
            self._drop(evicted)

    def _reserve(self) -> int:
        """Return the frames for experts that are used and not cached: those of one tensor at a time, or of two."""
        layer = self._experts.layers[self._layer]
        both = 2 * self._experts.largest_tensor
        is_crowded = len(self._chosen) >= CROWDED_SHARE * layer[0].n_experts
        self._is_ahead = is_crowded and both + self._n_used * max(self._experts.sizes) <= self._n_frames
        n_passing = sum((self._layer, expert) not in self._cache for expert in self._chosen)
        passing = max(self._experts.size_at_once(tensor, n_passing) for tensor in layer)
        if self._is_ahead:
            return min(both, passing + max(passing, len(self._ahead)))
        return min(passing, self._n_frames)  # more than there are pass in slices

    def _use(self, tensor: ExpertTensor) -> bool:
        """Wait for the chosen pieces of `tensor`, and release those before; return whether they have room.

        Where they have none, no experts are cached, and all frames are free.
        """
        pieces, ready = self._experts.pieces(tensor), self._ready[tensor]
        wanted = [expert for expert in self._chosen if expert not in ready]
        self._in_use = self._give_back(self._in_use)
        if wanted:
            chunks = [chunk for expert in wanted for chunk in pieces[expert]]
            if self._slices and len(chunks) > self._n_frames and len(set(chunks)) > self._n_frames:
                return False
            self.wait_s += self._weights.acquire(chunks)
            self._in_use = chunks
            ready.update(expert for expert in wanted if (tensor.layer, expert) in self._cache)
        if self._is_ahead:
            self._read_ahead(tensor)
        return True

    def _multiply_in_slices(self, tensor: ExpertTensor, address: int) -> None:
        assert self._slices
        self.wait_s += self._slices.multiply(tensor, self._chosen, address, self._n_frames)

    def _read_ahead(self, tensor: ExpertTensor) -> None:
        """Begin to read the next tensor's chosen experts; where this layer used nearly all experts, nearly all of them.

        A layer that only computes the tokens whose logits are wanted needs few experts: nothing is read ahead for it.
        """
        following = self._next[tensor]
        self._ahead = self._give_back(self._ahead)
        if following is not None and following.layer == tensor.layer:
            self._ahead = self._not_kept(following, self._chosen)
        elif (
            following is not None
            and following is not self._first_of_outputs
            and len(self._chosen) >= MOST_SHARE * tensor.n_experts
        ):
            spare = self._n_frames - self._cache.cost - len(self._not_kept(tensor, self._chosen))
            self._ahead = self._not_kept(following, range(following.n_experts))[: max(0, spare)]
        self._weights.hold(self._ahead)

    def _not_kept(self, tensor: ExpertTensor, experts: Sequence[int]) -> list[int]:
        """Return the chunks of the pieces in `tensor` of those `experts` that are not cached."""
        pieces, layer = self._experts.pieces(tensor), tensor.layer
        return [chunk for expert in experts if (layer, expert) not in self._cache for chunk in pieces[expert]]

    def _drop(self, experts: Sequence[LayerExpert]) -> None:
        chunks = list[int]()
        for expert in experts:
            layer, number = expert
            self.prefetched.note_gone(expert)
            for tensor in self._experts.layers[layer]:
                self._ready[tensor].discard(number)
                chunks += self._experts.pieces(tensor)[number]
        self._give_back(chunks)

    def _give_back(self, chunks: list[int]) -> list[int]:
        if chunks:
            self._weights.release(chunks)
        return []
