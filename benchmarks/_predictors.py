"""Predictors that `CorrectedRouter`, the program's own, is measured against, and all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from edge_run.prefetch.experts import MOST_AHEAD, MoeShape
from edge_run.prefetch.predictors import CorrectedRouter, Router, Vector


class Predictor(Protocol):
    """Learns, layer by layer, which experts were chosen, and predicts those of later layers. Not thread-safe."""

    def see(self, layer: int, experts: Sequence[int], state: Vector | None) -> None:
        """Learn that `layer` chose `experts` for the present token; state: the one that its router was given."""
        ...

    def scores(self, ahead: int, state: Vector | None = None) -> Vector | None:
        """Return a score for each expert of the layer `ahead` after the one seen last; only the order of scores counts.

        state: a later state than that layer's own, where there is one.

        Returns None where no prediction is possible.
        """
        ...


class Frequency:
    """What a layer chooses most."""

    def __init__(self, moe: MoeShape) -> None:
        self._counts = np.zeros((len(moe.layers), moe.experts), np.float32)
        self._layer = 0

    def see(self, layer: int, experts: Sequence[int], state: Vector | None) -> None:
        """Count."""
        self._layer = layer
        self._counts[layer, list(experts)] += 1

    def scores(self, ahead: int, state: Vector | None = None) -> Vector | None:
        """Return the counts."""
        counts: Vector = self._counts[(self._layer + ahead) % len(self._counts)]
        return counts


class PreviousToken:
    """What a layer chose last, and before that what it chooses most."""

    def __init__(self, moe: MoeShape) -> None:
        self._frequency = Frequency(moe)
        self._last = np.zeros((len(moe.layers), moe.experts), np.float32)
        self._layer = 0

    def see(self, layer: int, experts: Sequence[int], state: Vector | None) -> None:
        """Remember."""
        self._frequency.see(layer, experts, state)
        self._layer = layer
        self._last[layer] = 0.0
        self._last[layer, list(experts)] = 1.0

    def scores(self, ahead: int, state: Vector | None = None) -> Vector | None:
        """Return what was chosen; frequencies decide between equals."""
        counts = self._frequency.scores(ahead)
        assert counts is not None
        scores: Vector = self._last[(self._layer + ahead) % len(self._last)] + counts / (counts.max() + 1)
        return scores


class Affinity:
    """What a layer chose after those experts of an earlier one (ExFlow, Yao and others, 2024, section 3)."""

    def __init__(self, moe: MoeShape, most_ahead: int = MOST_AHEAD) -> None:
        n_layers, n_experts = len(moe.layers), moe.experts
        self._pairs = np.zeros((most_ahead, n_layers, n_experts, n_experts), np.float32)  # [.., before, after]
        self._counts = np.zeros((n_layers, n_experts), np.float32)
        self._token: list[Sequence[int]] = []  # of each layer up to the present one

    def see(self, layer: int, experts: Sequence[int], state: Vector | None) -> None:
        """Count each pair of experts that a token used, one in each of two layers."""
        del self._token[layer:]
        for ahead, before in enumerate(reversed(self._token[-len(self._pairs) :]), 1):
            self._pairs[ahead - 1, layer][np.ix_(before, experts)] += 1
        self._counts[layer, list(experts)] += 1
        self._token += [()] * (layer - len(self._token)) + [tuple(experts)]

    def scores(self, ahead: int, state: Vector | None = None) -> Vector | None:
        """Return the chances after each of the present layer's experts, added up."""
        layer = len(self._token) - 1
        if ahead > len(self._pairs) or not 0 <= layer < len(self._counts) - ahead:
            return None
        before = list(self._token[-1])
        given = self._counts[layer, before] + 1
        scores: Vector = (self._pairs[ahead - 1, layer + ahead][before] / given[:, None]).sum(axis=0)
        return scores


class NextRouter:
    """The router of the layer that is asked about, run on the present state.

    routers: of each layer, None where it cannot be had yet.
    """

    def __init__(self, routers: Callable[[int], Router | None]) -> None:
        self._routers = routers
        self._layer = 0
        self._state: Vector | None = None

    def see(self, layer: int, experts: Sequence[int], state: Vector | None) -> None:
        """Keep the state."""
        self._layer, self._state = layer, state

    def scores(self, ahead: int, state: Vector | None = None) -> Vector | None:
        """Return what the router would choose by."""
        router, state = self._routers(self._layer + ahead), self._state if state is None else state
        return None if router is None or state is None else router.preference(router.logits(state))


PREDICTORS = ("frequency", "previous-token", "affinity", "router", "corrected-router")


def make_predictor(name: str, moe: MoeShape, routers: Callable[[int], Router | None], most_ahead: int) -> Predictor:
    """Return a new predictor of this name, for layers up to `most_ahead` ahead. Raises KeyError for another name."""
    made: dict[str, Callable[[], Predictor]] = {
        "frequency": lambda: Frequency(moe),
        "previous-token": lambda: PreviousToken(moe),
        "affinity": lambda: Affinity(moe, most_ahead),
        "router": lambda: NextRouter(routers),
        "corrected-router": lambda: CorrectedRouter(moe, routers, most_ahead),
    }
    return made[name]()
