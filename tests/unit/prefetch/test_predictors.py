"""The predictor of experts, on made-up layers whose routers are known."""

from __future__ import annotations

import numpy as np
import pytest

from edge_run.prefetch.experts import MoeShape, prediction_bytes
from edge_run.prefetch.predictors import (
    CorrectedRouter,
    Router,
    Vector,
)

N_LAYERS, N_EXPERTS, N_USED, WIDTH = 4, 16, 2, 24
MOE = MoeShape(tuple(range(N_LAYERS)), N_EXPERTS, N_USED)


class Model:
    """Layers that add to a state what their experts say, and choose by it."""

    def __init__(self, seed: int = 0, loudness: float = 1.0) -> None:
        self.random = np.random.default_rng(seed)
        draw = self.random.standard_normal
        self.routers = [
            Router(draw((N_EXPERTS, WIDTH)).astype(np.float32), (1 + 0.2 * draw(WIDTH)).astype(np.float32))
            for _ in range(N_LAYERS)
        ]
        self.says = loudness * draw((N_LAYERS, N_EXPERTS, WIDTH))

    def router(self, layer: int) -> Router | None:
        return self.routers[layer] if layer < N_LAYERS else None

    def token(self) -> list[tuple[list[int], Vector, Vector]]:
        """Return of each layer what it chooses, its router's state, and the state after it."""
        residual, layers = self.random.standard_normal(WIDTH) * 2, []
        for layer, router in enumerate(self.routers):
            state = normed(residual)
            experts = best(router.logits(state))
            residual = residual + self.says[layer, experts].mean(axis=0)
            layers.append((experts, state, normed(residual)))
        return layers


def normed(residual: np.ndarray) -> Vector:
    return np.asarray(residual / np.sqrt((residual**2).mean()), np.float32)


def best(scores: Vector) -> list[int]:
    return [int(expert) for expert in np.argsort(-scores)[:N_USED]]


def recall(model: Model, ahead: int = 1, n_tokens: int = 300) -> tuple[float, float]:
    """Return the share of experts that the predictor named beforehand, and that its router alone would have named.

    In the second half of the tokens.
    """
    predictor, n_right, n_plain, n_all = CorrectedRouter(MOE, model.router, 2), 0, 0, 0
    for number in range(n_tokens):
        layers = model.token()
        for layer, (experts, state, _) in enumerate(layers):
            predictor.see(layer, experts, state)
            if layer + ahead >= N_LAYERS:
                continue
            scores = predictor.scores(ahead)
            if number >= n_tokens // 2:
                assert scores is not None
                assert scores.shape == (N_EXPERTS,)
                chosen = set(layers[layer + ahead][0])
                n_right += len(set(best(scores)) & chosen)
                n_plain += len(set(best(model.routers[layer + ahead].logits(state))) & chosen)
                n_all += N_USED
    return n_right / n_all, n_plain / n_all


@pytest.mark.parametrize("ahead", [1, 2])
def test_corrections_see_what_experts_will_add(ahead: int) -> None:
    corrected, plain = recall(Model(), ahead)
    assert corrected > plain + 0.03


def test_in_layers_that_add_nothing_the_next_router_is_nearly_always_right() -> None:
    corrected, plain = recall(Model(loudness=0.0))
    assert plain == 1.0
    assert corrected > 0.99


def test_a_later_state_is_asked_about_where_there_is_one() -> None:
    """Before anything is learnt, the next router on the layer's own output says what that layer will choose."""
    model = Model()
    layers = model.token()
    (experts, state, after), (chosen, _, _) = layers[:2]
    predictor = CorrectedRouter(MOE, model.router)
    predictor.see(0, experts, state)
    scores = predictor.scores(1, after)
    assert scores is not None
    assert best(scores) == chosen


def test_without_a_router_or_a_state_nothing_is_said() -> None:
    model = Model()
    experts, state, _ = model.token()[0]

    def make(n_known: int) -> CorrectedRouter:
        return CorrectedRouter(MOE, lambda layer: model.router(layer) if layer < n_known else None)

    for predictor, seen in ((make(N_LAYERS), None), (make(1), state)):
        predictor.see(0, experts, seen)
        assert predictor.scores(1) is None
    predictor = make(N_LAYERS)
    predictor.see(0, experts, state)
    assert predictor.scores(1) is not None
    assert predictor.scores(N_LAYERS) is None


def test_what_experts_are_chosen_by() -> None:
    weights, state = np.eye(3, dtype=np.float32), np.array([1.0, 3.0, 2.0], np.float32)
    one = np.ones(3, np.float32)
    plain = Router(weights, one, bias=np.array([9, 0, 0], np.float32))
    assert plain.preference(plain.logits(state)).tolist() == [10, 3, 2]
    for has_sigmoid in (False, True):
        nudged = Router(weights, one, None, np.array([2, 0, 0], np.float32), has_sigmoid)
        gates = nudged.preference(nudged.logits(state))
        assert int(gates.argmax()) == 0
        assert gates[1] > gates[2]
    scaled = Router(weights, np.array([2, 1, 1], np.float32))
    assert scaled.logits(state).tolist() == [2, 3, 2]


def test_what_is_learnt_takes_no_more_than_is_planned() -> None:
    held = [value for value in vars(CorrectedRouter(MOE, Model().router)).values() if isinstance(value, np.ndarray)]
    assert 0 < sum(array.nbytes for array in held) <= prediction_bytes(N_LAYERS, N_EXPERTS)
