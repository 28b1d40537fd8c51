"""The lengths that a context may have by itself, from what a file says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from bench_samples import PLAN
from edge_run.base.results import PlanItem
from edge_run.base.units import MIB
from edge_run.runtime.planning.usual_context import _costs_nothing, rope_factors, usual_lengths
from edge_run.tiers.gguf import GgufModel


class _Tensor:
    def __init__(self, name: str) -> None:
        self.name = name


class _Header:
    """What of a model's header decides."""

    def __init__(self, trained: object, original: object = None, tensors: tuple[str, ...] = ()) -> None:
        self._values = {"context_length": trained, "rope.scaling.original_context_length": original}
        self.tensors = [_Tensor(name) for name in tensors]

    def value(self, suffix: str) -> object:
        return self._values[suffix]


def header(*facts: Any, **more: Any) -> GgufModel:
    return cast(GgufModel, _Header(*facts, **more))


FACTORS = ("blk.0.attn_norm.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@pytest.mark.parametrize(
    ("trained", "lengths"),
    [
        (2048, [2048]),
        (4096, [4096]),
        (32_768, [32_768, 16_384, 8192, 4096]),
        (40_960, [40_960, 20_480, 10_240, 5120, 4096]),
        (100_000, [100_000, 49_920, 24_832, 12_288, 6144, 4096]),
        (None, [4096]),
        (0, [4096]),
        (1 << 31, [4096]),
        (-5, [4096]),
    ],
)
def test_the_trained_length_is_halved_down_to_what_is_usual(trained: object, lengths: list[int]) -> None:
    assert usual_lengths(header(trained)) == lengths


@pytest.mark.parametrize(
    ("original", "lengths"),
    [(4096, [4096]), (8192, [8192, 4096]), (2000, [1792]), (200, [200]), (None, [16_384, 8192, 4096])],
)
def test_factors_do_not_change(original: object, lengths: list[int]) -> None:
    model = header(16_384, original, FACTORS)
    assert usual_lengths(model) == lengths
    assert {rope_factors(model, tokens) for tokens in lengths} == {"short"}
    assert rope_factors(model, 16_640) == "long"


def test_other_models_have_no_choice_of_factors() -> None:
    assert rope_factors(header(16_384, 4096, ("rope_freqs.weight",)), 16_384) == ""
    assert usual_lengths(header(16_384, 4096, ("rope_freqs.weight",))) == [16_384, 8192, 4096]


def test_a_length_whose_reserve_displaces_weights_costs_something() -> None:
    """As of models without keys and values, for which any length has room."""
    least = replace(PLAN, items=(PlanItem("reserve", 10 * MIB, ""),), budget_bytes=1024 * MIB)
    longer = replace(least, items=(PlanItem("reserve", 266 * MIB, ""),), context_tokens=1 << 20)
    assert _costs_nothing(replace(least, context_tokens=8192), least, 8192, 0, is_lent=True)
    assert not _costs_nothing(longer, least, 1 << 20, 0, is_lent=True)


def test_keys_and_values_that_are_not_lent_displace_weights_at_once() -> None:
    """As those of several texts with cells of their own."""
    least = replace(PLAN, items=(PlanItem("kv", 10 * MIB, ""),), budget_bytes=1024 * MIB)
    longer = replace(least, items=(PlanItem("kv", 266 * MIB, ""),), context_tokens=8192)
    assert _costs_nothing(longer, least, 8192, 0, is_lent=True)
    assert not _costs_nothing(longer, least, 8192, 0, is_lent=False)
