"""Which requests share the next pass, and with which tokens."""

from __future__ import annotations

import pytest

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.scheduling.scheduler import LEAST_AWAITED, PassRules, PlannedPass, Scheduler
from edge_run.runtime.scheduling.sequences import SequencePool
from edge_run.runtime.scheduling.shares import AGING_S
from edge_run.runtime.scheduling.widths import PART_TOKENS, PassWidths


class Bench:
    """A scheduler, and requests that are computed as it says; tokens of answers count on from the prompt's."""

    def __init__(
        self,
        n_sequences: int = 4,
        n_cells: int = 1000,
        is_recurrent: bool = False,
        width: int = 64,
        is_exact: bool = False,
        read_s: float = 0.0,
    ) -> None:
        self.now = 0.0
        pool = SequencePool(n_sequences, n_cells, can_rewind=not is_recurrent, can_share=not is_recurrent)
        costs = WidthCosts()
        if read_s:  # each pass reads for so long, and computes for 10 ms a token
            for seen in (1, 4, 64, 128):
                costs.observe(seen, max(read_s, 0.01 * seen), max(0.0, read_s - 0.01 * seen), read_s, 10**9)
        widths = PassWidths(costs, width)
        self.scheduler = Scheduler(
            pool, widths, lambda: self.now, PassRules(n_cells, is_recurrent or is_exact, is_exact)
        )

    def step(self) -> PlannedPass:
        while self.scheduler.admit():
            pass
        planned = self.scheduler.next_pass()
        assert planned is not None
        self.scheduler.begun(planned)
        for part in planned.parts:
            if part.is_last:
                self.scheduler.append(part.request, part.tokens[-1] + 1)
        return planned


def numbers(planned: PlannedPass) -> list[int]:
    return [part.request for part in planned.parts]


def test_answers_go_on_while_a_prompt_is_read_in_parts() -> None:
    bench = Bench()
    short = bench.scheduler.submit([1, 2, 3])
    assert bench.step().width == 3
    long = bench.scheduler.submit(list(range(100, 260)))
    first = bench.step()
    assert numbers(first) == [short, long]
    assert [len(part.tokens) for part in first.parts] == [1, PART_TOKENS]
    assert first.parts[0].tokens == (4,)
    assert not first.parts[1].is_last
    for _ in range(4):
        last = bench.step()
    assert last.parts[1].is_last
    assert [len(part.tokens) for part in bench.step().parts] == [1, 1]


def test_a_long_prompt_does_not_keep_short_ones_waiting() -> None:
    bench = Bench()
    long, short = bench.scheduler.submit(list(range(500))), bench.scheduler.submit([1000, 1001])
    planned = bench.step()
    assert numbers(planned) == [long, short]
    assert [len(part.tokens) for part in planned.parts] == [62, 2]


def test_prompts_that_are_more_than_answers_ride_in_wider_passes() -> None:
    bench = Bench(width=512, read_s=1.0)
    bench.scheduler.submit([1, 2, 3])
    bench.step()
    bench.scheduler.submit(list(range(100, 500)))
    alone = bench.step().width
    bench.scheduler.submit(list(range(600, 1000)))
    assert bench.step().width > alone


def test_short_prompts_end_with_one_pass_beside_answers_and_long_ones_go_on_in_parts() -> None:
    bench = Bench(width=512, read_s=0.4)
    first, second = bench.scheduler.submit([1, 2, 3]), bench.scheduler.submit([4, 5, 6])
    bench.step()
    long, short = bench.scheduler.submit(list(range(100, 400))), bench.scheduler.submit(list(range(500, 542)))
    planned = bench.step()
    assert {part.request: len(part.tokens) for part in planned.parts} == {
        first: 1,
        second: 1,
        long: PART_TOKENS // 2,
        short: 42,
    }
    assert planned.parts[-1].is_last
    bench.scheduler.end(short)
    assert [len(part.tokens) for part in bench.step().parts] == [1, 1, PART_TOKENS]


