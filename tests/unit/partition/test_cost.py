"""From measured speeds to the seconds of a pass."""

from __future__ import annotations

import dataclasses

import pytest

from edge_run.base.profile import DeviceProfile, GpuProfile, KernelSpeed
from edge_run.partition.cost import (
    OP_OFFLOAD_TOKENS,
    AttentionWindow,
    CostModel,
    GpuWork,
    MatmulWork,
    PassWork,
    SharedCost,
)

KERNELS = (
    KernelSpeed("Q4_0", 4096, 1, 2, False, 10e9),
    KernelSpeed("Q4_0", 4096, 65, 2, False, 1e9),
    KernelSpeed("F16", 256, 1, 2, False, 20e9),
    KernelSpeed("F16", 256, 1, 2, True, 5e9),
)
PROFILE = DeviceProfile("", "", "", 2, 2, 1, 0, 1e-6, 1e-5, (1e9, 1e10), KERNELS, (), ())
COSTS = CostModel(PROFILE, 2)


def work(matmul: MatmulWork | None = None, **parts: float) -> PassWork:
    return PassWork(
        (matmul,) if matmul else (), *(int(parts.get(p, 0)) for p in ("nodes", "stops")), parts.get("flops", 0)
    )


def dense(n_bytes: float, type_name: str = "Q4_0", is_head: bool = False) -> MatmulWork:
    return MatmulWork(type_name, 4096, int(n_bytes), is_head=is_head)


def test_a_narrow_pass_costs_its_bytes() -> None:
    assert COSTS.compute_s(work(dense(5e9)), 1, 0) == pytest.approx(0.5)


def test_between_two_widths_the_time_is_a_straight_line_and_beyond_them_it_grows_with_the_tokens() -> None:
    one, middle, wide, wider = (COSTS.compute_s(work(dense(1e9)), tokens, 0) for tokens in (1, 33, 65, 130))
    assert (one, wide) == (pytest.approx(0.1), pytest.approx(1.0))
    assert middle == pytest.approx((one + wide) / 2)
    assert wider == pytest.approx(2 * wide)


def test_the_head_is_computed_for_the_outputs_only() -> None:
    head = work(dense(1e9, is_head=True))
    assert COSTS.compute_s(head, 65, 0, n_outputs=1) == pytest.approx(0.1)
    assert COSTS.compute_s(head, 65, 0, n_outputs=0) == 0


def test_an_moe_touches_the_experts_that_are_chosen() -> None:
    """Of 32 experts 4 are used by one token; many tokens use them all, each for its share of the tokens."""
    experts = work(MatmulWork("Q4_0", 4096, int(32e9), 32, 4))
    costs = CostModel(dataclasses.replace(PROFILE, kernels=KERNELS[:2]), 2)
    assert costs.compute_s(experts, 1, 0) == pytest.approx(0.4)
    many = costs.compute_s(experts, 65 * 8, 0)
    assert many == pytest.approx(costs.compute_s(work(dense(32e9)), 65, 0), rel=1e-6)


def test_experts_have_kernels_of_their_own() -> None:
    one = MatmulWork("F16", 256, int(8e9), 8, 4)
    assert COSTS.compute_s(work(one), 1, 0) == pytest.approx(4e9 / 5e9)
    assert COSTS.compute_s(work(one), 8, 0) == pytest.approx(8e9 * (1 - 0.5**8) / 5e9 * 8 * 0.5 / (1 - 0.5**8))


def test_attention_grows_with_what_came_before() -> None:
    near, far = (COSTS.compute_s(work(flops=1e6), 1, position) for position in (0, 999))
    assert (near, far) == (pytest.approx(1e6 / 1e9), pytest.approx(1e9 / 1e9))
    assert COSTS.compute_s(work(flops=1e6), 3, 0) == pytest.approx(6e6 / 1e9), "1 + 2 + 3 positions"


