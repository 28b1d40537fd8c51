"""From plans to seconds: what a token of a mixture of experts takes, with and without what an earlier run found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench_samples import PLAN, PROFILE
from edge_run.base.profile import RepackedSpeed
from edge_run.partition.cost import MatmulWork, PassWork, overlapped_s
from edge_run.runtime.forecasting.forecast import AHEAD_BYTES, PassTimes, pass_work, shared_work
from edge_run.runtime.forecasting.pass_bytes import PassBytes
from edge_run.runtime.forecasting.routing import PassSeen, Point
from edge_run.runtime.graph.nodes import Node, WeightRead
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_header import ArrayValue
from kit_models import KIT

DISK = PROFILE.disks[0]  # 1e9 bytes a second
WORK = PassWork((MatmulWork("Q4_0", 512, int(1e8), 32, 4),), 0, 0, 0.0)
COMPUTE_S = 0.0125  # an eighth of 0.1 s
MOE = replace(PLAN, expert_bytes=int(5e7), streamed_bytes_per_pass=int(2e7))


def token_s(*earlier: Point) -> float:
    times = PassTimes(MOE, WORK, PROFILE, DISK, 1, earlier)
    assert times.compute_s(1, 0) == pytest.approx(COMPUTE_S)
    return times.pass_s(1, 0, 1, is_first=False)


def test_without_an_earlier_run_reading_and_computing_take_turns() -> None:
    assert token_s() == pytest.approx(2e7 / 1e9 + COMPUTE_S, rel=0.01)


def tokens_seen(share: float, read_bytes: float, wait_s: float, beside_s: float = 0.0) -> Point:
    return Point(share, 0.5, PassSeen(1, read_bytes, COMPUTE_S + wait_s + beside_s, wait_s))


def test_a_token_waits_for_its_bytes_as_in_the_run_most_like_it() -> None:
    near, far = tokens_seen(0.5, 2.2e7, 0.044), tokens_seen(0.1, 9e7, 0.09)
    assert token_s(far, near) == pytest.approx(COMPUTE_S + 2e7 / 5e8)
    assert token_s(far) == pytest.approx(COMPUTE_S + 2e7 / 1e9)


def test_a_token_takes_as_long_to_choose_whatever_it_reads_and_the_rest_goes_with_bytes() -> None:
    """There, of 0.035 s beside computing and waiting for 0.04 GB, 0.005 s were choosing."""
    seen = tokens_seen(0.1, 4e7, 0.04, 0.035)
    point = seen._replace(token=seen.token._replace(choosing_s=0.005))
    assert token_s(point) == pytest.approx(COMPUTE_S + 0.02 + 0.005 + 0.015)


@pytest.mark.parametrize("seconds", [-COMPUTE_S / 2, 0.001, 60.0])
def test_what_this_drive_cannot_have_done_is_not_believed(seconds: float) -> None:
    assert token_s(tokens_seen(0.5, 2e7, seconds)) == token_s()


def test_the_first_pass_and_wide_ones_do_not_hang_on_what_tokens_read() -> None:
    known, unknown = (PassTimes(MOE, WORK, PROFILE, DISK, 1, e) for e in ([tokens_seen(0.5, 2e7, 0.04)], []))
    assert known.pass_s(1, 0, 1, is_first=True) == unknown.pass_s(1, 0, 1, is_first=True)
    assert known.pass_s(64, 0, 1, is_first=False) == unknown.pass_s(64, 0, 1, is_first=False)


def test_what_wide_passes_take_beside_is_taken_from_wide_ones() -> None:
    """There: 0.005 s for 0.01 GB, of which a half is for each pass."""
    plain = PassTimes(MOE, WORK, PROFILE, DISK, 1)
    compute_s, read_s = plain.compute_s(64, 0), plain._reading(64, 1, is_first=False).wall_s
    batch = PassSeen(64, 1e7, compute_s + 0.505, wait_s=0.5)
    times = PassTimes(MOE, WORK, PROFILE, DISK, 1, [tokens_seen(0.5, 2e7, 0.02)._replace(batch=batch)])
    assert read_s > 0
    assert times.pass_s(64, 0, 1, is_first=False) == pytest.approx(math.hypot(read_s, compute_s + 0.0025 + read_s / 4))


def test_a_limit_of_the_control_group_is_made_up_for() -> None:
    """It counts over some time, so what takes turns without one overlaps."""
    limited = replace(DISK, limit="254:0 1000000000 bps")
    seen = tokens_seen(0.5, 2e7, 0.0001, 0.02)
    for earlier, busy_s in ([], COMPUTE_S), ([seen], COMPUTE_S + 0.02):
        times = PassTimes(MOE, WORK, PROFILE, limited, 1, earlier)
        token_s = times.pass_s(1, 0, 1, is_first=False)
        assert max(0.02, busy_s) < token_s < 1.2 * max(0.02, busy_s)


def test_reading_and_computing_overlap_where_most_experts_are_used_anyway() -> None:
    def pass_s(tokens: int) -> tuple[float, float, float]:
        reading = times._reading(tokens, 1, is_first=False)
        return reading.wall_s, times.compute_s(tokens, 0), times.pass_s(tokens, 0, 1, is_first=False)

    times = PassTimes(MOE, WORK, PROFILE, DISK, 1, ())
    read_s, compute_s, few_s = pass_s(8)  # of 32 experts some 21
    assert few_s == pytest.approx(read_s + compute_s, rel=0.01)
    read_s, compute_s, many_s = pass_s(64)
    assert max(read_s, compute_s) < many_s < 0.95 * (read_s + compute_s)


def read_s(plan_bytes: float, tokens: int, work: PassWork) -> float:
    plan = replace(MOE, expert_bytes=int(plan_bytes))
    return PassTimes(plan, work, PROFILE, DISK, 1)._reading(tokens, 1, is_first=False).wall_s


def test_a_prompt_uses_few_experts_after_the_choice_of_outputs_and_reads_nothing_again_where_the_others_fit() -> None:
    """Of the last of six layers only the last token goes on. What passes through takes room where it is not there."""
    matmuls = (MatmulWork("Q4_0", 512, int(1e8), 32, 4), MatmulWork("Q4_0", 512, int(2e7), 32, 4, is_head=True))
    work = PassWork(matmuls, 0, 0, 0.0, expert_tensor_bytes=int(1e7))
    assert read_s(1.2e8, 1000, work) == 0.0
    assert read_s(1.05e8, 1000, work) == pytest.approx(2e7 / 8 * 0.75 / 1e9)
    assert read_s(0.9e8, 1000, work) == pytest.approx((1e7 / (1 - 0.2) + 2e7 / 8) / 1e9)
    assert read_s(1.5e7, 1000, work) == pytest.approx((8.5e7 / (1 - 0.1) + 2e7 / 8) / 1e9)


def first_s(*earlier: Point) -> float:
    return PassTimes(MOE, WORK, PROFILE, DISK, 1, earlier)._reading(1000, 1, is_first=True).wall_s


def first_seen(room_share: float, busy_s: float) -> Point:
    return Point(room_share, 0.5, PassSeen(), first=PassSeen(1000, 1e8, busy_s=busy_s))


def test_new_memory_is_as_fast_as_in_the_run_most_like_this() -> None:
    """Of 0.1 GB of experts half have room; the pinned share of the model is read into new memory too."""
    used_s, new_bytes = 5e7 / 1e9, MOE.pinned_bytes + 5e7
    assert first_s() == pytest.approx(new_bytes / DISK.first_use_bytes_per_s + used_s)
    near, far = first_seen(0.4, 4e7 / 8e8 + 6e7 / 1e9), first_seen(0.1, 1e7 / 3e8 + 9e7 / 1e9)
    assert first_s(far, near) == pytest.approx(new_bytes / 8e8 + used_s)
    for point in (tokens_seen(0.5, 2e7, 0.02), first_seen(0.4, 50.0), first_seen(0.4, 0.06)):
        assert first_s(point) == first_s()


def test_what_a_gpu_has_is_counted_there_and_nothing_twice() -> None:
    """The last two of four layers; a node without weights is where the last one with some was."""
    gguf = read_gguf(KIT)
    graph = tuple(
        Node(name.encode(), op, tuple(WeightRead(weight, 0, 1) for weight in weights), True)
        for layer in range(4)
        for name, op, weights in (
            (f"norm-{layer}", "MUL", (f"blk.{layer}.attn_norm.weight",)),
            (f"q-{layer}", "MUL_MAT", (f"blk.{layer}.attn_q.weight",)),
            (f"attention-{layer}", "FLASH_ATTN_EXT", ()),
            (f"down-{layer}", "MUL_MAT", (f"blk.{layer}.ffn_down.weight",)),
        )
    )
    names = {tensor.name for tensor in gguf.tensors if tensor.name.startswith(("blk.2.", "blk.3."))}
    here, there = shared_work(gguf, graph, 5, names, has_op_offload=True)
    whole = pass_work(gguf, graph, 5)
    assert (there.n_borders, there.has_op_offload) == (1, True)
    assert (here.n_stops, there.work.n_stops) == (5, 0)
    assert here.n_nodes == there.work.n_nodes == whole.n_nodes / 2
    assert here.attention_flops == there.work.attention_flops == whole.attention_flops / 2 > 0
    sizes = [sum(matmul.size_bytes for matmul in work.matmuls) for work in (here, there.work, whole)]
    assert sizes[0] + sizes[1] == sizes[2]
    assert sizes[0] > 0
    assert sizes[1] > 0
    narrow = {name for name in names if "ffn" not in name}
    assert shared_work(gguf, graph, 5, narrow, has_op_offload=False)[1].n_borders == 4


@pytest.mark.parametrize("idle_cores", [0, 1])
def test_readers_that_repack_take_time_from_computing_and_from_reading(idle_cores: int) -> None:
    """Half of what streams is repacked; the device has eight cores. With an idle one they repack beside reading."""
    work = PassWork((MatmulWork("Q4_0", 512, int(1e8)), MatmulWork("F16", 512, int(1e8))), 0, 0, 0.0)
    plan, read_s = replace(PLAN, repacked=("Q4_0/512",)), PLAN.streamed_bytes_per_pass / 1e9

    def times(repacked_bytes_per_s: float) -> PassTimes:
        speed = RepackedSpeed("Q4_0", 512, 1, 1, False, 1e9, repacked_bytes_per_s)
        profile = replace(PROFILE, repacked_kernels=(speed,))
        return PassTimes(plan, work, profile, DISK, PROFILE.logical_cores - idle_cores)

    beside_s = times(math.inf)._reading(1, 1, is_first=False).cpu_s
    for repacked_bytes_per_s in (5e9, 1e7):
        reading = times(repacked_bytes_per_s)._reading(1, 1, is_first=False)
        repack_s = read_s * 1e9 / 2 / repacked_bytes_per_s
        assert reading.cpu_s == pytest.approx(beside_s + repack_s)
        assert reading.wall_s == pytest.approx(read_s + repack_s / (plan.readers if idle_cores else 1))
        pass_s, compute_s = (times(repacked_bytes_per_s).pass_s(1, 0, 1, is_first=False), 0.2)
        busy_s = compute_s + (0.0 if idle_cores else min(reading.cpu_s, reading.wall_s))
        assert pass_s == pytest.approx(overlapped_s(reading.wall_s, busy_s), rel=0.01)


def test_repacking_counts_once_where_nothing_overlaps() -> None:
    work = PassWork((MatmulWork("Q4_0", 512, int(1e8)),), 0, 0, 0.0)
    plan = replace(PLAN, repacked=("Q4_0/512",), model_bytes=PLAN.streamed_bytes_per_pass, window_bytes=AHEAD_BYTES - 1)
    speeds = (math.inf, 5e9)
    kernels = [(RepackedSpeed("Q4_0", 512, 1, 1, False, 1e9, speed),) for speed in speeds]
    free_s, counted_s = (
        PassTimes(plan, work, replace(PROFILE, repacked_kernels=some), DISK, PROFILE.logical_cores).pass_s(
            1, 0, 1, is_first=False
        )
        for some in kernels
    )
    assert counted_s - free_s == pytest.approx(PLAN.streamed_bytes_per_pass / 5e9)


def test_through_a_window_of_less_than_two_segments_nothing_is_read_ahead() -> None:
    work = replace(WORK, matmuls=(replace(WORK.matmuls[0], n_experts=0, n_used=0),))
    plan = replace(PLAN, model_bytes=PLAN.streamed_bytes_per_pass)
    wide, narrow = (
        PassTimes(replace(plan, window_bytes=size), work, PROFILE, DISK, 1) for size in (AHEAD_BYTES, AHEAD_BYTES - 1)
    )
    compute_s = wide.compute_s(1, 0)
    assert wide.pass_s(1, 0, 1, is_first=False) == pytest.approx(overlapped_s(wide.read_s, compute_s), rel=0.01)
    assert narrow.pass_s(1, 0, 1, is_first=False) == pytest.approx(narrow.read_s + compute_s, rel=0.01)
    for few in (replace(plan, window_bytes=AHEAD_BYTES // 2, model_bytes=3 * plan.model_bytes),  # of a segment stream
                replace(plan, window_bytes=0, spilled_kv_bytes=1)):  # fmt: skip
        times = PassTimes(few, work, PROFILE, DISK, 1)
        assert times.pass_s(1, 0, 1, is_first=False) == pytest.approx(overlapped_s(times.read_s, compute_s), rel=0.01)
    small = PassTimes(replace(PLAN, window_bytes=8, streamed_bytes_per_pass=8), work, PROFILE, DISK, 1)
    assert small.pass_s(1, 0, 1, is_first=False) == pytest.approx(compute_s, rel=0.01), "all that streams has room"


def test_the_first_pass_reads_no_table_of_which_it_needs_rows() -> None:
    """More than half of such a model's file may be one."""
    plan = replace(PLAN, model_bytes=int(3e9), pinned_bytes=int(5e8), window_bytes=int(1e8), lent_bytes=int(1e8),
                   streamed_bytes_per_pass=int(5e8))  # fmt: skip
    assert PassBytes(plan, WORK).at_first(1, 1) == (int(6e8), int(5e8))
    assert sum(PassBytes(PLAN, WORK).at_first(1, 1)) == PLAN.model_bytes


def test_attention_whose_heads_differ_by_layer_is_that_of_the_most() -> None:
    gguf = read_gguf(KIT)
    graph = [Node(f"attention-{layer}".encode(), "FLASH_ATTN_EXT", (), True) for layer in range(3)]
    heads, key = gguf.value("attention.head_count"), f"{gguf.architecture}.attention.head_count"
    assert isinstance(heads, int)
    listed = replace(gguf, metadata={**gguf.metadata, key: ArrayValue(5, 4, heads)})
    assert pass_work(listed, graph, 0).attention_flops == pass_work(gguf, graph, 0).attention_flops > 0
