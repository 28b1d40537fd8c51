"""Which of two kernels computes weights: only a gain of more than a tenth counts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edge_run.base.profile import KernelSpeed, RepackedSpeed
from edge_run.partition.kernel_choice import Streaming, is_repacking_worth_it


def speeds(by_tokens: Mapping[int, float]) -> list[KernelSpeed]:
    return [KernelSpeed("Q4_0", 4096, tokens, 2, False, speed) for tokens, speed in by_tokens.items()]


@pytest.mark.parametrize(
    ("token_gain", "prompt_gain", "before", "wanted"),
    [
        (1.0, 2.0, None, True),
        (1.0, 2.0, False, True),
        (0.95, 2.0, None, True),
        (1.0, 1.05, None, False),
        (1.0, 1.05, True, True),
        (1.0, 0.95, True, True),
        (1.0, 0.5, True, False),
        (1.0, 0.5, None, False),
        (0.5, 2.0, None, False),
        (0.5, 2.0, True, False),
        (0.5, 2.0, False, False),
    ],
)
def test_gains(token_gain: float, prompt_gain: float, before: bool | None, wanted: bool) -> None:
    plain, repacked = speeds({1: 1.0, 512: 1.0}), speeds({1: token_gain, 512: prompt_gain})
    assert is_repacking_worth_it(plain, repacked, [1, 512], before) is wanted


def test_the_nearest_measured_width_counts() -> None:
    plain, repacked = speeds({1: 1.0, 8: 1.0, 64: 1.0}), speeds({1: 1.0, 8: 0.5, 64: 2.0})
    assert is_repacking_worth_it(plain, repacked, [1, 512]) is True
    assert is_repacking_worth_it(plain, repacked, [1, 10, 512]) is False


@pytest.mark.parametrize(
    ("parallel", "gains", "before", "wanted"),
    [
        (1, {1: 2.0, 8: 2.0, 64: 0.8, 512: 0.6}, False, True),  # tokens come at half the time, prompts take longer
        (16, {1: 2.0, 8: 2.0, 64: 0.8, 512: 0.6}, False, True),
        (100, {1: 2.0, 8: 2.0, 64: 0.8, 512: 0.6}, True, False),
        (1, {1: 1.15, 8: 1.0, 64: 1.0, 512: 0.7}, True, True),  # 8 % in all
        (1, {1: 1.15, 8: 1.0, 64: 1.0, 512: 0.7}, False, False),
        (1, {1: 1.15, 8: 1.0, 64: 1.0, 512: 0.7}, None, True),  # as tokens come by 15 % faster
        (1, {1: 0.9, 8: 1.0, 64: 1.0, 512: 1.3}, None, False),
        (16, {1: 1.2, 8: 1.25, 64: 0.9, 512: 0.55}, None, True),  # Q4_K on a processor with AVX-512
        (1, {1: 0.8, 8: 1.0, 64: 2.0, 512: 2.0}, True, False),
        (16, {1: 0.8, 8: 1.0, 64: 2.0, 512: 3.0}, None, True),
    ],
)
def test_where_each_gains_at_another_width_answers_as_long_as_their_prompts_decide(
    parallel: int, gains: Mapping[int, float], before: bool | None, wanted: bool
) -> None:
    by_tokens = {1: 10e9, 8: 3.2e9, 64: 1.4e9, 512: 0.23e9}
    plain, repacked = speeds(by_tokens), speeds({tokens: gain * by_tokens[tokens] for tokens, gain in gains.items()})
    assert is_repacking_worth_it(plain, repacked, [1, 512], before, parallel=parallel) is wanted


def test_without_figures_of_both_what_was_chosen_stays() -> None:
    some = speeds({1: 1.0})
    for plain, repacked in ((some, []), ([], some), (some, speeds({8: 9.0}))):
        assert is_repacking_worth_it(plain, repacked, [1]) is None
        assert is_repacking_worth_it(plain, repacked, [1], was_repacked=True) is True


@pytest.mark.parametrize(
    ("budget", "share"), [(0, 1.0), (24, 1.0), (26, 0.75), (51, 0.5), (70, 0.5), (99, 0.25), (200, 0.25)]
)
def test_what_streams_counts_in_quarters(budget: int, share: float) -> None:
    assert Streaming.under(budget, 100).share == share


def repacked(by_tokens: Mapping[int, float], repacked_bytes_per_s: float) -> list[KernelSpeed]:
    return [RepackedSpeed("Q4_0", 4096, tokens, 2, False, s, repacked_bytes_per_s) for tokens, s in by_tokens.items()]


@pytest.mark.parametrize(
    ("share", "drive_bytes_per_s", "repacked_bytes_per_s", "wanted"),
    [
        (1.0, None, 5e9, False),  # a token takes 0.3 s instead of 0.1 s
        (0.25, None, 50e9, True),
        (1.0, 3e9, 20e9, False),  # a token takes 0.38 s instead of 0.33 s
        (1.0, 1e9, 20e9, True),  # 1.05 s instead of 1.0 s, and prompts half
        (1.0, 1e9, 2e9, False),
    ],
)
def test_repacking_what_streams_takes_time_of_cores_and_readers(
    share: float, drive_bytes_per_s: float | None, repacked_bytes_per_s: float, wanted: bool
) -> None:
    streaming = Streaming(share, 1 / drive_bytes_per_s if drive_bytes_per_s else 0.0)
    kernels = speeds({1: 10e9, 512: 0.1e9}), repacked({1: 10e9, 512: 0.2e9}, repacked_bytes_per_s)
    plain, faster = ([streaming.speed(kernel) for kernel in some] for some in kernels)
    assert is_repacking_worth_it(plain, faster, [1, 512]) is wanted


def test_a_drive_that_makes_every_pass_wait_leaves_nothing_to_gain() -> None:
    streaming = Streaming(1.0, 1e-7)
    kernels = speeds({1: 10e9, 512: 0.1e9}), repacked({1: 10e9, 512: 0.2e9}, 20e9)
    plain, faster = ([streaming.speed(kernel) for kernel in some] for some in kernels)
    assert is_repacking_worth_it(plain, faster, [1, 512]) is False
