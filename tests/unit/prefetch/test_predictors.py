"""Predictors of experts, on made-up layers whose routers are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edge_run.prefetch.experts import Mixture, prediction_bytes
from edge_run.prefetch.predictors import (
    PREDICTORS,
    Affinity,
    CorrectedRouter,
    Frequency,
    NextRouter,
    PreviousToken,
    Router,
    Vector,
    make_predictor,
)

N_LAYERS, N_EXPERTS, N_USED, WIDTH = 4, 16, 2, 24
MIXTURE = Mixture(tuple(range(N_LAYERS)), N_EXPERTS, N_USED)


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


def recall(name: str, model: Model, ahead: int = 1, is_late: bool = False, n_tokens: int = 300) -> float:
    """Return the share of experts that `name` named beforehand, in the second half of the tokens."""
    predictor, n_right, n_all = make_predictor(name, MIXTURE, model.router, 2), 0, 0
    for number in range(n_tokens):
        layers = model.token()
        for layer, (experts, state, after) in enumerate(layers):
            predictor.see(layer, experts, state)
            if layer + ahead >= N_LAYERS:
                continue
            scores = predictor.scores(ahead, after if is_late else None)
            if number >= n_tokens // 2:
                assert scores is not None
                assert scores.shape == (N_EXPERTS,)
                n_right += len(set(best(scores)) & set(layers[layer + ahead][0]))
                n_all += N_USED
    return n_right / n_all


def test_the_next_router_on_the_layers_own_output_is_always_right() -> None:
    assert recall("router", Model(), is_late=True) == 1.0


@pytest.mark.parametrize("ahead", [1, 2])
def test_corrections_see_what_experts_will_add(ahead: int) -> None:
    plain, corrected = (recall(name, Model(), ahead) for name in ("router", "corrected-router"))
    assert corrected > plain + 0.03
    assert plain > recall("frequency", Model(), ahead) + 0.2


def test_in_layers_that_add_nothing_the_next_router_is_always_right() -> None:
    assert recall("router", Model(loudness=0.0)) == 1.0
    assert recall("corrected-router", Model(loudness=0.0)) > 0.99


def test_affinity_learns_pairs() -> None:
    """Tokens go through the same number in all layers."""
    affinity, chance = Affinity(MIXTURE), np.random.default_rng(0)
    for _ in range(200):
        expert = int(chance.integers(N_EXPERTS))
        for layer in range(N_LAYERS):
            affinity.see(layer, [expert], None)
            if layer == 0:
                scores = [affinity.scores(1), affinity.scores(2)]
    assert all(found is not None and int(found.argmax()) == expert for found in scores)
    assert affinity.scores(1) is None  # the last layer has none after it
    affinity.see(0, [3], None)
    assert affinity.scores(3) is None


def test_frequencies_and_the_previous_token() -> None:
    frequency, previous = Frequency(MIXTURE), PreviousToken(MIXTURE)
    for experts in ([1, 2], [1, 3], [1, 2], [4, 5]):
        for predictor in (frequency, previous):
            predictor.see(1, experts, None)
            predictor.see(0, [0, 9], None)
    often, last = frequency.scores(1), previous.scores(1)
    assert often is not None
    assert best(often) == [1, 2]
    assert last is not None
    assert set(best(last)) == {4, 5}
    assert int(np.argsort(-last)[2]) == 1


@pytest.mark.parametrize("kind", [NextRouter, CorrectedRouter])
def test_without_a_router_or_a_state_nothing_is_said(kind: type) -> None:
    model = Model()
    experts, state, _ = model.token()[0]

    def make(n_known: int) -> NextRouter | CorrectedRouter:
        def known(layer: int) -> Router | None:
            return model.router(layer) if layer < n_known else None

        return NextRouter(known) if kind is NextRouter else CorrectedRouter(MIXTURE, known)

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
    model, planned = Model(), prediction_bytes(N_LAYERS, N_EXPERTS)
    for name in PREDICTORS:
        predictor = make_predictor(name, MIXTURE, model.router, 2)
        held: Sequence[np.ndarray] = [value for value in vars(predictor).values() if isinstance(value, np.ndarray)]
        assert sum(array.nbytes for array in held) <= planned


def test_an_unknown_name() -> None:
    with pytest.raises(KeyError):
        make_predictor("oracle", MIXTURE, Model().router, 2)
