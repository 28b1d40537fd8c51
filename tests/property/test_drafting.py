"""Trees of guesses: what is taken of them, how they are laid out, and what is learned of those who guess."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.runtime.llama.holdings import LOOKUP_TOKEN_BYTES, MOST_LOOKUP_TOKENS
from edge_run.runtime.speculation.drafting import Acceptance, Guess, WantedGuesses, merged, plan_tree, rank_guesses
from edge_run.runtime.speculation.lookup import MOST_TAKEN_BACK, Lookup, _Runs

KIND = ("draft", 0, 0)
TEN = WantedGuesses(4, 10, Acceptance())


@st.composite
def guesses(draw: st.DrawFn) -> dict[tuple[int, ...], Guess]:
    """Return paths with all their beginnings, none worth more than its beginning."""
    found: dict[tuple[int, ...], Guess] = {}
    for path in draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=25)):
        for end in range(1, len(path) + 1):
            above = found[tuple(path[: end - 1])].value if end > 1 else 1.0
            value = above * draw(st.floats(0.01, 1.0))
            found.setdefault(tuple(path[:end]), Guess(value, KIND, 0.5))
    return found


@given(guesses(), st.integers(1, 8), st.integers(0, 30))
def test_a_tree_holds_the_best_paths_whole_and_its_branches_are_those_of_its_leaves(
    found: dict[tuple[int, ...], Guess], most_leaves: int, size: int
) -> None:
    taken = {path: guess for _, path, guess in rank_guesses({0: found}, most_leaves - 1)[:size]}
    tree = plan_tree(7, taken)
    paths = [tuple(tree.tokens[node] for node in tree.path(i)) for i in range(len(tree))]
    assert paths[0] == (7,)
    assert set(paths[1:]) == {(7, *path) for path in taken}
    assert all(tree.parents[i] < i for i in range(1, len(tree)))
    assert list(tree.depths) == [len(path) - 1 for path in paths]
    main = range(tree.main_length)
    assert [tree.parents[i] for i in main[1:]] == list(main)[:-1], "the main line is not first, or not a line"
    sequences = tree.sequences()
    assert all(0 in sequences[i] for i in main)
    assert all(0 not in sequences[i] for i in range(tree.main_length, len(tree)))
    n_leaves = sum(not children for children in tree.children)
    assert {branch for members in sequences for branch in members} == set(range(n_leaves))
    assert n_leaves <= most_leaves
    for branch in range(n_leaves):  # what a sequence holds is a path: one node of each depth
        depths = [tree.depths[i] for i, members in enumerate(sequences) if branch in members]
        assert sorted(depths) == list(range(len(depths)))


@given(st.lists(guesses(), max_size=3))
def test_with_room_for_all_leaves_guesses_are_taken_by_value(several: list[dict[tuple[int, ...], Guess]]) -> None:
    values = [guess.value for _, _, guess in rank_guesses(dict(enumerate(several)), 1000)]
    assert values == sorted((guess.value for found in several for guess in found.values()), reverse=True)


@given(st.lists(guesses(), min_size=1, max_size=3), st.integers(0, 8), st.integers(0, 30))
def test_the_trees_of_several_texts_have_their_branches_together(
    several: list[dict[tuple[int, ...], Guess]], most_branches: int, size: int
) -> None:
    taken = rank_guesses(dict(enumerate(several)), most_branches)[:size]
    trees = [plan_tree(7, {path: guess for n, path, guess in taken if n == number}) for number in range(len(several))]
    assert sum(len(tree) - 1 for tree in trees) == len(taken)
    assert sum(tree.n_leaves - 1 for tree in trees) <= most_branches
    for number, found in enumerate(several):
        assert all(found[path] is guess for n, path, guess in taken if n == number)


@given(guesses(), guesses())
def test_of_two_drafters_the_better_guess_counts_and_no_path_is_worth_more_than_its_beginning(
    one: dict[tuple[int, ...], Guess], other: dict[tuple[int, ...], Guess]
) -> None:
    both = merged([one, other])
    assert both.keys() == one.keys() | other.keys()
    for path, guess in both.items():
        assert guess.value >= max(found[path].value for found in (one, other) if path in found)
        assert len(path) == 1 or both[path[:-1]].value >= guess.value


@given(st.floats(0.02, 0.95), st.floats(0.02, 0.98), st.integers(0, 2**32))
def test_a_chance_becomes_the_rate_that_is_seen(prior: float, rate: float, seed: int) -> None:
    acceptance, chance = Acceptance(), random.Random(seed)
    for _ in range(1500):
        acceptance.observe(Guess(prior, KIND, prior), chance.random() < rate)
    assert abs(acceptance.chance(KIND, prior) - rate) < 0.12


def test_a_bad_drafter_is_known_by_kinds_it_was_not_seen_with() -> None:
    acceptance = Acceptance()
    before = acceptance.chance(("draft", 3, 3), 0.5)
    for _ in range(10):
        acceptance.observe(Guess(0.9, KIND, 0.9), False)
    assert acceptance.chance(("draft", 3, 3), 0.5) < before / 3
    assert acceptance.chance(("lookup", 3, 3), 0.5) == before


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_look_up_guesses_what_followed_runs_that_were_there_before(text: list[int], depth: int) -> None:
    found = Lookup().draft(text, WantedGuesses(depth, 40, Acceptance()))
    runs = {
        length: [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        for length in (5, 4, 3, 2, 1)
    }
    assert bool(found) == bool(runs[1])
    for path in found:
        assert any(tuple(text[end : end + len(path)]) == path for end in runs[1]), "what is guessed did not follow"
        assert path[:-1] == () or path[:-1] in found
    longest = next((ends for ends in runs.values() if ends), [])
    for end in longest[-1:]:  # what the longest run was followed by last is always among them
        assert tuple(text[end : end + min(depth, len(text) - end)]) in found


@pytest.mark.parametrize("vocabulary", [300, 50_000])
def test_the_index_of_a_long_text_takes_no_more_than_the_plan_counts(vocabulary: int) -> None:
    chance = random.Random(1)
    text, n_tokens = [chance.randrange(vocabulary) for _ in range(40_000)], 0
    lookup = Lookup()
    tracemalloc.start()
    try:
        for _ in range(40):
            n_tokens += 1000
            lookup.draft(text[:n_tokens], TEN)
            counted_bytes = LOOKUP_TOKEN_BYTES * min(n_tokens, MOST_LOOKUP_TOKENS)
            held_bytes = tracemalloc.get_traced_memory()[0]
            assert held_bytes < counted_bytes + 40_000, (n_tokens, held_bytes)
    finally:
        tracemalloc.stop()
    assert lookup.draft([*text, *text[-9_000:-8_990]], TEN).keys() >= {tuple(text[-8_990:-8_986])}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6))
def test_look_up_follows_conversations_that_turn_off(texts: list[list[int]]) -> None:
    lookup = Lookup()
    for text in texts:
        assert lookup.draft(text, TEN) == Lookup().draft(text, TEN)


@pytest.mark.parametrize("n_foreseen", [1, 3, MOST_TAKEN_BACK])
def test_after_tokens_that_did_not_come_a_text_is_not_indexed_anew(
    n_foreseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, ends = random.Random(1), list[int]()
    text = [chance.randrange(4) for _ in range(600)]
    foreseen = [*text, *(chance.randrange(4) for _ in range(n_foreseen))]
    came = [*text, 5]
    lookup = Lookup()
    lookup.draft(foreseen, TEN)
    add = _Runs.add

    def counted(runs: _Runs, tokens: Sequence[int], end: int) -> None:
        ends.append(end)
        add(runs, tokens, end)

    with monkeypatch.context() as patched:
        patched.setattr(_Runs, "add", counted)
        for _ in range(20):
            came.append(chance.randrange(4))
            lookup.draft([*came, 7, 8], TEN)
            found = lookup.draft(came, TEN)
    assert ends[0] == len(text) + 1
    assert len(ends) < 100
    assert found == Lookup().draft(came, TEN)


def test_an_index_that_was_not_finished_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while a long text is indexed; the next one is the same but for its end."""
    chance = random.Random(2)
    text, lookup, add = [chance.randrange(4) for _ in range(200)], Lookup(), _Runs.add
    lookup.draft(text[:100], TEN)

    def stopped(runs: _Runs, tokens: Sequence[int], end: int) -> None:
        if end == 195:
            raise KeyboardInterrupt
        add(runs, tokens, end)

    with monkeypatch.context() as patched:
        patched.setattr(_Runs, "add", stopped)
        with pytest.raises(KeyboardInterrupt):
            lookup.draft(text, TEN)
    for n_more in range(40):
        came = [*text[:198], *text[:n_more]]
        assert lookup.draft(came, TEN) == Lookup().draft(came, TEN)
