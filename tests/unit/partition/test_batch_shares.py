"""A batch is cut so that machines of different speed end together."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from edge_run.partition.batch_shares import AnswerPace, MachineLoad, next_machine, to_take_back

TOKENS = 100


def run(n_requests: int, rates: list[float], most: int, dies: tuple[int, float] | None = None) -> tuple[float, Counter]:
    """Answer so many requests on machines that compute what they have in turn; return the seconds, and who did what.

    rates: answers a second. dies: a machine, and when.
    """
    loads = [0] * len(rates)
    paces = [AnswerPace(4 * most) for _ in rates]
    ends: list[tuple[float, int]] = []  # the next answer of each machine that has something to do
    done: Counter[int] = Counter()
    now, left = 0.0, n_requests
    is_alive = [True] * len(rates)
    while left or ends:
        while left:
            alive = [number for number in range(len(rates)) if is_alive[number]]
            known = [MachineLoad(most, loads[n], paces[n].tokens_per_s, paces[n].requests_per_s) for n in alive]
            chosen = next_machine(left + sum(loads), known)
            if chosen is None:
                break
            number = alive[chosen]
            if not loads[number]:
                paces[number].start(now)
                heapq.heappush(ends, (now + 1 / rates[number], number))
            loads[number] += 1
            left -= 1
        now, number = heapq.heappop(ends)
        if dies and now >= dies[1] and is_alive[dies[0]]:
            is_alive[dies[0]] = False
            left, loads[dies[0]] = left + loads[dies[0]], 0
        if not is_alive[number]:
            continue
        loads[number] -= 1
        done[number] += 1
        paces[number].add(now, TOKENS)
        if loads[number]:
            heapq.heappush(ends, (now + 1 / rates[number], number))
    return now, done


@pytest.mark.parametrize("n_requests", [60, 200, 1000])
@pytest.mark.parametrize("rates", [[1.0, 1.0, 2.0, 2.0], [0.1, 5.0], [3.0], [1.0] * 7])
def test_all_machines_end_together(n_requests: int, rates: list[float]) -> None:
    seconds, done = run(n_requests, rates, most=20)
    assert sum(done.values()) == n_requests
    best = n_requests / sum(rates)
    assert best <= seconds + 1e-6
    before_it_was_measured = min(20, n_requests / len(rates)) / min(rates)
    assert seconds <= max(best, before_it_was_measured) + 2.1 / min(rates)


def test_a_machine_that_dies_leaves_its_requests_to_the_others() -> None:
    seconds, done = run(1000, [1.0, 1.0, 2.0, 2.0], most=20, dies=(2, 80.0))
    assert sum(done.values()) == 1000
    assert seconds <= 80 + (1000 - done[2] - 4 * 80) / 4 + 4


def test_a_machine_has_what_shares_its_passes_while_many_are_left() -> None:
    idle = MachineLoad(most=4)
    assert next_machine(1000, [MachineLoad(4, 4), idle]) == 1
    assert next_machine(1000, [MachineLoad(4, 4), MachineLoad(4, 4)]) is None
    assert next_machine(1000, [MachineLoad(4, 4, 10.0, 0.11)]) == 0  # ahead, for about ten seconds
    assert next_machine(1000, [MachineLoad(4, 6, 10.0, 0.11)]) is None


def test_the_last_requests_go_to_who_ends_them_first() -> None:
    slow, fast = MachineLoad(4, 0, 1.0), MachineLoad(4, 1, 10.0)
    assert next_machine(2, [slow, fast]) == 1
    assert (
        next_machine(5, [MachineLoad(4, 1, 1.0), MachineLoad(4, 4, 10.0)]) is None
    )  # the fast one's next place is sooner


def test_a_request_is_taken_back_where_another_machine_ends_it_much_sooner() -> None:
    free, full = MachineLoad(4, 0, 40.0, 2.0), MachineLoad(4, 4, 40.0, 2.0)  # two seconds each
    slow, unknown = MachineLoad(4, 3, 1.0, 0.05), MachineLoad(4, 3)
    assert to_take_back([free, slow], [0.0, 1.0]) == 1  # 79 seconds left
    assert to_take_back([free, slow], [0.0, 77.0]) is None
    assert to_take_back([free, slow], [0.0, 90.0]) == 1, "frozen"
    assert to_take_back([full, slow], [0.0, 1.0]) is None, "no place"
    assert to_take_back([free, unknown], [0.0, 5.0]) == 1
    assert to_take_back([free, unknown], [0.0, 3.0]) is None
    assert to_take_back([free, full], [0.0, 0.0]) is None, "begun anew, it would not come sooner"
    assert to_take_back([free, MachineLoad(4, 14, 40.0, 2.0)], [0.0, 0.0]) == 1, "it would wait there"
    assert to_take_back([free, slow], [0.0, None]) is None, "none that may be taken back"
    assert to_take_back([MachineLoad(4, 1, 40.0, 2.0)], [6.1]) is None, "no other machine"
    assert to_take_back([MachineLoad(4, 1, 40.0, 2.0), MachineLoad(4, 1, 40.0, 2.0)], [6.1, None]) == 0
    assert to_take_back([unknown, unknown], [9.0, 9.0]) is None
    assert to_take_back([], []) is None


def test_pace_goes_on_after_a_rest() -> None:
    pace = AnswerPace(8)
    pace.start(0.0)
    pace.add(4.0, 8)
    pace.start(100.0)
    assert pace.tokens_per_s == 2.0
    pace.add(104.0, 8)
    assert pace.tokens_per_s == 2.0


def test_pace() -> None:
    pace = AnswerPace(3)
    assert pace.tokens_per_s is None
    pace.start(10.0)
    assert pace.tokens_per_s is None
    pace.add(12.0, 40)
    assert pace.tokens_per_s == 20.0
    assert pace.requests_per_s == 0.5
    for moment in (13.0, 14.0, 15.0):
        pace.add(moment, 10)
    assert pace.tokens_per_s == 10.0
