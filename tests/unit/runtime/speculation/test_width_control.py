"""Which width a pass gets: what was measured decides, plain decoding is always a candidate."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.speculation.drafting import Pace
from edge_run.runtime.speculation.width_control import (
    LEAST_GAIN,
    PLAIN_EVERY,
    REST_AFTER,
    TRIAL_SHARE,
    WIDTHS,
    WidthControl,
)
from pass_times import chosen, resident, streamed

Device = Callable[[int], tuple[float, float, float, int]]


def controlled(device: Device, widths: tuple[int, ...]) -> WidthControl:
    control = WidthControl(WidthCosts(), 64)
    for width in (*widths, *widths):
        control.observe_pass(width, *device(width))
    return control


def halving(count: int) -> list[float]:
    return [0.8**number for number in range(1, count)]


def test_a_streamed_pass_is_as_wide_as_reading_leaves_time_for() -> None:
    control = controlled(streamed, (1, 8, 64))
    assert 24 <= chosen(control, [0.9**number for number in range(1, 64)]) <= 40
    assert control.is_on


def test_a_pass_that_computes_only_is_narrow() -> None:
    control = controlled(resident, (1, 8, 64))
    assert 1 < chosen(control, halving(64)) < 16


def hoped(n_texts: int) -> list[tuple[int, float]]:
    """Passes of so many texts with chains of guesses that come true at 0.7 each."""
    wider = [width for width in WIDTHS if n_texts < width <= 64]
    return [(n_texts, n_texts), *((width, n_texts * (1 - 0.7 ** (width / n_texts)) / 0.3) for width in wider)]


def turned_off(control: WidthControl) -> WidthControl:
    """Return it after guesses that were worth nothing."""
    assert control.wants_guesses()
    for _ in range(8):
        assert chosen(control, [0.0] * 8) == 1
    assert not control.is_on
    return control


def test_guesses_that_do_not_come_true_are_not_verified() -> None:
    control = controlled(resident, (1, 8))
    assert [chosen(control, [0.01] * 20) for _ in range(8)] == [1] * 8
    assert not control.is_on
    assert max(chosen(control, [0.9] * 8) for _ in range(3)) > 1, "it does not begin again"


@pytest.mark.parametrize("device", [streamed, resident])
def test_a_place_that_nobody_can_guess_does_not_end_guessing(device: Device) -> None:
    control = controlled(device, (1, 8))
    control.observe_drafting(0.03)
    for _ in range(4):
        assert chosen(control, [0.9**number for number in range(1, 8)]) > 1
        chosen(control, [0.03, 0.02])
        assert control.is_on
        assert control.wants_guesses()


def test_each_new_text_is_guessed_at() -> None:
    control = turned_off(controlled(resident, (1, 8)))
    control.observe_drafting(1.0)
    assert not control.wants_guesses()
    control.begin()
    assert control.wants_guesses()
    turned_off(control)


@pytest.mark.parametrize(
    ("device", "n_texts", "is_on"), [(streamed, 8, True), (resident, 8, False), (resident, 1, True)]
)
def test_several_texts_are_guessed_at_where_it_takes_little_longer(device: Device, n_texts: int, is_on: bool) -> None:
    control = controlled(device, (n_texts, 64))
    control.begin()
    assert control.wants_guesses(hoped(n_texts)), "or they are tried"
    assert control.is_on == is_on


def test_a_draft_model_is_not_tried_at_once_where_guesses_are_not_hoped_to_pay() -> None:
    """It gives its memory back instead: answers may have ended before a trial has paid."""
    control, rests = controlled(resident, (8, 64)), list[int]()
    control.first_trial_passes, control.rest = 1.0, lambda: rests.append(1)
    control.begin()
    waited = next(n for n in range(1000) if control.wants_guesses(hoped(8)))
    assert 1 / TRIAL_SHARE - 2 <= waited <= 1 / TRIAL_SHARE + 2
    assert rests


@pytest.mark.parametrize("are_resting", [False, True])
@pytest.mark.parametrize(("rested_share", "is_on"), [(0.0, True), (0.6, False)])
def test_what_drafters_lend_speaks_against_guesses(rested_share: float, is_on: bool, are_resting: bool) -> None:
    control, offers = controlled(streamed, (64,) if are_resting else (8, 64)), [(8, 8.0), (16, 12.0)]
    control.rested_share = rested_share
    for _ in range(2 * are_resting):
        assert not control.wants_guesses(offers)
        control.observe_pass(8, *streamed(8))
    control.wants_guesses(offers)
    assert control.is_on == is_on


def test_padding_that_guesses_may_take_the_place_of_makes_them_worth_it() -> None:
    control = controlled(resident, (8, 16, 64))
    control.wants_guesses([(16, 8.0), (32, 8.0 * 1.7)])
    assert not control.is_on
    control.begin()
    control.wants_guesses([(16, 8.0), (16, 8.0 * 1.7)])
    assert control.is_on


def test_what_guesses_gain_is_remembered_by_how_many_texts_there_are() -> None:
    control = controlled(resident, (1, 2, 8, 64))
    control.observe_drafting(1.0)
    turned_off(control)
    for _ in range(3):
        assert control.wants_guesses(hoped(2)) == control.is_on
        assert not control.wants_guesses(), "one alone was found not to pay"
    assert not control.is_on


def test_what_pays_goes_on_paying_after_a_plain_pass_and_other_texts_meanwhile() -> None:
    control, offers = controlled(resident, (2, 8, 64)), [(8, 8.0), (12, 14.0)]
    chosen = list[int]()
    while 1 not in chosen or chosen[-1] != 0:  # a plain pass that is due
        assert control.wants_guesses(hoped(8))
        chosen.append(control.best(offers))
    for n_texts in (7, 2, 8):
        control.wants_guesses(hoped(n_texts))
    assert control.is_on
    assert control.best(offers) == 1


def test_a_trial_that_reads_texts_is_not_made_again_soon() -> None:
    control = controlled(resident, (8, 64))
    assert control.wants_guesses(hoped(8))
    control.observe_drafting(0.11, once_s=0.11)
    assert control.best([(8, 8.0), (12, 8.5)]) == 0
    asked = [control.wants_guesses(hoped(8)) for _ in range(10)]
    assert asked == [False] * 9 + [True], "ten passes of 1.1 s"
    control.begin()
    assert control.wants_guesses(hoped(8)), "others are tried at once"


def test_what_a_trial_took_counts_though_it_read_a_text() -> None:
    """Else the first guesses of many texts cost nothing, and are all verified."""
    control = controlled(resident, (8, 64))
    assert control.wants_guesses(hoped(8))
    control.observe_drafting(0.9, once_s=0.1)
    assert control.best([(8, 8.0), (12, 18.0)]) == 0
    assert not control.is_on
    sure = controlled(resident, (8, 64))
    assert sure.wants_guesses(hoped(8))
    sure.best([(8, 8.0), (12, 18.0)])
    assert sure.is_on


def test_guesses_of_several_texts_must_gain_more_than_those_of_one() -> None:
    """Texts that are easy to guess end before others, which are slow without them."""
    several, one = controlled(resident, (8, 64)), controlled(resident, (1, 64))
    for control, n_texts in ((several, 8), (one, 1)):
        control.wants_guesses(hoped(n_texts))
        for _ in range(20):
            width = n_texts + 4
            gain = 1.1 * resident(width)[0] / resident(n_texts)[0]
            control.best([(n_texts, n_texts), (width, gain * n_texts)])
    assert not several.is_on
    assert one.is_on


def test_what_a_guess_adds_to_a_pass_is_known_from_wider_ones() -> None:
    control = controlled(resident, (8, 24))
    control.wants_guesses(hoped(8))
    assert control.pace.guess_s == pytest.approx(0.1)
    beside_reading = controlled(streamed, (8, 24))
    beside_reading.wants_guesses(hoped(8))
    assert beside_reading.pace.guess_s == pytest.approx(0.0, abs=0.02)


def test_guesses_of_several_texts_are_verified_when_trials_have_gained() -> None:
    control = controlled(resident, (8, 64))
    chosen = []
    for _ in range(4):
        assert control.wants_guesses(hoped(8))
        chosen.append(control.best([(8, 8.0), (12, 15.0)]))
    assert chosen == [0, 0, 0, 1], "two trials, and a plain pass that is due"


@given(st.lists(st.sampled_from([1, 2, 3, 5, 8, 9]), min_size=5, max_size=20), st.sampled_from([streamed, resident]))
def test_worthless_guesses_take_little_time_for_any_number_of_texts(numbers: list[int], device: Device) -> None:
    control, drafting_s, passes_s, draft_s = controlled(device, (1, 2, 3, 5, 8, 9, 64)), 0.0, 0.0, 0.5
    control.begin()
    for n_texts in numbers:
        for _ in range(40):
            width = n_texts
            if control.wants_guesses(hoped(n_texts)):
                control.observe_drafting(draft_s)
                drafting_s += draft_s
                offers = [(n_texts, float(n_texts)), (n_texts + 8, n_texts + 0.01)]
                width = offers[control.best(offers)][0]
            control.observe_pass(width, *device(width))
            passes_s += device(width)[0]
            assert width == n_texts
    n_begun = len({number.bit_length() for number in numbers})
    assert drafting_s <= 8 * draft_s * n_begun + 2 * TRIAL_SHARE * passes_s


def test_how_fast_text_comes_is_known_from_the_first_pass() -> None:
    control = WidthControl(WidthCosts(), 64)
    control.wants_guesses(hoped(8))
    assert control.pace == Pace()
    control.observe_pass(8, *streamed(8))
    control.wants_guesses(hoped(8))
    assert control.pace == Pace(pytest.approx(2.0, rel=0.01), 0.0)


def test_while_off_guesses_are_made_for_a_hundredth_of_the_time() -> None:
    control = turned_off(controlled(resident, (1, 8)))
    control.observe_drafting(0.1)
    asked = sum(control.wants_guesses() for _ in range(1000))
    assert asked * 0.1 <= TRIAL_SHARE * 1000 * resident(1)[0] * 1.05
    assert asked > 10


def test_guesses_that_cost_nothing_are_made_always() -> None:
    control = controlled(resident, (1, 8))
    control.observe_drafting(1e-6)
    turned_off(control)
    assert all(control.wants_guesses() for _ in range(50))


def test_plain_decoding_is_tried_again() -> None:
    def tried(values: list[float]) -> list[int]:
        control = controlled(streamed, (1, 8))
        widths = [chosen(control, values) for _ in range(3 * PLAIN_EVERY)]
        return [number for number, width in enumerate(widths, 1) if width == 1]

    assert tried([0.4] * 2) == [8, 8 + 32, 8 + 32 + PLAIN_EVERY, 8 + 32 + 2 * PLAIN_EVERY]
    assert tried([0.9] * 7) == [PLAIN_EVERY, 2 * PLAIN_EVERY, 3 * PLAIN_EVERY], "what pays is not asked so often"


def test_nothing_is_guessed_before_a_pass_was_seen() -> None:
    assert not WidthControl(WidthCosts(), 8).wants_guesses()


def test_what_a_prompt_took_does_not_tell_what_plain_passes_take() -> None:
    control = controlled(streamed, (128,))
    assert not control.wants_guesses(hoped(8))
    control.observe_pass(8, *streamed(8))
    assert not control.wants_guesses(hoped(8)), "the first one may have taken longer than usual"
    control.observe_pass(8, *streamed(8))
    assert control.wants_guesses(hoped(8))


def test_of_several_texts_plain_passes_come_sooner() -> None:
    control = controlled(streamed, (8, 32))
    offers = [(8, 8.0), (16, 30.0), (24, 40.0)]
    chosen = [control.best(offers) for _ in range(60)]
    assert [number for number, choice in enumerate(chosen, 1) if choice == 0] == [2, 6, 22]


def test_guesses_are_held_against_plain_passes_beside_which_drafters_rest() -> None:
    offers = [(8, 8.0), (16, 9.5)]

    def gains(rested_share: float) -> bool:
        control = controlled(streamed, (8, 32))
        control.rested_share = rested_share
        control.observe_drafting(0.2)
        for _ in range(12):
            control.best(offers)
        return control.is_on

    assert gains(0.0)
    assert not gains(0.15)


def test_drafters_rest_once_plain_decoding_was_better_for_a_while() -> None:
    control, rests = controlled(resident, (1, 8)), list[int]()
    control.rest = lambda: rests.append(1)
    control.observe_drafting(1.0)
    turned_off(control)
    for _ in range(REST_AFTER):
        assert not control.wants_guesses()
    assert not rests
    assert not control.wants_guesses()
    assert rests
    control.begin()
    assert control.wants_guesses()
    rests.clear()
    turned_off(control)
    assert not control.wants_guesses()
    assert not rests, "counted anew"


def test_a_trial_after_a_rest_counts_each_reading_for_it() -> None:
    """That of the draft model, and two of what the model had in its place: in the trial's pass, and in the next one."""
    control = controlled(resident, (1, 8))
    control.observe_drafting(0.04)
    turned_off(control)
    control.rested_share = 0.5  # 0.2 s of a pass

    def n_passes() -> int:
        return next(number for number in itertools.count(1) if control.wants_guesses())

    assert n_passes() == pytest.approx(10 + 100, abs=1), "how long the draft model reads is not known yet"
    control.observe_drafting(0.24, once_s=0.2)
    assert n_passes() == pytest.approx(10 + 50 + 100, abs=1)


