"""Policies of the expert cache: what each of them keeps."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.units import MIB
from edge_run.prefetch import next_use, resemblance
from edge_run.prefetch.experts import ExpertCache, LayerExpert, MoeShape, Outcome
from edge_run.prefetch.next_use import Frequencies, NextUsePolicy
from edge_run.prefetch.optimum import OptimalPolicy
from edge_run.prefetch.policies import POLICIES, make_policy
from edge_run.prefetch.replay import Trace, run_policy
from edge_run.prefetch.resemblance import Resemblance
from edge_run.prefetch.routes import LookUp
from routes import EXPERT_BYTES, look_ups

TWO = MoeShape((0, 1), 8, 2)


def cache_of(name: str, capacity: int, moe: MoeShape = TWO) -> ExpertCache:
    return ExpertCache(capacity, dict.fromkeys(moe.layers, 1), make_policy(name, moe))


def resident(cache: ExpertCache) -> set[tuple[int, int]]:
    return {(layer, expert) for layer in (0, 1) for expert in range(64) if (layer, expert) in cache}


def trace_of(moe: MoeShape, **options: float) -> Trace:
    made = look_ups(moe, **options)  # type: ignore[arg-type]
    tokens = sum(not one.is_prefill for one in made) // len(moe.layers)
    return Trace(tuple(made), dict.fromkeys(moe.layers, EXPERT_BYTES), moe, "", 1, tokens)


def test_lru_evicts_what_was_used_longest_ago() -> None:
    cache = cache_of("lru", 3)
    for layer, expert in ((0, 1), (1, 1), (0, 2), (1, 1), (0, 1)):
        cache.look_up(layer, [expert])
    assert cache.look_up(0, [3]) == Outcome((3,), (), ((0, 2),))


def test_lfu_evicts_what_was_used_least_and_of_equals_the_older() -> None:
    cache = cache_of("lfu", 3)
    for layer, expert in ((0, 1), (0, 1), (1, 1), (0, 2)):
        cache.look_up(layer, [expert])
    assert cache.look_up(1, [5]).evicted == ((1, 1),)
    assert cache.look_up(0, [2, 2, 2]).evicted == ()
    assert cache.look_up(1, [6]).evicted == ((1, 5),), "repeats in a look-up count once"


@pytest.mark.parametrize("name", ["layer-lru", "layer-lfu"])
def test_layers_with_shares_make_room_in_their_own(name: str) -> None:
    cache = cache_of(name, 5)
    cache.look_up(1, [0, 1])
    cache.look_up(0, [0, 1])
    outcome = cache.look_up(1, [2])
    assert outcome.evicted == ((1, 0),), "there is room for one more, and no share for it"


@pytest.mark.parametrize("name", ["layer-lru", "layer-lfu"])
def test_shares_are_of_what_capacity_there_is(name: str) -> None:
    """A layer that has nothing yet takes its share from one that has more since the cache shrank."""
    cache = cache_of(name, 8)
    cache.look_up(0, [0, 1, 2, 3])
    assert cache.resize(4) == ()
    assert cache.look_up(1, [5, 6]) == Outcome((5, 6), (), ((0, 0), (0, 1)))
    assert cache.look_up(1, [7]).evicted == ((1, 5),)
    cache.resize(8)
    assert cache.look_up(1, [5, 2]).evicted == ()


def test_a_size_that_all_fit_is_no_reason_to_look_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set for each layer of each token, and thousands may be resident."""
    cache = cache_of("default", 8)
    cache.look_up(0, [0, 1])
    monkeypatch.setattr(cache, "_resident", None)
    assert cache.resize(6) == ()
    assert cache.capacity == 6


@pytest.mark.parametrize("name", ["layer-lru", "layer-lfu"])
def test_a_share_has_room_for_one_where_there_is_room_for_one(name: str) -> None:
    """However many layers there are."""
    cache = cache_of(name, 8)
    cache.look_up(0, [0, 1])
    assert cache.resize(1) == ((0, 0),)
    assert cache.look_up(0, [1]) == Outcome()
    assert cache.look_up(1, [3]) == Outcome((3,), (), ((0, 1),))
    assert cache.look_up(1, [4, 3]) == Outcome((4,), (4,), ())