def test_prompts_are_read_in_turn_where_answers_fill_a_pass() -> None:
    bench = Bench(n_sequences=8, width=2)
    answers = [bench.scheduler.submit([i, 9]) for i in range(2)]
    bench.step()
    first, second = bench.scheduler.submit(list(range(100, 120))), bench.scheduler.submit(list(range(200, 210)))
    parts = [part for _ in range(40) for part in bench.step().parts]
    assert all(part.tokens for part in parts)
    assert max(len(part.tokens) for part in parts) <= 2
    assert {*answers, first, second} == {part.request for part in parts if part.is_last}


def test_a_prompt_that_begins_alike_is_computed_from_where_they_part() -> None:
    bench = Bench()
    bench.scheduler.submit(list(range(40)))
    bench.step()
    second = bench.scheduler.submit([*range(30), 99])
    planned = bench.step()
    (part,) = [part for part in planned.parts if part.request == second]
    assert part.tokens == (99,)
    assert part.start == 30


def test_what_is_being_read_for_one_is_not_read_for_others_beside_it() -> None:
    """As for the choices of one request, which come together."""
    bench = Bench(n_sequences=6)
    alike = [bench.scheduler.submit(list(range(200))) for _ in range(3)]
    other = bench.scheduler.submit([*range(70), *range(1000, 1200)])
    seen = dict[int, int]()
    for _ in range(12):
        for part in bench.step().parts:
            seen[part.request] = seen.get(part.request, 0) + len(part.tokens)
        assert other in bench.scheduler.running(), "what it would share is less than it has to read"
    read = [seen[number] - (len(bench.scheduler.tokens(number)) - 200) + 1 for number in alike]
    assert read[0] == 200
    assert max(read[1:]) < LEAST_AWAITED


@pytest.mark.parametrize(("salts", "is_recurrent"), [(("a", "b"), False), (("", ""), True)])
def test_who_could_not_share_waits_for_nobody(salts: tuple[str, str], is_recurrent: bool) -> None:
    bench = Bench(is_recurrent=is_recurrent)
    numbered = [bench.scheduler.submit(list(range(200)), salt=salt) for salt in salts]
    bench.step()
    assert bench.scheduler.running() == numbered


def test_who_was_admitted_last_waits_again_when_cells_run_out() -> None:
    bench = Bench(n_cells=60)
    first, second = bench.scheduler.submit(list(range(9))), bench.scheduler.submit(list(range(100, 109)))
    planned = bench.step()
    assert numbers(planned) == [first, second]
    while bench.scheduler.n_running == 2:
        planned = bench.step()
    assert bench.scheduler.running() == [first]
    assert bench.scheduler.n_waiting == 1
    tokens = list(bench.scheduler._requests[second].tokens)
    assert tokens[:9] == list(range(100, 109))
    assert len(tokens) > 9  # what it had said is not lost
    bench.scheduler.end(first)
    planned = bench.step()
    assert numbers(planned) == [second]
    assert [token for part in planned.parts for token in part.tokens] == tokens[planned.parts[0].start :]


@pytest.mark.parametrize("priority", [0, 1])
def test_an_answer_that_gave_its_place_up_goes_on_before_others_begin(priority: int) -> None:
    """Whatever its key was given, and however long they wait; but not before one of a higher priority."""
    bench = Bench(n_cells=60)
    first, second = (bench.scheduler.submit([100 * i + j for j in range(9)], key=str(i)) for i in range(2))
    bench.step()
    while not bench.scheduler.n_waiting:
        bench.step()
    other = bench.scheduler.submit([1000, 1001], priority, key="new")
    bench.now = 100 * AGING_S
    bench.scheduler.end(first)
    bench.step()
    assert bench.scheduler.running()[0] == (other if priority else second)


def test_a_request_that_is_alone_has_all_cells_and_is_full_then() -> None:
    bench = Bench(n_cells=12)
    number = bench.scheduler.submit(list(range(10)))
    bench.step()
    assert not bench.scheduler.is_full(number)
    bench.step()
    bench.step()
    assert bench.scheduler.is_full(number)


