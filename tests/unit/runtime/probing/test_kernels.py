"""Speeds of llama.cpp's kernels: figures that can be, of what was asked for, with nothing left behind."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported
from edge_run.base.units import MIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.llama import _ggml
from edge_run.runtime.probing import kernels, workbench
from edge_run.runtime.probing import probe as probing
from edge_run.runtime.probing.workbench import GpuBench
from edge_run.runtime.probing.workload import AttentionShape
from edge_run.tiers.gguf_format import F32, TENSOR_TYPES
from waiting import until

WEIGHT_TYPES = [kind.name for kind in TENSOR_TYPES.values() if kind.name not in kernels.NO_KERNEL]


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NARROW_BYTES", 4 * MIB)
    monkeypatch.setattr(kernels, "BATCH_BYTES", MIB)
    monkeypatch.setattr(kernels, "CACHE_MULTIPLE", 0)
    monkeypatch.setattr(workbench, "ENOUGH_S", 0.02)


def test_a_wide_pass_takes_longer_and_each_token_in_it_less() -> None:
    one, many = (kernels.measure_matmul("F16", 1024, tokens, 1) for tokens in (1, 64))
    assert (many.type_name, many.row_elements, many.tokens, many.threads) == ("F16", 1024, 64, 1)
    fastest = {1: one.bytes_per_s, 64: many.bytes_per_s}

    def is_seen() -> bool:
        """By the fastest measurements: others want the cores too, in some for all their time."""
        for tokens, before in fastest.items():
            fastest[tokens] = max(before, kernels.measure_matmul("F16", 1024, tokens, 1).bytes_per_s)
        return fastest[1] > fastest[64] > fastest[1] / 64

    until(is_seen)


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_every_type_of_weights_is_multiplied(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NARROW_BYTES", 1)
    monkeypatch.setattr(workbench, "ENOUGH_S", 0.0)
    assert 1e6 < kernels.measure_matmul(type_name, 256, 2, 1).bytes_per_s < 1e12


@pytest.mark.parametrize("type_name", ["I32", "Q8_K", "Q9_9"])
def test_what_is_no_type_of_weights_is_refused(type_name: str) -> None:
    with pytest.raises(NotSupported, match=type_name):
        kernels.measure_matmul(type_name, 256, 1, 1)


@pytest.mark.parametrize(("elements", "tokens", "threads"), [(320, 1, 1), (0, 1, 1), (256, 0, 1), (256, 1, 0)])
def test_impossible_figures_are_refused(elements: int, tokens: int, threads: int) -> None:
    with pytest.raises(ConfigError):
        kernels.measure_matmul("Q4_K", elements, tokens, threads)


def test_rows_that_fill_more_than_the_weights_are_meant_to_take() -> None:
    assert 1e6 < kernels.measure_matmul("F16", 65_536, 1, 1).bytes_per_s < 1e12


@pytest.mark.parametrize(("tokens", "types"), [(1, ("f16", "f16")), (33, ("f16", "f16")), (1, ("f32", "f32"))])
def test_attention(tokens: int, types: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "MIN_ARENA_BYTES", 0)
    assert 1e6 < kernels.measure_attention(tokens, AttentionShape(512, 64, 8, 2), 1, types=types) < 1e13


def test_a_clock_that_stands_still_gives_a_speed_that_can_be_kept() -> None:
    assert kernels._repack_s(cast(Any, None), [], "Q4_0", by_expert=False) > 0


def test_a_node_costs_less_than_a_millisecond() -> None:
    assert 1e-9 < kernels.measure_node_s(1) < 1e-3


def test_memory_is_given_back() -> None:
    def measure_all() -> None:
        kernels.measure_matmul("F16", 4096, 1, 1)
        kernels.measure_attention(2, AttentionShape(2048, 64, 8, 8), 1)
        kernels.measure_node_s(1)

    measure_all()  # some memory ggml takes once for the process
    before = process_memory()
    for _ in range(5):
        measure_all()
    after = process_memory()
    assert after.data_bytes - before.data_bytes < workbench.MIN_ARENA_BYTES / 8
    assert after.resident_bytes - before.resident_bytes < 4 * MIB / 2  # half of the smallest weights


def test_the_graph_computes_what_it_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the last matrix, against NumPy."""
    products = []
    free = workbench.Workbench.free

    def look_and_free(bench: workbench.Workbench) -> None:
        used = bench._arena[: bench._used_bytes].view(np.float32)
        products.append((used[: 128 * 64].reshape(128, 64).copy(), used[-2 * 128 :].reshape(2, 128).copy()))
        free(bench)

    monkeypatch.setattr(workbench.Workbench, "free", look_and_free)
    monkeypatch.setattr(kernels, "NARROW_BYTES", 1)
    kernels.measure_matmul("F32", 64, 2, 1)
    weights, product = products[0]
    pattern = kernels._pattern(F32).view(np.float32)
    expected = np.resize(pattern, 2 * 64).reshape(2, 64) @ weights.T
    assert np.all(np.isfinite(product))
    assert np.abs(product - expected).max() < 1e-3 * math.sqrt(64)


