"""What goes to the GPU first, and how much of it fits."""

from __future__ import annotations

import itertools
import re

import pytest

from edge_run import BudgetError
from edge_run.base.units import MIB
from edge_run.partition.placement import NOTHING, Placement, best_placement, has_biased_experts, placements

ATTENTION = ("attn_norm.weight", "attn_q.weight", "attn_output.weight", "ffn_norm.weight")
FEED = ("ffn_up.weight", "ffn_gate.weight", "ffn_down.weight")
EXPERTS = ("ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight", "ffn_down_exps.bias")
SHARED = ("ffn_gate_inp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight")


def names(n_layers: int, *parts: str) -> list[str]:
    layers = [f"blk.{layer}.{part}" for layer in range(n_layers) for part in (*ATTENTION, *parts)]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *layers]


def on_gpu(placement: Placement, tensors: list[str], n_layers: int) -> set[str]:
    """What llama.cpp would put there: the output, then the last layers, less what the patterns keep."""
    first = n_layers + 1 - placement.n_layers
    there = set()
    for name in tensors:
        layer = re.match(r"blk\.(\d+)\.", name)
        is_in = int(layer[1]) >= first if layer else name.startswith("output") and placement.n_layers > 0
        if is_in and not any(re.search(pattern, name) for pattern in placement.host_patterns):
            there.add(name)
    return there


@pytest.mark.parametrize(
    "parts", [FEED, (*EXPERTS, *SHARED), ()], ids=["dense", "moe", "without a feed-forward network"]
)
def test_each_placement_holds_all_of_the_one_before_and_more(parts: tuple[str, ...]) -> None:
    tensors = names(4, *parts)
    steps = [on_gpu(placement, tensors, 4) for placement in placements(tensors, 4)]
    assert steps[0] == set()
    assert steps[-1] == set(tensors) - {"token_embd.weight"}
    assert all(now < after for now, after in itertools.pairwise(steps))


def test_a_dense_model_goes_layer_by_layer_attention_before_the_rest() -> None:
    tensors = names(3, *FEED)
    found = placements(tensors, 3)
    assert [(one.n_layers, one.n_narrow) for one in found] == [
        (0, 0), (1, 0), (2, 1), (2, 0), (3, 1), (3, 0), (4, 1), (4, 0)
    ]  # fmt: skip
    kept = on_gpu(found[3], tensors, 3) ^ on_gpu(found[2], tensors, 3)
    assert kept == {f"blk.2.{name}" for name in FEED}


def test_experts_that_may_not_be_there_stay_in_memory() -> None:
    tensors = names(3, *EXPERTS, *SHARED)
    assert has_biased_experts(tensors)
    assert not has_biased_experts(names(3, *EXPERTS[:3], *SHARED, "ffn_gate_inp.bias"))
    found = placements(tensors, 3, may_hold_experts=False)
    assert found == placements(tensors, 3)[: len(found)]
    assert not any("exps" in name for name in on_gpu(found[-1], tensors, 3))
    assert "blk.0.attn_q.weight" in on_gpu(found[-1], tensors, 3)


def test_the_experts_of_an_moe_come_after_all_else() -> None:
    tensors = names(3, *EXPERTS, *SHARED)
    found = placements(tensors, 3)
    experts = [sum("_exps." in name for name in on_gpu(one, tensors, 3)) for one in found]
    assert [(one.n_layers, one.n_narrow) for one in found] == [
        (0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (4, 2), (4, 1), (4, 0)
    ]  # fmt: skip
    assert experts == [0, 0, 0, 0, 0, 4, 8, 12]
    assert on_gpu(found[4], tensors, 3) == {n for n in tensors if "_exps." not in n and n != "token_embd.weight"}


def test_layers_without_experts_in_an_moe_are_as_narrow_as_whole() -> None:
    tensors = [name for name in names(3, *EXPERTS) if not ("blk.0" in name and "_exps" in name)]
    steps = [on_gpu(placement, tensors, 3) for placement in placements(tensors, 3)]
    assert all(now < after for now, after in itertools.pairwise(steps))


@pytest.mark.parametrize("budget", [0, 99, 100, 101, 350, 799, 800, 5000])
def test_the_last_that_fits_is_taken(budget: int) -> None:
    choices = [NOTHING, *(Placement(n, 0) for n in range(1, 9))]
    found = best_placement(choices, budget, lambda one: 100 * one.n_layers, is_asked=False)
    assert found.n_layers == min(8, budget // 100)


def test_a_refusal_names_what_works() -> None:
    choices = [NOTHING, *(Placement(n, 0) for n in range(1, 9))]

    def needed(one: Placement) -> int:
        return 10 * MIB * one.n_layers

    with pytest.raises(BudgetError, match=r"GPU memory 3 MiB: .* at least 10 MiB; raise gpu_memory=") as caught:
        best_placement(choices, 3 * MIB, needed, is_asked=True)
    minimum = caught.value.minimum_bytes
    assert best_placement(choices, minimum, needed, is_asked=True).n_layers == 1
    assert best_placement(choices, 3 * MIB, needed, is_asked=False) == NOTHING