def test_priority_goes_first_and_waiting_raises_it() -> None:
    bench = Bench(n_sequences=1)
    running = bench.scheduler.submit([1])
    bench.step()
    low = bench.scheduler.submit([2])
    bench.now = 2.5 * AGING_S
    high = bench.scheduler.submit([3], priority=1)
    bench.scheduler.end(running)
    assert numbers(bench.step()) == [low]
    bench.scheduler.end(low)
    assert numbers(bench.step()) == [high]


def test_a_low_priority_is_served_in_the_end_also_beside_higher_ones_of_the_same_key() -> None:
    bench = Bench(n_sequences=1)
    high = [bench.scheduler.submit([i, i + 1], priority=1) for i in range(9)]
    low = bench.scheduler.submit([100, 101])
    served = []
    while low not in served:
        served += numbers(bench.step())
        bench.scheduler.end(served[-1])
        bench.now += 0.7 * AGING_S
    assert served == [*high[:3], low]


@pytest.mark.parametrize("flooding_s", [0.0, AGING_S + 1])
def test_a_key_that_floods_does_not_keep_others_waiting(flooding_s: float) -> None:
    bench = Bench(n_sequences=1)
    flood = [bench.scheduler.submit([10 * i, 10 * i + 1], key="flood") for i in range(10)]
    bench.step()
    bench.now = flooding_s
    bench.scheduler.end(flood.pop(0))
    bench.step()
    other = bench.scheduler.submit([5000, 5001], key="other")
    bench.scheduler.end(flood[0])
    assert numbers(bench.step()) == [other]


def test_a_key_gets_no_credit_for_the_time_it_was_away() -> None:
    bench = Bench(n_sequences=1)
    first = bench.scheduler.submit(list(range(50)), key="a")
    bench.step()
    late = [bench.scheduler.submit([1000 + i, 1], key="b") for i in range(2)]
    early = bench.scheduler.submit([2000, 1], key="a")
    bench.scheduler.end(first)
    assert numbers(bench.step()) == [late[0]]
    bench.scheduler.end(late[0])
    assert numbers(bench.step()) == [early]  # b has been given more since it came


def test_recurrent_models_read_a_prompt_or_make_tokens_in_turn() -> None:
    bench = Bench(is_recurrent=True, width=8)
    short = bench.scheduler.submit([1, 2])
    bench.step()
    long = bench.scheduler.submit(list(range(100, 120)))
    seen = [numbers(bench.step()) for _ in range(6)]
    assert seen[:4] in ([[long], [short]] * 2, [[short], [long]] * 2)
    for _ in range(4):
        planned = bench.step()
    assert {len(part.tokens) for part in planned.parts} == {1}


def test_what_a_failed_pass_lost_is_computed_again() -> None:
    bench = Bench()
    number = bench.scheduler.submit(list(range(20)))
    planned = bench.step()
    sequence = planned.parts[0].sequence
    bench.scheduler.placed(sequence, 0)
    assert bench.scheduler.n_held(number) == 0
    assert [token for part in bench.step().parts for token in part.tokens] == [*range(20), 20]


@pytest.mark.parametrize("kept", [True, False])
def test_giving_way_first_empties_what_is_kept_then_stops_the_youngest(kept: bool) -> None:
    bench = Bench()
    ended = bench.scheduler.submit([1, 2, 3])
    bench.step()
    numbers = [bench.scheduler.submit([100 * i, 7]) for i in (1, 2)]
    bench.step()
    bench.scheduler.end(ended)
    if not kept:
        assert bench.scheduler.give_way()
    emptied = bench.scheduler.give_way()
    assert emptied is not None
    assert len(emptied) == 1
    assert bench.scheduler.running() == (numbers if kept else numbers[:1])
    if not kept:
        assert bench.scheduler.give_way() is None


def test_giving_way_says_that_it_did_where_the_youngest_held_nothing() -> None:
    bench = Bench()
    numbers = [bench.scheduler.submit([100 * i, 7]) for i in (1, 2)]
    while bench.scheduler.admit():
        pass
    assert bench.scheduler.give_way() == []
    assert bench.scheduler.running() == numbers[:1]
    assert bench.scheduler.give_way() is None
    assert bench.scheduler.running() == numbers[:1]


