"""How much of expert routing can be known beforehand: bounds for policies of the expert cache that learn online.

Needs scikit-learn, which nothing else here does. Hits of decode look-ups in per cent, as `replay.py` counts them, of
the default policy's way of choosing (what is expected to be used last goes), given other chances that an expert is used
by its layer's next token:

* `default`: as it is, frequencies and like tokens.
* `learnt`: gradient-boosted trees over what could be known at that moment: frequencies at seven half-lives, also by the
  router's weights, the latest six tokens one by one, rank, age, what followed tokens that were alike over the last
  8, 16 or 48 layers, what followed each expert, how much the layer repeats. They are fitted to seven eighths of the
  same answer, blocks of 16 tokens before and after the ones that they are used for: no online policy has that.
* `next token known`: sure for the experts that the next token does use; the others' next use is guessed as by default.
* `optimum`: all look-ups known.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Collection, Sequence

import numpy as np
from _box import need, skip, write_results
from numpy.typing import NDArray
from replay import CHECKED, TRACES

from edge_run.base.units import MIB
from edge_run.prefetch.experts import MoeShape
from edge_run.prefetch.next_use import NextUsePolicy
from edge_run.prefetch.optimum import OptimalPolicy
from edge_run.prefetch.replay import Trace, read_trace, run_policy

Array = NDArray[np.float32]
HALF_LIVES, WEIGHTED_HALF_LIVES, LAGS = (1, 2, 4, 8, 16, 48, 200), (1, 4, 16, 100), 6
SPANS = ((0.8, 2), (0.8, 4), (0.93, 2), (0.93, 4), (0.99, 2), (0.99, 4))  # how a match fades by layer; its power
BLOCK_TOKENS, FOLDS = 16, 8


class _Given:
    """Chances from elsewhere, in place of frequencies."""

    def chances(self, experts: Collection[int], scale: float, others: Sequence[float]) -> list[tuple[float, int]]:
        return [(float(others[expert]), expert) for expert in experts]


class GivenPolicy(NextUsePolicy):
    """The default policy, with the `chances` [token, layer, expert] of use by the next token; from the prompt's end."""

    def __init__(self, moe: MoeShape, chances: Array) -> None:
        super().__init__(moe)
        self._given, self._frequencies = chances, [_Given() for _ in moe.layers]  # type: ignore[assignment]
        self._tokens = [-1] * len(moe.layers)

    def _learn(self, place: int, experts: Sequence[int]) -> tuple[float, list[float]]:
        is_prompt = self._tokens[place] < 0
        self._tokens[place] = 0 if is_prompt else min(self._tokens[place] + 1, len(self._given) - 1)
        return 0.0, self._given[self._tokens[place], place]  # type: ignore[return-value]


class KnowingPolicy(GivenPolicy):
    """The default policy, which is told what each layer's next token `uses` [token, layer, expert]."""

    def __init__(self, moe: MoeShape, uses: Array) -> None:
        super().__init__(moe, uses)
        self._real = NextUsePolicy(moe)

    def _learn(self, place: int, experts: Sequence[int]) -> tuple[float, list[float]]:
        super()._learn(place, experts)
        share, others = self._real._learn(place, experts)
        chances = self._real._frequencies[place].chances(range(self._n_experts), share, others)
        known = self._given[min(self._tokens[place] + 1, len(self._given) - 1), place]
        return 0.0, [1.0 if known[expert] else chance / (1 + chance) for chance, expert in chances]


def tokens_of(name: str) -> tuple[Array, Array, int]:
    """Return the router's weights and ranks [token, layer, expert] of a trace with one prompt; its prompt's tokens."""
    with TRACES[name].open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    steps, layers, experts, slots, phases = (
        np.array([int(row[column]) for row in rows]) for column in ("step", "layer", "expert", "slot", "phase")
    )
    shape = (1 + steps.max(), 1 + layers.max(), read_trace(TRACES[name]).moe.experts)
    weights, ranks = np.zeros(shape, np.float32), np.full(shape, 1 + slots.max(), np.float32)
    weights[steps, layers, experts] = [float(row["weight"]) for row in rows]
    ranks[steps, layers, experts] = slots
    return weights, ranks, int(steps[phases > 0].min())


def features(weights: Array, ranks: Array) -> Array:
    """Return what is known after each look-up, of each expert: [token, layer, expert, feature]."""
    n_tokens, n_layers, _ = weights.shape
    n_used = int(ranks.max())
    uses = (ranks < n_used).astype(np.float32)
    found = [ranks, *(_faded(uses, h) for h in HALF_LIVES), *(_faded(weights, h) for h in WEIGHTED_HALF_LIVES)]
    found += [np.concatenate([np.zeros_like(weights[:lag]), weights[: n_tokens - lag]]) for lag in range(LAGS)]
    last, ages = np.full(uses.shape[1:], -200.0), np.empty_like(uses)
    for t in range(n_tokens):
        last = np.where(uses[t] > 0, t, last)
        ages[t] = np.minimum(t - last, 200)
    found += [ages, *_votes(uses, uses / n_used), *_votes(uses, np.sqrt(weights)), _followed(uses, found[7])]
    kept = np.zeros((n_tokens, n_layers), np.float32)
    for t in range(1, n_tokens):
        kept[t] = 0.95 * kept[t - 1] + 0.05 * (uses[t] * uses[t - 1]).sum(-1) / n_used
    sides = (kept[:, :, None], np.arange(n_layers, dtype=np.float32)[None, :, None], weights.max(-1, keepdims=True))
    return np.stack([*found, *(np.broadcast_to(side, uses.shape) for side in sides)], -1)


