"""What is remembered of keys."""

from __future__ import annotations

from edge_run.runtime.scheduling.shares import MOST_GONE, Shares


def test_keys_that_are_gone_are_forgotten_once_they_would_be_as_new_ones() -> None:
    """Also where there are always requests, each with a key of its own."""
    shares, key = Shares(), "0"
    shares.enter(key, ())
    for number in range(1, 1000):
        shares.give(key, 10)
        shares.enter(new := str(number), [key])
        shares.leave([new])
        key = new
    assert list(shares._shares) == [key]


def test_no_more_keys_are_remembered_than_a_few_while_one_waits() -> None:
    shares = Shares()
    shares.enter("waits", ())
    for number in range(3 * MOST_GONE):
        shares.enter(new := str(number), ["waits"])
        shares.give(new, 1 + number % 50)
        shares.leave(["waits"])
    assert len(shares._shares) == MOST_GONE + 1
    assert min(share.tokens for key, share in shares._shares.items() if key != "waits") > 30, "who was given most"


def test_a_key_that_had_more_than_others_is_behind_them_when_it_comes_again() -> None:
    shares = Shares()
    shares.enter("greedy", ())
    shares.enter("modest", ["greedy"])
    shares.give("greedy", 100)
    shares.leave(["modest"])
    shares.enter("greedy", ["modest"])
    assert shares.rank("modest", 0, 0.0, 0.0) < shares.rank("greedy", 0, 0.0, 0.0)
