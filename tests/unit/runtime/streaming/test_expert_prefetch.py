"""What is read ahead: which guesses are worth it, and the account of what came of them."""

from __future__ import annotations

from edge_run.runtime.streaming.prefetch import LEAST_PRECISION, Precision, PrefetchedExperts

KIND = (1, False, 0)


def test_what_came_ahead_and_was_used() -> None:
    prefetched = PrefetchedExperts()
    for expert in (3, 5, 7):
        prefetched.add((2, expert), 10)
    assert prefetched.is_new((2, 5))
    n_right, wrong = prefetched.judge(2, [5, 9])
    assert (prefetched.is_new((2, 5)), prefetched.is_new((2, 3))) == (False, True)
    assert (n_right, sorted(wrong)) == (1, [(2, 3), (2, 7)])
    assert prefetched.judge(2, [5]) == (0, [])
    prefetched.note_gone((2, 5))
    assert (prefetched.n_read, prefetched.n_unused) == (30, 0)


def test_what_came_in_vain() -> None:
    prefetched = PrefetchedExperts()
    for expert in (3, 5, 7):
        prefetched.add((2, expert), 10)
    prefetched.judge(2, [])
    prefetched.note_withdrawn((2, 3), 6)
    for expert in (3, 5, 99):
        prefetched.note_gone((2, expert))
    assert (prefetched.n_read, prefetched.n_unused) == (24, 14)
    n_right, _ = prefetched.judge(2, [7])  # late, but it was of use
    assert n_right == 1
    prefetched.note_gone((2, 7))
    assert prefetched.n_unused == 14


def test_what_is_given_up_before_its_layer_has_chosen_is_not_wrong_any_more() -> None:
    prefetched = PrefetchedExperts()
    prefetched.add((2, 3), 10)
    prefetched.note_gone((2, 3))
    assert prefetched.judge(2, [4]) == (0, [])
    assert prefetched.n_unused == 10


def test_a_kind_of_guess_loses_trust_with_its_mistakes_and_wins_it_back() -> None:
    precision = Precision()
    assert precision.of(KIND) == 1
    for _ in range(100):
        precision.judge(KIND, is_right=False)
    assert precision.of(KIND) < LEAST_PRECISION / 2
    assert precision.of((2, False, 0)) == 1
    for _ in range(1000):
        precision.judge(KIND, is_right=True)
    assert precision.of(KIND) > LEAST_PRECISION