def test_groups_in_flight_take_turns_and_nobody_waits() -> None:
    bench = Bench(n_sequences=8)
    asked = [bench.scheduler.submit([i, i + 1]) for i in range(8)]
    while bench.scheduler.admit():
        pass
    begun: list[PlannedPass] = []
    for turn in range(12):
        planned = bench.scheduler.next_pass(n_groups=4)
        assert planned is not None
        assert len(planned.parts) == 2
        assert numbers(planned) == asked[2 * (turn % 4) :][:2]
        bench.scheduler.begun(planned)
        begun.append(planned)
        if len(begun) == 4:
            for part in begun.pop(0).parts:
                bench.scheduler.append(part.request, 7)
    for _ in begun:
        bench.scheduler.next_pass(n_groups=4)
    assert bench.scheduler.n_running == 8


def test_a_prompt_goes_on_while_its_beginning_is_in_flight_and_its_answer_waits() -> None:
    bench = Bench(width=8)
    bench.scheduler.submit(list(range(20)))
    while bench.scheduler.admit():
        pass
    for width in (8, 8, 4):
        planned = bench.scheduler.next_pass(n_groups=4)
        assert planned is not None
        assert planned.width == width
        bench.scheduler.begun(planned)
    assert bench.scheduler.next_pass(n_groups=4) is None


def test_what_gives_way_is_emptied_though_nothing_can_be_computed() -> None:
    """One group is in flight, and the other one has no room, not even in what an ended request left: it shares that."""
    bench = Bench(n_sequences=3, n_cells=70)
    scheduler = bench.scheduler
    ended = scheduler.submit([*range(12)])
    (kept,) = (part.sequence for part in bench.step().parts)
    scheduler.submit([*range(100, 112)])
    scheduler.submit([*range(12), 50])
    while scheduler.admit():
        pass
    scheduler.end(ended)
    in_flight, planned = list[PlannedPass](), scheduler.next_pass(n_groups=2)
    while planned and kept not in planned.emptied:
        scheduler.begun(planned)
        in_flight.append(planned)
        if len(in_flight) > 1:
            for part in in_flight.pop(0).parts:
                if part.is_last:
                    scheduler.append(part.request, 7)
        planned = scheduler.next_pass(n_groups=2)
    assert planned
    assert (planned.emptied, planned.parts) == ((kept,), ())


def test_a_group_of_a_pipeline_has_room_in_one_pass() -> None:
    bench = Bench(n_sequences=16, width=8)
    for number in range(16):
        bench.scheduler.submit([1000 * number, 1000 * number + 1, 1000 * number + 2])
    while bench.scheduler.admit():
        pass
    for _ in range(30):
        planned = bench.scheduler.next_pass(n_groups=2)
        assert planned
        assert 0 < planned.width <= 8
        bench.scheduler.begun(planned)
        for part in planned.parts:
            if part.is_last:
                bench.scheduler.append(part.request, part.tokens[-1] + 1)


@pytest.mark.parametrize(("width", "parts"), [(64, [10]), (9, [9, 1]), (4, [4, 4, 2])])
def test_what_was_lost_is_computed_again_as_it_was_where_bits_count(width: int, parts: list[int]) -> None:
    """Of a recurrent model a pass that fails leaves nothing: prompt and answer keep their own grid."""
    bench = Bench(is_recurrent=True, is_exact=True, width=width)
    bench.scheduler.submit(list(range(10)))
    before = [bench.step() for _ in range(len(parts) + 3)]
    assert [one.width for one in before] == [*parts, 1, 1, 1]
    bench.scheduler.placed(0, 0)
    again = []
    while not again or not again[-1].parts[0].is_last:
        again.append(bench.step())
    assert [one.width for one in again] == [*parts, 1, 1, 1, 1], "and the token that the failed pass was to compute"