@given(
    st.lists(st.floats(0, 1), max_size=40).map(lambda values: sorted(values, reverse=True)),
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 4, 8, 32]),
            st.floats(0.01, 9),
            st.floats(0, 9),
            st.floats(0, 9),
            st.integers(0, 10**10),
        ),
        min_size=1,
    ),
    st.integers(1, 64),
    st.floats(0, 2),
)
def test_where_all_places_are_the_same_the_width_has_the_most_tokens_a_second(
    values: list[float], passes: list[tuple[int, float, float, float, int]], most_tokens: int, draft_s: float
) -> None:
    costs, control = WidthCosts(), WidthControl(WidthCosts(), most_tokens)
    for one in passes:
        costs.observe(*one)
        control.observe_pass(*one)
    control.observe_drafting(draft_s)
    rates = {
        width: (1 + sum(values[: width - 1])) / (costs.pass_s(width) + (draft_s if width > 1 else 0))
        for width in WIDTHS
        if width <= min(most_tokens, len(values) + 1) and costs.is_within_reach(width)
    }
    gain = max(rates.values()) / rates[1]
    width = max([chosen(control, values) for _ in range(100)][-2:])  # one of them may be the plain one that is due
    if gain > LEAST_GAIN * 1.01:
        assert rates[width] == pytest.approx(max(rates.values()), rel=0.01)
    elif gain < LEAST_GAIN * 0.99:
        assert width == 1