def test_decay_forgets() -> None:
    cache = cache_of("layer-lfu", 4)
    for _ in range(3):
        cache.look_up(0, [1])
    for _ in range(200):
        cache.look_up(0, [2])
    for _ in range(2):
        cache.look_up(0, [3])
    assert resident(cache) == {(0, 2), (0, 3)}
    for _ in range(20_000):  # counts would overflow
        cache.look_up(0, [4])
    assert resident(cache) == {(0, 2), (0, 4)} or resident(cache) == {(0, 3), (0, 4)}


@pytest.mark.parametrize("name", POLICIES)
def test_a_look_up_larger_than_the_cache(name: str) -> None:
    cache = cache_of(name, 4)
    outcome = cache.look_up(0, [0, 1, 2, 3, 4, 5])
    assert outcome.missing == (0, 1, 2, 3, 4, 5)
    assert len(outcome.bypassed) == 6 - len(cache)
    assert not outcome.evicted


def test_the_default_keeps_a_favourite_and_passes_by_what_is_rare() -> None:
    cache = cache_of("default", 2)
    for _ in range(10):
        cache.look_up(0, [1])
        cache.look_up(1, [1])
    for rare in (2, 3, 4):
        assert cache.look_up(0, [1, rare]) == Outcome((rare,), (rare,), ())
    assert resident(cache) == {(0, 1), (1, 1)}


def test_the_default_changes_its_mind() -> None:
    cache = cache_of("default", 1)
    for _ in range(20):
        cache.look_up(0, [1])
    found = [bool(cache.look_up(0, [2]).missing) for _ in range(20)]
    assert found[0]
    assert not found[-1]


def test_what_followed_a_like_token_is_expected_again() -> None:
    """Its experts were used once and long ago, and yet they are the likeliest."""
    memory = Resemblance(n_layers=2, n_experts=8, n_used=2)
    for token in ((0, 1), (2, 3), (4, 5), (6, 7), (6, 7), (0, 1)):
        for layer in (0, 1):
            memory.note(layer, token)
    votes = [0.0] * 8
    memory.vote(0, 1.0, votes)
    assert memory.weight > 0
    assert {expert for expert in range(8) if votes[expert] >= max(votes)} == {2, 3}


def test_the_last_layer_of_a_prompt_begins_no_token() -> None:
    """Where one row is wanted, that layer has the experts of the last token only, as a token by itself has."""
    policy, last, others = NextUsePolicy(TWO), [4, 5], ([6, 7], [2, 3])
    policy.note(0, [0, 1, 2, 3, *last], (), 1)
    policy.note(1, last, (), 1)
    for token in others:
        for layer in (0, 1):
            policy.note(layer, token, (), 1)
    policy.note(0, last, (), 1)
    votes = [0.0] * 8
    policy._resemblance.vote(0, 1.0, votes)
    assert votes[6] > votes[2] > 0, "6 and 7 came right after it"


def test_like_tokens_are_forgotten() -> None:
    memory = Resemblance(n_layers=1, n_experts=300, n_used=1)
    memory.note_prompt(0, list(range(10)) * 40)
    for token in range(resemblance.TOKENS + 10):
        memory.note(0, [100 + token])
        assert not memory.weight, "none of these came before"
    memory.note(0, [0])
    assert not memory.weight


def test_frequencies_forget_at_their_rates_and_do_not_overflow() -> None:
    frequencies = Frequencies(n_experts=4, n_used=1)
    for token in range(3000):
        frequencies.note([token % 2])
    (first, _), (second, _), (never, _) = frequencies.chances([0, 1, 2], 1.0, [0.0] * 4)
    assert 0.3 < first < second < 0.7, "each half of the time; 1 was the last"
    assert never < 0.1