def test_patterns_hold_no_zero_or_denormal_scale() -> None:
    scales = kernels._pattern(_ggml.TYPE_IDS["q8_0"]).reshape(-1, 34)[:, :2].copy().view(np.float16)
    assert np.all(scales >= np.finfo(np.float16).smallest_normal)


@pytest.mark.parametrize("type_name", sorted({*WEIGHT_TYPES} - {"Q1_0", "Q2_0"}))  # those the gguf package lacks
def test_what_patterns_stand_for_is_plausible(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    values = gguf.quants.dequantize(kernels._pattern(kind.value), kind)
    assert np.all(np.isfinite(values))
    assert 1e-3 < np.abs(values).mean() < 10


@pytest.mark.parametrize(
    ("available", "budget", "wanted"),
    [
        (1 << 40, None, 3 << 30),  # three times the caches
        (256 * MIB, None, 48 * MIB),
        (1 << 40, 256 * MIB, 48 * MIB),
        (10 * MIB, None, MIB),  # there is no room
    ],
)
def test_a_pass_goes_through_a_part_of_the_room(
    available: int, budget: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU only where it shares the machine's memory; what the caches would hold is known as such."""
    monkeypatch.setattr(kernels, "CACHE_MULTIPLE", 3)
    monkeypatch.setattr(kernels, "last_cache_bytes", lambda: 1 << 30)
    monkeypatch.setattr(kernels, "available_bytes", lambda: available)
    monkeypatch.setattr(kernels, "process_memory", lambda: SimpleNamespace(resident_bytes=50 * MIB))
    assert kernels.narrow_bytes(budget) == wanted
    for gpu, on_gpu in (
        (GpuBench(1, True), 3 << 30),
        (GpuBench(1, False), wanted),
        (GpuBench(1, False, 4), wanted // 4),
    ):
        assert kernels._pass_bytes(1, gpu, budget) == on_gpu
        assert kernels._pass_bytes(64, gpu, budget) == MIB // gpu.slowness
    for memory, limit, is_short in ((1 << 40, 0, True), (1 << 40, 256 * MIB, False), (256 * MIB, 0, False)):
        machine = SimpleNamespace(memory_bytes=memory, memory_limit_bytes=limit)
        monkeypatch.setattr(kernels, "describe_machine", lambda machine=machine: machine)
        assert kernels.lacks_room(1) == (is_short and available < 1 << 40), "there could be more"
        assert not kernels.lacks_room(64)


def test_memory_of_a_measurement_is_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = []
    usual = kernels.workbench

    def look(threads: int, arena_bytes: int, *rest: Any) -> Any:
        arenas.append(arena_bytes)
        return usual(threads, arena_bytes, *rest)

    monkeypatch.setattr(kernels, "workbench", look)
    monkeypatch.setattr(kernels, "CACHE_MULTIPLE", 3)
    monkeypatch.setattr(kernels, "last_cache_bytes", lambda: 1 << 30)
    budget = process_memory().resident_bytes + 64 * MIB
    kernels.measure_attention(1, AttentionShape(1024, 128, 8, 8), 1, budget_bytes=budget)
    monkeypatch.setattr(kernels, "available_bytes", lambda: budget)
    kernels.measure_matmul("F16", 1024, 1, 1)
    assert max(arenas) < 20 * MIB


def test_the_last_cache_counts_every_part_once(tmp_path: Path) -> None:
    def cache(cpu: int, index: int, level: int, shared: str, size: str) -> None:
        folder = tmp_path / f"cpu{cpu}/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("shared_cpu_list", shared), ("size", size)):
            (folder / name).write_text(f"{text}\n")

    for cpu in range(4):
        cache(cpu, 0, 1, str(cpu), "32K")
        cache(cpu, 3, 3, "0-1" if cpu < 2 else "2-3", "16384K")
    (tmp_path / "cpu9/cache/index0").mkdir(parents=True)
    assert kernels.last_cache_bytes(tmp_path, range(10)) == 32 * MIB
    assert kernels.last_cache_bytes(tmp_path, [2]) == 16 * MIB, "those of others are none of ours"
    assert kernels.last_cache_bytes(tmp_path / "nowhere", range(10)) == 0


def test_a_drive_that_the_system_does_not_describe_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(probing, "find_mount", refuse)
    with pytest.raises(EdgeRunError, match="Permission denied"):
        probing.probe([tmp_path], config=ModelConfig(cache_folder=tmp_path))


def test_graphs_are_computed_in_turn() -> None:
    """A device that becomes slower becomes so for both."""
    computed: list[str] = []

    class Bench:
        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def compute_s(self) -> float:
            computed.append(self.name)
            return self.seconds

    quick, slow = cast("workbench.Workbench", Bench("quick", 0.02)), cast("workbench.Workbench", Bench("slow", 0.04))
    assert workbench.measure_in_turn(quick, slow) == [0.02, 0.04]
    assert computed == ["quick", "slow"] * (1 + workbench.MIN_REPETITIONS)


def test_a_graph_that_takes_long_is_computed_once() -> None:
    bench = SimpleNamespace(compute_s=iter([0.5]).__next__)
    assert workbench.measure_in_turn(cast("workbench.Workbench", bench)) == [0.5]
