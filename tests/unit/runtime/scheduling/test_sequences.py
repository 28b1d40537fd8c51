"""Where a request begins in a context, and what ended requests leave behind."""

from __future__ import annotations

from edge_run.runtime.scheduling.sequences import Beginning, SequencePool


def make_pool(
    n_sequences: int = 3, n_cells: int = 100, can_rewind: bool = True, can_share: bool = True
) -> SequencePool:
    return SequencePool(n_sequences, n_cells, can_rewind=can_rewind, can_share=can_share)


def run(pool: SequencePool, request: int, tokens: list[int]) -> int:
    placed = pool.plan(tokens)
    pool.begin(request, placed)
    pool.extend(placed.sequence, tokens[placed.n_tokens :])
    pool.check()
    return placed.sequence


def test_a_beginning_in_use_is_shared_and_takes_no_cell_twice() -> None:
    pool = make_pool()
    first = run(pool, 0, [1, 2, 3, 4])
    assert pool.plan([1, 2, 3, 9]) == Beginning(1, first, 3)
    second = run(pool, 1, [1, 2, 3, 9])
    assert second != first
    assert pool.used_cells == 5
    pool.cut(first, 0)
    pool.check()
    assert pool.used_cells == 4


def test_the_last_token_is_always_computed() -> None:
    pool = make_pool()
    run(pool, 0, [1, 2, 3])
    assert pool.plan([1, 2, 3]).n_tokens == 2


def test_what_an_ended_request_left_is_continued_where_it_lies() -> None:
    pool = make_pool()
    sequence = run(pool, 0, [1, 2, 3])
    pool.end(sequence)
    assert pool.plan([1, 2, 3, 4, 5]) == Beginning(sequence, sequence, 3)


def test_what_goes_on_otherwise_is_shared_so_that_both_stay() -> None:
    pool = make_pool()
    sequence = run(pool, 0, [1, 2, 3, 4])
    pool.end(sequence)
    assert pool.plan([1, 2, 9, 9]) == Beginning(1, sequence, 2)
    alone = make_pool(n_sequences=1)
    alone.end(run(alone, 0, [1, 2, 3, 4]))
    assert alone.plan([1, 2, 9, 9]) == Beginning(0, 0, 2)


def test_a_recurrent_state_serves_only_what_continues_all_of_it() -> None:
    pool = make_pool(can_rewind=False, can_share=False)
    sequence = run(pool, 0, [1, 2, 3])
    pool.end(sequence)
    assert pool.plan([1, 2, 9]).n_tokens == 0
    assert pool.plan([1, 2, 3, 4]) == Beginning(sequence, sequence, 3)


def test_without_sharing_a_sequence_in_use_serves_nobody_else() -> None:
    pool = make_pool(can_share=False)
    run(pool, 0, [1, 2, 3])
    assert pool.plan([1, 2, 3, 4]).n_tokens == 0


def test_the_oldest_goes_first_and_only_as_much_as_is_needed() -> None:
    pool = make_pool(n_cells=12)
    for request in range(3):
        pool.end(run(pool, request, [request, 7, 7, 7]))
    assert pool.make_room(3) == [0]
    assert pool.used_cells == 8
    assert pool.make_room(4) == []
    assert pool.make_room(12) == [1, 2]
    pool.check()


def test_a_new_request_takes_an_empty_sequence_before_a_kept_one() -> None:
    pool = make_pool()
    pool.end(run(pool, 0, [1, 2]))
    assert pool.plan([8, 9]).sequence == 1


def test_tokens_serve_requests_of_their_salt_only() -> None:
    pool = make_pool()
    placed = pool.plan([1, 2, 3, 4], "a")
    pool.begin(0, placed, "a")
    pool.extend(placed.sequence, [1, 2, 3, 4])
    assert pool.plan([1, 2, 3, 9], "b").n_tokens == 0
    assert pool.plan([1, 2, 3, 9]).n_tokens == 0
    assert pool.plan([1, 2, 3, 9], "a").n_tokens == 3
    pool.end(placed.sequence)
    assert pool.plan([1, 2, 3, 9], "b").n_tokens == 0
    for request, salt in ((1, "b"), (2, "b"), (3, "b")):  # the last one has the sequence of the first
        found = pool.plan([1, 2, 3, 9], salt)
        pool.begin(request, found, salt)
        pool.extend(found.sequence, [1, 2, 3, 9][found.n_tokens :])
    pool.check()
    for request in range(3):
        pool.end(request)
    assert pool.plan([1, 2, 3, 4], "a").n_tokens == 0


def test_sequences_that_share_cells_are_known_with_what_they_have_before_these() -> None:
    pool = make_pool()
    first = run(pool, 0, [1, 2, 3])
    since = pool.next_cell
    pool.extend(first, [4, 5])
    assert pool.holding_since(since) == [(first, 3)]
    shorter, longer = run(pool, 1, [1, 2, 9]), run(pool, 2, [1, 2, 3, 4, 8])
    assert sorted(pool.holding_since(since)) == sorted([(first, 3), (shorter, 2), (longer, 3)])
    assert pool.holding_since(pool.next_cell) == []