def _faded(values: Array, half_life: float) -> Array:
    fade, total, n = 0.5 ** (1 / half_life), np.zeros(values.shape[1:]), 0.0
    found = np.empty_like(values)
    for t, value in enumerate(values):
        total, n = total * fade + value, n * fade + 1
        found[t] = total / (n + 0.5)
    return found


def _votes(uses: Array, signs: Array) -> list[Array]:
    """Return how much of the tokens after those with `signs` like the present one used each expert; by SPANS."""
    n_tokens, n_layers, _ = uses.shape
    overlap = np.einsum("tle,sle->tsl", signs, signs)
    found = []
    for fade, power in SPANS:
        alike = np.zeros((n_tokens, n_tokens, n_layers))
        for t in range(n_tokens):
            sum_ = np.concatenate([[0.0], alike[t - 1, :-1, -1]]) if t else np.zeros(n_tokens)
            for layer in range(n_layers):
                sum_ = alike[t, :, layer] = sum_ * fade + overlap[t, :, layer]
        votes = np.zeros_like(uses)
        for t in range(2, n_tokens):
            shares = (alike[t, :t] * (1 - fade)) ** power
            votes[t] = np.einsum("sl,sle->le", shares, uses[1 : t + 1]) / (shares.sum(0)[:, None] + 1e-9)
        found.append(votes)
    return found


def _followed(uses: Array, slow: Array) -> Array:
    """Return how often, so far, each expert came after those of the present token, in the same layer."""
    n_tokens, n_layers, n_experts = uses.shape
    pairs, counts = np.zeros((n_layers, n_experts, n_experts)), np.zeros((n_layers, n_experts))
    found = np.zeros_like(uses)
    for t in range(n_tokens):
        for layer in range(n_layers):
            if t:
                before = uses[t - 1, layer] > 0
                pairs[layer, before] += uses[t, layer]
                counts[layer, before] += 1
            if (now := uses[t, layer] > 0).any():
                seen = (pairs[layer, now] + slow[t, layer]) / (counts[layer, now] + 1)[:, None]
                found[t, layer] = seen.mean(0)
    return found


def learnt(known: Array, uses: Array) -> Array:
    """Return the chances that trees give, each fold's by those that were fitted to the others."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    n_tokens, n_features = len(known), known.shape[-1]
    folds, found = np.arange(n_tokens) // BLOCK_TOKENS % FOLDS, np.zeros_like(uses)
    for fold in range(FOLDS):
        fitted = np.flatnonzero((folds != fold) & (np.arange(n_tokens) < n_tokens - 1) & (np.arange(n_tokens) >= 8))
        trees = HistGradientBoostingClassifier(
            max_iter=200, learning_rate=0.06, min_samples_leaf=100, l2_regularization=1.0, random_state=0
        )
        trees.fit(known[fitted].reshape(-1, n_features), uses[fitted + 1].ravel())
        for t in np.flatnonzero(folds == fold):
            chances = trees.predict_proba(known[t].reshape(-1, n_features))[:, 1]
            found[t] = chances.reshape(uses.shape[1:])
    return found


def main() -> None:
    """Replay and write the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need(*TRACES.values())
    if importlib.util.find_spec("sklearn") is None:
        skip("scikit-learn is not installed")
    rows: list[dict[str, object]] = []
    given: dict[str, tuple[Trace, Array, Array]] = {}
    for name, budget_mib in CHECKED:
        if name not in given:
            weights, ranks, n_prompt = tokens_of(name)
            uses = (ranks < ranks.max()).astype(np.float32)
            chances = learnt(features(weights, ranks), uses)
            given[name] = read_trace(TRACES[name]), chances[n_prompt - 1 :], uses[n_prompt - 1 :]
        trace, chances, uses = given[name]
        policies = {
            "default": NextUsePolicy(trace.moe),
            "learnt": GivenPolicy(trace.moe, chances),
            "next token known": KnowingPolicy(trace.moe, uses),
            "optimum": OptimalPolicy(trace.look_ups),
        }
        hits = {what: run_policy(trace, budget_mib * MIB, what, policy).hit_rate for what, policy in policies.items()}
        rows.append({"trace": name, "budget_mib": budget_mib, **hits})
        print(rows[-1], flush=True)
    columns = list(rows[0])
    lines = [__doc__ or "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [f"{100 * value:.1f}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    write_results("replay-limit", rows, "\n".join(lines))


if __name__ == "__main__":
    main()
