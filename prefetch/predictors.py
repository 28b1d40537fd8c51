"""Which experts the next layers will choose, told while the present one computes.

Layers are numbered in the order in which they are computed, from 0. A state is the residual stream normalised by a
layer's norm, without the norm's weights. It is nearly the same in neighbouring layers, so a router can be run ahead of
its layer (as in Fate, Fang and others, 2025; the idea is from Eliseev and Mazur, 2023, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_run.prefetch.experts import MOST_AHEAD, MoeShape

Vector = npt.NDArray[np.float32]

PACE = 0.05  # of learning, per token
STEADINESS = 0.3  # keeps what was learnt from a token with even gates from counting more than from others


@dataclass(frozen=True, slots=True)
class Router:
    """A layer's router.

    weights: (experts, width).
    scale: (width,), the weights of the norm before it.
    bias: (experts,), or None.
    choice_bias: (experts,), added to the gates when experts are chosen, or None.
    has_sigmoid: whether the gates are then sigmoids of the logits.
    """

    weights: Vector
    scale: Vector
    bias: Vector | None = None
    choice_bias: Vector | None = None
    has_sigmoid: bool = False

    def logits(self, state: Vector) -> Vector:
        """Return the router's logit of each expert for `state`, (width,)."""
        # Not a BLAS product, which would wake threads of its own beside those of llama.cpp.
        logits: Vector = np.einsum("ew,w->e", self.weights, state * self.scale)
        return logits if self.bias is None else logits + self.bias

    def preference(self, logits: Vector) -> Vector:
        """Return the values by which experts are chosen, the greatest first."""
        if self.choice_bias is None:
            return logits
        gates = 1 / (1 + np.exp(-logits)) if self.has_sigmoid else np.exp(logits - logits.max())
        return np.asarray((gates if self.has_sigmoid else gates / gates.sum()) + self.choice_bias, np.float32)


class CorrectedRouter:
    """Runs the next layer's router on the present state, with a correction learnt for each expert.

    What an expert adds to the state is not known before it is computed, but is similar each time. So for every pair of
    experts, one in the present layer and one in the layer asked about, a correction of the logit is learnt online (the
    delta rule; Widrow and Hoff, 1960), weighted by the token's gates. Not thread-safe.
    """

    def __init__(self, moe: MoeShape, routers: Callable[[int], Router | None], most_ahead: int = MOST_AHEAD) -> None:
        n_layers, n_experts = len(moe.layers), moe.experts
        self._routers = routers
        self._bias = np.zeros((most_ahead, n_layers, n_experts), np.float32)
        self._pairs = np.zeros((most_ahead, n_layers, n_experts, n_experts), np.float32)
        self._layer = -1
        self._state: Vector | None = None
        self._experts: list[int] = []
        self._gates: Vector | None = None
        self._open: dict[tuple[int, int], tuple[list[int], Vector, Vector]] = {}  # said of (ahead, layer), unproven

    def see(self, layer: int, experts: Sequence[int], state: Vector | None) -> None:
        """Learn that `layer` chose `experts` for the present token, and from what was predicted for it.

        state: the one that the layer's router was given.
        """
        router = self._routers(layer)
        self._layer, self._state, self._gates = layer, state, None
        if state is None or router is None:
            return
        logits = router.logits(state)
        for ahead in range(1, len(self._bias) + 1):
            if said := self._open.pop((ahead, layer), None):
                before, gates, guess = said
                error = PACE * (logits - guess)
                self._bias[ahead - 1, layer] += error
                step = gates / (gates @ gates + STEADINESS)
                self._pairs[ahead - 1, layer][before] += step[:, None] * error
        self._experts = list(experts)
        gates = np.exp(logits[self._experts] - logits[self._experts].max())
        self._gates = gates / gates.sum()

    def scores(self, ahead: int, state: Vector | None = None) -> Vector | None:
        """Return the corrected values by which the router of the layer `ahead` after the one seen last would choose.

        state: a later state than that layer's own, where there is one.

        Returns None where no prediction is possible.
        """
        layer = self._layer + ahead
        router, state = self._routers(layer), self._state if state is None else state
        if router is None or state is None or self._gates is None or ahead > len(self._bias):
            return None
        pairs = self._pairs[ahead - 1, layer][self._experts]
        guess: Vector = router.logits(state) + self._bias[ahead - 1, layer] + self._gates @ pairs
        self._open[ahead, layer] = self._experts, self._gates, guess
        return router.preference(guess)
