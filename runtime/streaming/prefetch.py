"""Experts read before their layer asks for them: those that a predictor names, while its guesses turn out right.

For each rank of a prediction, the reads that were then used are counted. A rank whose reads were wrong too often is
still predicted and judged, but no longer read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from edge_run.prefetch.experts import LayerExpert, MoeShape
from edge_run.prefetch.predictors import CorrectedRouter, Router, Vector
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.streaming.taps import RoutedLayer, routed_layers
from edge_run.tiers.gguf import GgufModel

OFF = "off"
# How many layers ahead is looked, when a layer has chosen, and when it is done: later, and more surely.
SETTINGS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    OFF: ((), ()),
    "1": ((1,), ()),
    "1+": ((1,), (1,)),
    "2": ((1, 2), ()),
}
LEAST_PRECISION = 0.8
TRUST = 8.0  # reads that count as right before any was judged
FADE = 0.995  # of a judged read, for each later one of its kind

Named = list[tuple[int, list[int]]]  # layers, and what to read for them, the likeliest first
Kind = tuple[int, bool, int]  # of a guess: layers ahead, whether the layer was done, rank


class _Guess(NamedTuple):
    """An expert that was predicted for a layer while it was not in memory."""

    expert: int
    kind: Kind


class PrefetchedExperts:
    """The experts that were read ahead, and what became of them.

    n_read: the chunks that were read ahead.
    n_unused: those of them that were evicted before they were used.
    """

    def __init__(self) -> None:
        self.n_read = self.n_unused = 0
        self._waiting: dict[int, set[int]] = {}  # experts whose layer has not chosen since, by layer
        self._sizes: dict[LayerExpert, int] = {}  # of experts not used yet

    def add(self, expert: LayerExpert, n_chunks: int) -> None:
        """Note that `expert`, of `n_chunks` chunks, is being read ahead."""
        self._waiting.setdefault(expert[0], set()).add(expert[1])
        self._sizes[expert] = n_chunks
        self.n_read += n_chunks

    def is_new(self, expert: LayerExpert) -> bool:
        """Return whether `expert` was read ahead and not used yet."""
        return expert in self._sizes

    def judge(self, layer: int, chosen: Sequence[int]) -> tuple[int, list[LayerExpert]]:
        """Return how many of the experts `chosen` by `layer` were read ahead, and those wrongly expected."""
        n_right = sum(self._sizes.pop((layer, expert), None) is not None for expert in chosen)
        return n_right, [(layer, expert) for expert in self._waiting.pop(layer, set()).difference(chosen)]

    def note_withdrawn(self, expert: LayerExpert, n_unread: int) -> None:
        """Note that `n_unread` chunks of `expert` will not be read."""
        self.n_read -= n_unread
        self._sizes[expert] -= n_unread

    def note_gone(self, expert: LayerExpert) -> None:
        """Note that `expert` was evicted, before its layer has chosen or after."""
        self.n_unused += self._sizes.pop(expert, 0)
        self._waiting.get(expert[0], set()).discard(expert[1])


class Precision:
    """How often guesses of each kind were right recently."""

    def __init__(self) -> None:
        self._right: dict[Kind, float] = {}
        self._judged: dict[Kind, float] = {}

    def judge(self, kind: Kind, is_right: bool) -> None:
        """Count a guess."""
        self._right[kind] = self._right.get(kind, TRUST) * FADE + is_right
        self._judged[kind] = self._judged.get(kind, TRUST) * FADE + 1

    def of(self, kind: Kind) -> float:
        """Return the share of right guesses of `kind`."""
        return self._right.get(kind, TRUST) / self._judged.get(kind, TRUST)


class ExpertPrefetch:
    """Names experts that are worth reading ahead. Not thread-safe.

    setting: one of SETTINGS; `off` costs nothing.
    is_resident: returns whether an expert is in memory or on its way.
    """

    def __init__(self, gguf: GgufModel, moe: MoeShape, is_resident: Callable[[LayerExpert], bool]) -> None:
        """Name experts of `gguf`."""
        self.setting = OFF
        self._gguf, self._moe, self._is_resident = gguf, moe, is_resident
        self._predictor = CorrectedRouter(moe, self._router)
        self._layers: Sequence[RoutedLayer | None] = [None] * len(moe.layers)
        self._routers: dict[int, Router | None] = {}
        self._last = -1  # the layers up to here have run, so that their routers are in memory
        self._precision = Precision()
        self._guesses: dict[int, list[_Guess]] = {}

    def register(self, graph: GraphMap, steps: Steps, when_done: Callable[[int, int], None]) -> None:
        """Find the routers of `graph`; stop where a layer is done, and call `when_done` with its number and a node."""
        layers = routed_layers(graph, self._gguf)
        if len(layers) != len(self._layers):
            return
        self._layers = layers
        for number, layer in enumerate(layers[:-1]):
            if layer is not None and layer.output is not None:
                steps.stop_before(layer.output.ordinal, partial(when_done, number))

    def when_chosen(self, layer: int, experts: Sequence[int], address: int) -> Named:
        """Learn the experts that `layer` chose for a token, and name those to read ahead.

        address: the node that is about to use the experts.
        """
        self._last = max(self._last, layer)
        for guess in self._guesses.pop(layer, ()):
            self._precision.judge(guess.kind, guess.expert in experts)
        ahead, _ = SETTINGS[self.setting]
        found = self._layers[layer]
        if not ahead or found is None or found.chosen is None:
            return []
        self._predictor.see(layer, experts, found.chosen.read(address))
        return self._name(layer, ahead, None)

    def when_done(self, layer: int, address: int) -> Named:
        """Name the experts to read ahead, now that `layer` is computed.

        address: the node that goes on with the layer's output.
        """
        _, ahead = SETTINGS[self.setting]
        found = self._layers[layer]
        if not ahead or found is None or found.output is None:
            return []
        return self._name(layer, ahead, found.output.read(address))

    def abandon(self) -> None:
        """Forget the guesses of a pass that ended early, which cannot be judged."""
        self._guesses.clear()

    def _name(self, layer: int, ahead: Sequence[int], state: Vector | None) -> Named:
        named: Named = []
        for distance in ahead:
            target = layer + distance
            scores = self._predictor.scores(distance, state) if target < len(self._layers) else None
            if scores is None:
                continue
            wanted = []
            for rank, expert in enumerate(np.argsort(-scores)[: self._moe.used].tolist()):
                if not self._is_resident((target, expert)):
                    guess = _Guess(expert, (distance, state is not None, rank))
                    self._guesses.setdefault(target, []).append(guess)
                    if self._precision.of(guess.kind) >= LEAST_PRECISION:
                        wanted.append(expert)
            if wanted:
                named.append((target, wanted))
        return named

    def _router(self, layer: int) -> Router | None:
        if layer not in self._routers:
            found = self._layers[layer] if layer < len(self._layers) else None
            if found is None or layer > self._last:
                return None
            self._routers[layer] = found.open_router()
        return self._routers[layer]