def test_admit_takes_room_from_what_is_expected_later_and_never_from_the_present_layer() -> None:
    cache = cache_of("default", 4)
    for _ in range(5):
        cache.look_up(0, [0, 1])
        cache.look_up(1, [0, 1])
    cache.look_up(0, [0, 1])
    outcome = cache.admit(1, [5, 1])
    assert outcome == Outcome((5,), (), ((1, 0),)), "1 is predicted, 0 is not, and layer 0 computes"
    assert cache.admit(1, [2, 3]) == Outcome(), "what is there was predicted too"
    assert resident(cache) == {(0, 0), (0, 1), (1, 1), (1, 5)}


def test_op_offload_read_what_has_no_room_and_no_more() -> None:
    """All experts are used in each pass; which of them are popular changes, and must push nothing out."""
    chance, moe = random.Random(4), MoeShape((0, 1, 2, 3), 8, 2)
    cache = cache_of("default", 24, moe)
    missing = 0
    for turn in range(30):
        for layer in moe.layers:
            weights = [1.5 ** chance.randrange(8) for _ in range(8)]
            experts = [expert for _ in range(64) for expert in chance.choices(range(8), weights, k=2)]
            missing += len(cache.look_up(layer, experts, next_tokens=64).missing) * (turn >= 2)
    assert missing <= 28 * (32 - 24)  # where tokens were expected one by one it would be a fifth more


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="policy 'arc': not known; choose one of lru, lfu"):
        make_policy("arc", TWO)


SHAPES = {
    "many layers": MoeShape(tuple(range(12)), 32, 4),
    "few layers": MoeShape(tuple(range(3)), 64, 6),
    "few experts": MoeShape(tuple(range(6)), 8, 2),
}


@pytest.mark.parametrize("moe", SHAPES.values(), ids=SHAPES)
def test_the_default_is_best_and_has_no_cliff(moe: MoeShape) -> None:
    """On routing that it was not made for: Zipf's law, whose favourites drift."""
    trace = trace_of(moe, tokens=90, seed=3)
    whole = len(moe.layers) * moe.experts
    before = 0.0
    for share in (0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1):
        budget = max(1, int(whole * share)) * EXPERT_BYTES
        found = {name: run_policy(trace, budget, name, make_policy(name, moe)).hit_rate for name in POLICIES}
        best = run_policy(trace, budget, "", OptimalPolicy(trace.look_ups, may_bypass=True)).hit_rate
        assert max(found.values()) <= best
        assert found["default"] >= max(found.values()) - 0.02
        assert found["default"] >= before - 0.005
        before = found["default"]


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_hits_are_those_of_the_plain_definition(name: str) -> None:
    trace = trace_of(SHAPES["few experts"], tokens=60, seed=5)
    capacity, hits, clock = 12, 0, 0
    kept, counts, used = set[LayerExpert](), Counter[LayerExpert](), dict[LayerExpert, int]()
    for layer, experts, is_prefill in trace.look_ups:
        touched = {(layer, number): None for number in experts}
        hits += 0 if is_prefill else len(kept & touched.keys())
        for expert in touched:
            clock += 1
            counts[expert], used[expert] = counts[expert] + 1, clock
        for expert in touched:
            if expert not in kept and len(kept) == capacity and (others := kept - touched.keys()):
                kept.remove(min(others, key=lambda one: (counts[one] if name == "lfu" else 0, used[one])))
            if len(kept) < capacity:
                kept.add(expert)
    found = run_policy(trace, capacity * EXPERT_BYTES, name, make_policy(name, trace.moe))
    assert found.hits == hits


def test_bytes_are_those_of_the_layers_that_missed() -> None:
    asked = (LookUp(0, (0, 1), True), LookUp(1, (0,), True), LookUp(0, (1, 2), False), LookUp(1, (0, 3), False))
    trace = Trace(asked, {0: MIB, 1: 3 * MIB}, TWO, "", 1, 1)
    found = run_policy(trace, 100 * MIB, "lru", make_policy("lru", TWO))
    assert (found.look_ups, found.hits, found.bytes_read, found.bytes_per_token) == (4, 2, 4 * MIB, 4 * MIB)


def test_parameters_are_in_their_ranges() -> None:
    assert sum(resemblance.FOLLOWING) == 1
    assert list(next_use.HALF_LIVES_TOKENS) == sorted(next_use.HALF_LIVES_TOKENS, reverse=True)
