"""The expert cache: its capacity holds, what is looked up stays, every cost is accounted for, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.prefetch.experts import ExpertCache, LayerExpert, MoeShape, Outcome
from edge_run.prefetch.optimum import OptimalPolicy
from edge_run.prefetch.policies import POLICIES, make_policy
from edge_run.prefetch.routes import LookUp

LAYERS, EXPERTS = 3, 6
MOE = MoeShape(tuple(range(LAYERS)), EXPERTS, 2)

experts = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=8)
layers = st.integers(0, LAYERS - 1)
widths = st.sampled_from((1, 2, 64))
layer_experts = st.tuples(layers, st.integers(0, EXPERTS - 1))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("look up"), layers, experts, widths),
        st.tuples(st.just("admit"), layers, experts),
        st.tuples(st.just("drop"), layer_experts),
        st.tuples(st.just("resize"), st.integers(1, 80)),
    ),
    max_size=40,
)
sizes = st.lists(st.integers(1, 9), min_size=LAYERS, max_size=LAYERS)


class Checked:
    """A cache, and what it should hold by what it said."""

    def __init__(self, capacity: int, sizes: list[int], name: str) -> None:
        self.sizes, self.capacity = dict(enumerate(sizes)), capacity
        self.cache = ExpertCache(capacity, self.sizes, make_policy(name, MOE), self.size_of)
        self.held: set[LayerExpert] = set()
        self.layer, self.touched = -1, set[LayerExpert]()

    def size_of(self, expert: LayerExpert) -> int:
        """Those of a layer differ a little."""
        layer, number = expert
        return max(1, self.sizes[layer] - number % 3)

    def apply(self, step: tuple) -> None:
        kind, *arguments = step
        if kind == "look up":
            self.look_up(*arguments)
        elif kind == "admit":
            self.admit(*arguments)
        elif kind == "drop":
            self.cache.drop(arguments[0])
            self.held.discard(arguments[0])
        else:
            self.resize(*arguments)
        assert self.held == set(self.residents())
        assert self.cache.cost == sum(map(self.size_of, self.held)) <= self.capacity

    def look_up(self, layer: int, experts: list[int], next_tokens: int) -> None:
        wanted = list(dict.fromkeys(experts))
        outcome = self.cache.look_up(layer, experts, next_tokens)
        self.layer, self.touched = layer, {(layer, expert) for expert in experts}
        assert list(outcome.missing) == [expert for expert in wanted if (layer, expert) not in self.held]
        assert set(outcome.bypassed) <= set(outcome.missing)
        assert not self.touched & set(outcome.evicted)
        self.replace(layer, outcome)

    def admit(self, layer: int, experts: list[int]) -> None:
        outcome = self.cache.admit(layer, experts)
        assert not set(outcome.missing) - set(experts)
        assert not {(layer, expert) for expert in outcome.missing} & self.held
        assert all(evicted[0] != self.layer for evicted in outcome.evicted)
        self.replace(layer, outcome)

    def resize(self, capacity: int) -> None:
        self.capacity, evicted = capacity, self.cache.resize(capacity)
        assert len(set(evicted)) == len(evicted)
        assert set(evicted) <= self.held
        looked_up_last = [expert in self.touched for expert in evicted]
        assert looked_up_last == sorted(looked_up_last), "they go last"
        assert not evicted or self.cache.cost + self.size_of(evicted[-1]) > capacity, "more than was needed"
        self.held -= set(evicted)

    def replace(self, layer: int, outcome: Outcome) -> None:
        assert len(set(outcome.evicted)) == len(outcome.evicted)
        assert set(outcome.evicted) <= self.held
        self.held -= set(outcome.evicted)
        self.held |= {(layer, expert) for expert in outcome.missing if expert not in outcome.bypassed}

    def residents(self) -> Iterator[LayerExpert]:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                if (layer, expert) in self.cache:
                    yield layer, expert


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(steps=steps, sizes=sizes, capacity=st.integers(1, 80))
def test_capacity_and_contents(name: str, steps: list[tuple], sizes: list[int], capacity: int) -> None:
    checked = Checked(capacity, sizes, name)
    for step in steps:
        checked.apply(step)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(asked=st.lists(st.tuples(layers, experts, widths), min_size=1, max_size=60), capacity=st.integers(1, 18))
def test_no_policy_reads_less_than_the_optimum(
    name: str, asked: list[tuple[int, list[int], int]], capacity: int
) -> None:
    """Of experts of one size; the optimum that may pass by what it reads, as a policy may."""
    look_ups = [LookUp(layer, tuple(experts), is_prefill=False) for layer, experts, _ in asked]
    best, other = OptimalPolicy(look_ups, may_bypass=True), make_policy(name, MOE)
    reads = []
    for policy in (best, other):
        cache = ExpertCache(capacity, dict.fromkeys(range(LAYERS), 1), policy)
        reads.append(sum(len(cache.look_up(*one).missing) for one in asked))
    assert reads[0] <= reads[1]
