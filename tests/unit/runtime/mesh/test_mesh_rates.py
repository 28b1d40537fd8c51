"""When a plan is left for another: measured rates off by a fifth for a while, and enough to be gained."""

from __future__ import annotations

from collections.abc import Mapping

from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.mesh.rates import WINDOW_TOKENS, MeshRates


class Replanner:
    """Has a plan, and knows a better one of `better_s` seconds a token."""

    def __init__(self, expected_s: float, better_s: float | None) -> None:
        self.plan: MeshPlan | None = MeshPlan(("a", "b", "a"), 1, expected_s, {})
        self._better_s = better_s
        self.asked: list[Mapping[str, float]] = []
        self.may_group: list[bool] = []

    def better(self, spent: Mapping[str, float], hop_s: float, *, may_group: bool) -> MeshPlan | None:
        self.asked.append(dict(spent))
        self.may_group.append(may_group)
        return None if self._better_s is None else MeshPlan(("a", "a", "a"), 1, self._better_s, {})


def measured(token_s: float, tokens: int = 2 * WINDOW_TOKENS, wide_token_s: float = 0.01) -> MeshRates:
    rates = MeshRates()
    if wide_token_s:
        rates.note(100, 100 * wide_token_s, {}, 2)
    for _ in range(tokens):
        rates.note(1, token_s, {"a": 0.2 * token_s, "b": 0.7 * token_s}, 2)
    return rates


def test_a_plan_that_keeps_its_word_is_kept() -> None:
    replanner = Replanner(0.1, 0.01)
    assert measured(0.11).why_replan(replanner, 100, may_group=True) == ""
    assert not replanner.asked


def test_a_plan_that_is_far_off_is_left_for_a_better_one() -> None:
    replanner = Replanner(0.1, 0.08)
    for may_group in (True, False):
        assert "200 ms" in measured(0.2).why_replan(replanner, 100, may_group=may_group)
    assert replanner.may_group == [True, False]
    assert replanner.asked[0]["b"] > replanner.asked[0]["a"]


def test_not_before_it_was_seen_for_a_while() -> None:
    assert measured(0.2, WINDOW_TOKENS).why_replan(Replanner(0.1, 0.05), 100, may_group=True) == ""


def test_not_for_little_and_not_when_saying_all_again_costs_more() -> None:
    assert measured(0.2).why_replan(Replanner(0.1, 0.19), 100, may_group=True) == ""
    assert measured(0.2).why_replan(Replanner(0.1, None), 100, may_group=True) == ""
    assert measured(0.2).why_replan(Replanner(0.1, 0.1), 100_000, may_group=True) == ""


def test_what_was_said_token_by_token_is_said_again_as_fast_as_the_better_plan_is() -> None:
    assert measured(1.0, wide_token_s=0.0).why_replan(Replanner(0.1, 0.2), 390, may_group=True)
    assert not measured(1.0, wide_token_s=0.0).why_replan(Replanner(0.1, 0.2), 410, may_group=True)


def test_hops_are_what_is_left_when_all_work_is_taken_off() -> None:
    rates = measured(0.2)
    assert abs(rates.hop_s - 0.01) < 1e-9
    rates.restart()
    assert rates.token_s == rates.hop_s == 0.0


def test_with_passes_in_flight_a_token_takes_the_time_between_passes_over_those_that_were_said() -> None:
    rates = MeshRates()
    for number, n_tokens in enumerate((2, 2, 0, 2)):
        rates.note_shared(n_tokens, 100.0 + number)
    assert rates.token_s == 0.5
    assert rates.hop_s == 0.0