def test_what_was_not_seen_is_tried_in_steps_of_at_most_twice_the_time() -> None:
    """With experts a batch reads as much as many single tokens: a wrong hope must not cost a hundred tokens."""

    def growth(width: int) -> float:
        return 8 * (1 - (1 - 1 / 8) ** width)

    control = WidthControl(WidthCosts(growth), 64)

    def pass_s(width: int) -> float:
        return 0.05 * width + 0.4 * growth(width)

    dearest, spent = pass_s(1), []
    control.observe_pass(1, pass_s(1), 0.4, 0.4, 4 * 10**8)
    for _ in range(12):
        width = chosen(control, [0.99] * 63)
        assert pass_s(width) <= 2.2 * dearest
        dearest = max(dearest, pass_s(width))
        spent.append(width)
        control.observe_pass(width, pass_s(width), 0.4 * growth(width), 0.4 * growth(width), int(4e8 * growth(width)))
    assert max(spent) > 16, "it goes on where hopes come true"


def test_a_streamed_pass_is_wide_at_once() -> None:
    assert chosen(controlled(streamed, (1,)), [0.9] * 63) >= 16


def test_where_wide_passes_cost_more_than_is_seen_they_must_promise_more() -> None:
    control = WidthControl(WidthCosts(), 64, least_gain=1.15)
    for width in (1, 8):
        control.observe_pass(width, *resident(width))
    values = [0.35]  # 1.35 tokens in 0.5 s against one in 0.4 s: 1.08
    assert chosen(control, values) == 1
    assert chosen(controlled(resident, (1, 8)), values) == 2
    assert chosen(control, [0.9]) == 2
