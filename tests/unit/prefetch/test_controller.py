"""The controller of tunables: what it finds in made-up times, and when it says that it found nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edge_run.prefetch import controller as control
from edge_run.prefetch.controller import Controller, Tunable
from edge_run.runtime.streaming.tuning import Tuning

Cost = Callable[[str], float]
COSTS = {"off": 1.0, "1": 0.9, "2": 0.95, "4": 1.0, "8": 1.1}


def drive(controller: Controller, n_tokens: int, cost: Cost, seed: int = 0, noise: float = 0.07) -> list[str]:
    """Decode tokens that need 0 to 30 experts each; return what the first tunable was set to."""
    chance, seen = random.Random(seed), []
    for _ in range(n_tokens):
        need = chance.randint(0, 30)
        factor = 1.0
        for setting in controller.settings.values():
            factor *= cost(setting)
        seen.append(next(iter(controller.settings.values())))
        controller.note((0.1 + 0.01 * need) * factor * chance.gauss(1, noise), need)
    return seen


def test_the_best_of_several_settings_is_found_and_kept() -> None:
    n_right = 0
    for seed in range(20):
        controller = Controller([Tunable("ahead", ("off", "1", "2")), Tunable("readers", ("4", "8"))])
        drive(controller, 1000, COSTS.__getitem__, seed)
        assert controller.chosen == {"ahead": "1", "readers": "4"}
        found = {decision.tried: decision for decision in controller.decisions}
        assert found["1"].setting == "1"
        assert found["1"].other == "off"
        n_right += found["1"].gain_low < 1 / 0.9 - 1 < found["1"].gain_high
        assert found["1"].gain_low > 0
        assert found["8"].setting == "4"
        assert found["8"].gain < 0
    assert n_right >= 18


def test_settings_that_are_alike_are_rarely_taken_for_different() -> None:
    n_wrong = 0
    for seed in range(300):
        controller = Controller([Tunable("ahead", ("a", "b"))])
        while not controller.decisions:
            drive(controller, 10, lambda setting: 1.0, seed * 7919 + len(controller.decisions))
        n_wrong += controller.decisions[0].setting == "b"
    assert n_wrong <= 300 * (1 - control.CONFIDENCE)


def test_a_comparison_ends_where_nothing_can_be_found() -> None:
    controller = Controller([Tunable("ahead", ("a", "b"))])
    drive(controller, 2 * control.MOST_PAIRS * (control.WINDOW_TOKENS + 1), lambda setting: 1.0, noise=0.5)
    (decision,) = controller.decisions
    assert (decision.setting, decision.tried) == ("a", "b")


def test_a_setting_that_is_clearly_slower_is_given_up_before_one_is_taken() -> None:
    n_tokens = list[int]()
    for seed in range(40):
        for cost in ({"off": 1.0, "1": 1.05}, {"off": 1.0, "1": 0.95}):
            controller = Controller([Tunable("ahead", ("off", "1"))])
            while not controller.decisions:
                drive(controller, 1, cost.__getitem__, seed * 7919 + len(n_tokens), noise=0.03)
            assert controller.chosen["ahead"] == min(cost, key=cost.__getitem__)
            n_tokens.append(controller.decisions[0].tokens)
    taken = 2 * control.LEAST_PAIRS * (control.WINDOW_TOKENS + 1)
    assert sorted(n_tokens)[len(n_tokens) // 4] < taken // 2
    assert min(n_tokens[1::2]) == taken


def test_where_a_step_is_slower_no_step_beyond_it_is_tried_in_that_round() -> None:
    costs = {"off": 1.0, "1": 1.2, "2": 0.5, "four": 1.0, "three": 1.3}
    controller = Controller([Tunable("ahead", ("off", "1", "2")), Tunable("readers", ("four", "three"))])
    assert set(drive(controller, control.FIRST_REST_TOKENS, costs.__getitem__)) == {"off", "1"}
    assert {decision.tried for decision in controller.decisions} == {"1", "three"}, "the other tunable is tried"
    controller = Controller([Tunable("ahead", ("off", "1", "2"), first="1")])
    drive(controller, 200, {"off": 1.2, "1": 1.0, "2": 0.9}.__getitem__)
    assert controller.chosen == {"ahead": "2"}, "a step back that is slower says nothing of a step further"


def test_times_that_are_all_the_same_are_no_reason_to_change_anything() -> None:
    controller = Controller([Tunable("ahead", ("a", "b"))])
    for _ in range(2000):
        controller.note(0.1, 3)
    assert controller.chosen == {"ahead": "a"}


def test_a_tunable_with_one_setting_is_left_alone() -> None:
    controller = Controller([Tunable("ahead", ("2",))])
    assert set(drive(controller, 500, lambda setting: 1.0)) == {"2"}
    assert controller.decisions == ()


def test_what_was_found_is_tried_again_later_and_can_change() -> None:
    controller = Controller([Tunable("ahead", ("off", "1"))])
    drive(controller, 200, COSTS.__getitem__)
    assert controller.chosen == {"ahead": "1"}
    drive(controller, 3000, lambda setting: {"off": 0.8, "1": 1.0}[setting])
    assert controller.chosen == {"ahead": "off"}


def test_between_rounds_nothing_is_tried_for_ever_longer() -> None:
    controller = Controller([Tunable("ahead", ("off", "8"))])
    seen = drive(controller, 8000, {"off": 1.0, "8": 1.1}.__getitem__)
    assert seen[:400].count("8") > 0
    assert seen[-4000:].count("8") < 80


def test_a_token_that_something_else_held_up_does_not_decide() -> None:
    controller = Controller([Tunable("ahead", ("off", "1"))])
    chance = random.Random(0)
    for number in range(200):
        seconds = 0.1 * COSTS[controller.settings["ahead"]] * chance.gauss(1, 0.03)
        controller.note(seconds if number % 20 else 5.0, 3)
    assert controller.chosen == {"ahead": "1"}


@pytest.mark.parametrize("between", ["nothing", "prompts"])
def test_tuning_times_tokens_that_follow_each_other(between: str) -> None:
    now = [0.0]
    in_force: list[str] = []
    tuning = Tuning({"ahead": (("off", "1"), in_force.append)}, {}, clock=lambda: now[0])
    assert in_force == ["off"]
    for number in range(400):
        tuning.begin(is_token=True, need=1)
        if between == "prompts" and number % 7 == 0:
            tuning.begin(is_token=False, need=1)
            now[0] += 100
        now[0] += COSTS[in_force[-1]]
    assert tuning.settings == {"ahead": "1"}
    assert tuning.found == {"ahead": "1"}
    assert 2 <= len(in_force) < 200


def test_what_an_earlier_run_found_is_begun_with() -> None:
    in_force: list[str] = []
    tuning = Tuning({"ahead": (("off", "1", "2"), in_force.append)}, {"ahead": "2", "other": "x"})
    assert in_force == ["2"]
    assert (tuning.settings, tuning.found) == ({"ahead": "2"}, {})
    Tuning({"ahead": (("off", "1"), in_force.append)}, {"ahead": "7"})
    assert in_force[-1] == "off"
