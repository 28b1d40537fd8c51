"""How many answers at once a plan is good for, from the forecast of their passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench_samples import PLAN, PROFILE
from edge_run.base.config import ModelConfig
from edge_run.base.results import ContextPoint, Plan
from edge_run.partition.cost import MatmulWork, PassWork
from edge_run.runtime.forecasting.abreast import MOST_UNMEASURED, USUAL_PARALLEL, Abreast
from edge_run.runtime.forecasting.forecast import PassTimes
from edge_run.runtime.forecasting.pass_bytes import PassBytes, read_bytes_at

DISK = PROFILE.disks[0]  # 1e9 bytes a second
WORK = PassWork((MatmulWork("Q4_0", 512, int(4e8)),), 0, 0, 0.0)
STREAMED = replace(
    PLAN, mode="streamed", context_tokens=65536, micro_batch_tokens=512, expert_bytes=0, model_bytes=int(4e9),
    streamed_bytes_per_pass=int(2e9), streamed_bytes_per_batch=int(3e9), by_context=(),
)  # fmt: skip


def abreast(plan: Plan, answer_bytes: int = 0, **limits: int) -> Abreast:
    def pass_s(one: Plan, number: int, position: int) -> float:
        return PassTimes(one, WORK, PROFILE, DISK, 1).pass_s(number, position, number, is_first=False)

    return Abreast(plan, pass_s, answer_bytes, **limits)


def best_of_all(one: Abreast, most: int) -> int:
    return max(range(1, most + 1), key=one.tokens_per_s)


@pytest.mark.parametrize("context_tokens", [2048, 16384, 65536])
@pytest.mark.parametrize("displaced", [0, int(5e8), int(2e9)])
def test_the_best_of_all_numbers(context_tokens: int, displaced: int) -> None:
    points = (ContextPoint(context_tokens, 0, STREAMED.streamed_bytes_per_pass + displaced),)
    one = abreast(replace(STREAMED, context_tokens=context_tokens, by_context=points))
    most = max(USUAL_PARALLEL, context_tokens // 512)
    assert one.best <= most
    assert one.tokens_per_s(one.best) >= 0.92 * one.tokens_per_s(best_of_all(one, most))


def test_where_reading_decides_as_many_as_there_is_room_for() -> None:
    slow = abreast(replace(STREAMED, streamed_bytes_per_pass=int(9e11)))
    assert slow.best == 65536 // 512
    assert abreast(replace(STREAMED, streamed_bytes_per_pass=int(9e11), micro_batch_tokens=32)).best == 32
    long = replace(STREAMED, streamed_bytes_per_pass=int(9e11), context_tokens=1 << 18)
    assert ModelConfig(sequences=abreast(long).best).sequences == 256, "llama.cpp has no more"


def test_of_short_requests_more_have_room() -> None:
    slow = replace(STREAMED, streamed_bytes_per_pass=int(9e11), context_tokens=8192)
    points = (ContextPoint(8192, 0, int(9e11 + 8192 * 4e8)),)
    numbers = []
    for request_tokens in (1024, 512, 128, 64):
        one = abreast(replace(slow, by_context=points), request_tokens=request_tokens)
        numbers.append(one.best)
    assert numbers == [16, 16, 64, 128]


def test_what_is_read_besides_counts() -> None:
    points = (ContextPoint(65536, 0, int(2e9 + 65536 * 4e5)),)
    alone, beside = abreast(STREAMED), abreast(replace(STREAMED, by_context=points))
    assert beside.tokens_per_s(16) < alone.tokens_per_s(16)
    assert abreast(STREAMED, answer_bytes=40_000_000).tokens_per_s(16) < alone.tokens_per_s(16)
    assert beside.tokens_per_s(1) <= alone.tokens_per_s(1)


def test_no_more_answers_than_have_room_for_what_each_takes() -> None:
    """Recurrent state, of which each text has its own, in a budget with 500 MB left."""
    held = sum(item.size_bytes for item in STREAMED.items)
    plan = replace(STREAMED, mode="resident", budget_bytes=held + int(5e8))
    usual, full = (abreast(plan, answer_bytes=answer_bytes, planned=16) for answer_bytes in (0, int(5e7)))
    assert [one.tokens_per_s(26) > 0 for one in (usual, full)] == [True, True]
    assert [one.tokens_per_s(27) > 0 for one in (usual, full)] == [True, False]


MIXTURE = replace(STREAMED, streamed_bytes_per_batch=0)
EXPERTS = PassWork((MatmulWork("Q4_0", 512, int(4e8), 32, 4),), 0, 0, 0.0, expert_tensor_bytes=int(4e6))


@pytest.mark.parametrize(("token_bytes", "best"), [(int(1e6), 1), (int(12e6), 64)])
def test_of_a_mixture_that_was_not_measured_what_is_read_decides(token_bytes: int, best: int) -> None:
    """One text finds most of its experts in memory, a few need most of all, and many share what they need."""
    plan = replace(MIXTURE, model_bytes=int(4e8), expert_bytes=int(1e8), streamed_bytes_per_pass=token_bytes)
    one = Abreast(plan, lambda plan, n, _: PassBytes(plan, EXPERTS).usual_s(n, n), 0, most=MOST_UNMEASURED)
    assert one.tokens_per_s(4) < one.tokens_per_s(1)
    assert one.tokens_per_s(4) < one.tokens_per_s(64)
    assert one.best == best


def test_several_are_to_be_faster_than_one_whose_experts_are_chosen_unevenly() -> None:
    """Where no run told how evenly experts are chosen, one answer alone is given the benefit of the doubt."""
    plan = replace(MIXTURE, model_bytes=int(4e8), expert_bytes=int(1e8), streamed_bytes_per_pass=int(375e5))
    usual = PassBytes(plan, EXPERTS)
    assert usual.hoped_bytes == pytest.approx(5e7 * (0.75 - 0.75**4), rel=0.01)

    def best(hoped_bytes: int) -> int:
        limits = {"most": 16, "hoped_bytes": hoped_bytes}
        return Abreast(plan, lambda plan, n, _: PassBytes(plan, EXPERTS).usual_s(n, n), 0, **limits).best

    assert (best(0), best(usual.hoped_bytes)) == (16, 1)
    full = replace(plan, expert_bytes=int(4e8))
    assert PassBytes(full, EXPERTS).hoped_bytes == 0
    assert PassBytes(replace(plan, expert_bytes=0), WORK).hoped_bytes == 0


def test_of_a_mixture_whose_dense_weights_stream_too_each_pass_reads_these() -> None:
    plan = replace(MIXTURE, model_bytes=int(1e9), pinned_bytes=int(2e8), window_bytes=int(5e7), expert_bytes=int(1e8))
    streaming = replace(plan, streamed_bytes_per_batch=int(4e8))
    pinned, streamed = PassBytes(plan, EXPERTS), PassBytes(streaming, EXPERTS)
    assert streamed.later(8, 8)[1] == pytest.approx(pinned.later(8, 8)[1] + 4e8)
    assert sum(streamed.at_first(8, 8)) == pytest.approx(sum(pinned.at_first(8, 8)) + 4e8)
    assert streamed.at_first(8, 8)[0] == pytest.approx(pinned.at_first(8, 8)[0] + 5e7), "into its window"


def test_what_many_answers_of_a_mixture_read_is_not_taken_for_what_one_reads() -> None:
    """What a token reads has experts in it, which passes of several count for themselves."""
    plan = replace(MIXTURE, model_bytes=int(1e9), expert_bytes=int(1e8), streamed_bytes_per_pass=int(6e8))
    seen = list[Plan]()

    def pass_s(one: Plan, number: int, position: int) -> float:
        seen.append(one)
        return 1.0

    Abreast(replace(plan, streamed_bytes_per_batch=int(4e8)), pass_s, 0).tokens_per_s(8)
    Abreast(STREAMED, pass_s, 0).tokens_per_s(8)
    assert [one.streamed_bytes_per_batch for one in seen] == [int(4e8), STREAMED.streamed_bytes_per_pass]


@pytest.mark.parametrize(
    ("tokens", "read"), [(0, 100), (500, 150), (1000, 200), (3000, 260), (5000, 320), (90000, 320)]
)
def test_what_is_read_lies_between_the_points_of_a_plan(tokens: int, read: int) -> None:
    points = (ContextPoint(1000, 0, 200), ContextPoint(5000, 0, 300, kv_bytes_per_pass=20))
    assert read_bytes_at(replace(STREAMED, streamed_bytes_per_pass=100, by_context=points), tokens) == read
    assert read_bytes_at(replace(STREAMED, streamed_bytes_per_pass=100), tokens) == 100