def test_attention_of_many_tokens_goes_by_tiles() -> None:
    speeds = {
        tokens: 1e6 * tokens * (tokens + 1) / 2 / COSTS.compute_s(work(flops=1e6), tokens, 0) for tokens in (63, 64)
    }
    assert speeds == {63: pytest.approx(1e9), 64: pytest.approx(1e10)}


def test_nodes_and_stops_cost_a_little() -> None:
    assert COSTS.compute_s(work(nodes=1000, stops=100), 1, 0) == pytest.approx(2e-3)


def test_what_was_not_measured_is_like_the_nearest_that_was() -> None:
    other_row = MatmulWork("Q4_0", 300, int(1e9))
    assert COSTS.compute_s(work(other_row), 1, 0) == COSTS.compute_s(work(dense(1e9)), 1, 0)
    other_type = MatmulWork("Q6_K", 5000, int(1e9))
    assert COSTS.compute_s(work(other_type), 1, 0) == COSTS.compute_s(work(dense(1e9)), 1, 0)


GPU = GpuProfile(
    "a GPU",
    "GPU0",
    1 << 33,
    1 << 33,
    "discrete",
    upload_bytes_per_s=4e9,
    kernels=(KernelSpeed("Q4_0", 4096, 1, 0, False, 2e11), KernelSpeed("Q4_0", 4096, 512, 0, False, 1e10)),
    node_s=1e-6,
    border_s=1e-4,
    attention_flops_per_s=(1e12, 1e13),
)
HERE = PassWork((MatmulWork("Q4_0", 4096, 10**9),), 0, 0, 0.0)
THERE = PassWork((MatmulWork("Q4_0", 4096, 4 * 10**9),), 100, 0, 1e9)


@pytest.mark.parametrize("has_op_offload", [False, True])
def test_the_processor_and_a_gpu_take_turns(has_op_offload: bool) -> None:
    """One token: what each has to compute, at its own speed, and two ways."""
    shared = SharedCost(PROFILE, 2, GPU, GpuWork(THERE, 2, has_op_offload))
    there_s = 4e9 / 2e11 + 100e-6 + 1e9 * 11 / 1e12
    assert shared.compute_s(HERE, 1, 10) == pytest.approx(COSTS.compute_s(HERE, 1, 10) + there_s + 2e-4)


def test_a_wide_pass_copies_what_is_not_on_the_gpu() -> None:
    """It costs the way there, and then what the GPU takes for it."""
    narrow, wide = (SharedCost(PROFILE, 2, GPU, GpuWork(THERE, 2, has_op_offload)) for has_op_offload in (False, True))
    there_s = 4e9 / 1e10 + 100e-6 + 1e9 * 512 * 513 / 2 / 1e13
    assert wide.compute_s(HERE, 512, 0) == pytest.approx(1e9 / 4e9 + 1e9 / 1e10 + there_s + 2e-4)
    assert narrow.compute_s(HERE, 512, 0) == pytest.approx(COSTS.compute_s(HERE, 512, 0) + there_s + 2e-4)
    assert wide.compute_s(HERE, OP_OFFLOAD_TOKENS - 1, 0) == narrow.compute_s(HERE, OP_OFFLOAD_TOKENS - 1, 0)


def test_attention_with_a_window_ends_at_it() -> None:
    """Three of four layers look at 100 positions."""
    whole = work(flops=1e6)
    windowed = dataclasses.replace(whole, window=AttentionWindow(100, 0.75))
    assert COSTS.compute_s(windowed, 1, 99) == COSTS.compute_s(whole, 1, 99)
    assert COSTS.compute_s(windowed, 1, 999) == pytest.approx((0.25 * 1000 + 0.75 * 100) * 1e6 / 1e9)
    pairs = 0.25 * (98 + 99 + 100 + 101 + 102) + 0.75 * (98 + 99 + 100 + 100 + 100)
    assert COSTS.compute_s(windowed, 5, 97) == pytest.approx(pairs * 1e6 / 1e9)
    assert COSTS.compute_s(windowed, 5, 500) == pytest.approx((0.25 * 5 * 503 + 0.75 * 500) * 1e6 / 1e9)
