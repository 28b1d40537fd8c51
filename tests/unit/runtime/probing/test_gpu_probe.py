"""What is measured of a GPU, and what of it is known already; without a GPU, whose kernels are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import KernelError, NotSupported
from edge_run.base.profile import KernelSpeed
from edge_run.base.units import GIB
from edge_run.devices.host.profile import MeasuredSetup, Measurements, ProfileStore
from edge_run.runtime.gpu import devices
from edge_run.runtime.gpu.devices import DISCRETE, INTEGRATED, SOFTWARE, Gpu
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.probing import gpu_probe
from edge_run.runtime.probing.gpu_probe import gpu_profile, is_known, measure_gpu, missing_of
from edge_run.runtime.probing.probe import DISTURBED, probe, recall
from edge_run.runtime.probing.workbench import GpuBench
from edge_run.tiers.gguf import read_gguf
from kit_models import KIT
from known_device import know_device

REAL = Gpu(1, "GPU0", "a GPU", DISCRETE, 8 * GIB, 7 * GIB)
PLAYED = replace(REAL, kind=SOFTWARE, description="llvmpipe")
WANTED = [("Q4_0", 4096, 1, False), ("Q4_0", 4096, 512, False), ("IQ1_M", 4096, 1, True)]


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> list[GpuBench]:
    """The benches that kernels were measured on."""
    used: list[GpuBench] = []

    def measure_matmul(
        name: str, row_elements: int, tokens: int, threads: int, by_expert: bool, gpu: GpuBench
    ) -> KernelSpeed:
        used.append(gpu)
        if name == "IQ1_M":
            raise NotSupported("no such kernel")
        return KernelSpeed(name, row_elements, tokens, threads, by_expert, 1e11 / tokens)

    monkeypatch.setattr(gpu_probe.kernels, "measure_matmul", measure_matmul)
    monkeypatch.setattr(gpu_probe.kernels, "measure_attention", lambda tokens, shape, **_: 1e12 * tokens)
    monkeypatch.setattr(gpu_probe.kernels, "measure_node_s", lambda threads, gpu: 2e-6)
    monkeypatch.setattr(gpu_probe, "measure_upload", lambda gpu: 5e9)
    monkeypatch.setattr(gpu_probe, "measure_border_s", lambda gpu: 3e-5)
    return used


def measured(gpu: Gpu, wanted: list[Any], known: Measurements | None = None) -> Measurements:
    """All that is known after measuring."""
    found = [known or Measurements()]
    measure_gpu(gpu, wanted, found[0], lambda more: found.append(found[-1].with_later(more)), lambda text: None)
    return found[-1]


def test_all_that_a_model_needs_is_measured_once(benches: list[GpuBench]) -> None:
    assert not is_known(REAL, WANTED, Measurements())
    known = measured(REAL, WANTED)
    assert is_known(REAL, WANTED, known)
    assert benches == [GpuBench(1, has_own_memory=True)] * 3
    assert measured(REAL, WANTED, known) == known
    assert len(benches) == 3
    assert missing_of(REAL, [("F16", 4096, 1, False)], known) == [("F16", 4096, 1, False)]
    assert not is_known(PLAYED, WANTED, known), "another GPU"


def test_a_profile_names_kernels_that_are_there_and_what_a_pass_costs() -> None:
    profile = gpu_profile(REAL, measured(REAL, WANTED), 1.0)
    assert [(kernel.type_name, kernel.tokens, kernel.threads) for kernel in profile.kernels] == [
        ("Q4_0", 1, 0),
        ("Q4_0", 512, 0),
    ]
    assert (profile.upload_bytes_per_s, profile.node_s, profile.border_s) == (5e9, 2e-6, 3e-5)
    assert profile.attention_flops_per_s == (1e12, 512e12)
    unknown = gpu_profile(REAL, Measurements(), 1.0)
    assert (unknown.kernels, unknown.upload_bytes_per_s, unknown.node_s) == ((), 1.0, 0.0)


def test_a_gpu_that_the_processor_plays_is_given_less_to_do(benches: list[GpuBench]) -> None:
    known = measured(PLAYED, WANTED)
    assert is_known(PLAYED, WANTED, known), "not so wide as others"
    assert [figure.speed.tokens for figure in known.gpu_kernels] == [1, 1]
    assert {bench.slowness for bench in benches} == {gpu_probe.SLOWNESS}


@pytest.mark.parametrize(("kind", "is_disturbed"), [(DISCRETE, [False] * 4), (INTEGRATED, [True, False, True, True])])
def test_the_machines_memory_is_short(kind: str, is_disturbed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing of a GPU with memory of its own, and of a wide pass."""
    monkeypatch.setattr(gpu_probe.kernels, "lacks_room", lambda tokens: tokens == 1)
    known = measured(replace(REAL, kind=kind), WANTED)
    assert [figure.is_disturbed for figure in (*known.gpu_kernels, *known.gpu_costs)] == is_disturbed


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    store, identity = ProfileStore(tmp_path), MeasuredSetup("cpu", "x86_64", 2, 2.0, "llama-cpp-python 0")
    known = measured(REAL, WANTED)
    assert store.save(identity, known)
    assert store.load(identity) == known


@pytest.mark.parametrize(("kind", "problem"), [(DISCRETE, ""), (INTEGRATED, DISTURBED)])
def test_a_probe_tells_that_the_figures_of_a_gpu_are_wrong(
    kind: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_device(tmp_path, KIT)
    monkeypatch.setattr(devices, "find_gpus", lambda: [replace(REAL, kind=kind)])
    monkeypatch.setattr(devices, "measure_upload", lambda gpu: pytest.fail("its costs say it"))
    monkeypatch.setattr(gpu_probe.kernels, "lacks_room", lambda tokens: True)
    monkeypatch.setattr(gpu_probe, "measured_now", lambda: "2026-01-02T03:04:05+00:00")
    store = ProfileStore(tmp_path)
    found = probe(model=KIT, config=ModelConfig(cache_folder=tmp_path), store=store)
    (gpu,) = found.gpus
    assert gpu.kernels
    assert (store.problem, found.is_disturbed) == (problem, bool(problem))
    assert found.measured_at == "2026-01-02T03:04:05+00:00", "as old as the oldest figure"
    without = recall(read_gguf(KIT), ModelConfig(gpu_memory=0, cache_folder=tmp_path))
    assert without
    assert not without.is_disturbed, "nothing of the GPU is in it"


def test_gpus_whose_memory_others_take_are_noted_and_all_else_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first some kernels were measured while there was room: not enough to time a pass."""

    def refuse(*given: object, **named: object) -> None:
        raise KernelError("the GPU has no 9 bytes free; end what uses it")

    know_device(tmp_path, KIT)
    monkeypatch.setattr(devices, "find_gpus", lambda: [REAL, replace(REAL, name="GPU1", description="another GPU")])
    monkeypatch.setattr(devices, "measure_upload", refuse)
    monkeypatch.setattr(gpu_probe.kernels, "measure_attention", refuse)
    store = ProfileStore(tmp_path)
    found = probe(model=KIT, config=ModelConfig(cache_folder=tmp_path), store=store)
    assert found.kernels
    assert [bool(gpu.kernels) for gpu in found.gpus] == [True, False]
    why = "was not measured: the GPU has no 9 bytes free; end what uses it"
    assert store.problem == f"GPU0 {why}; GPU1 {why}"
    planner: Any = SimpleNamespace(offload=SimpleNamespace(gpu=REAL))
    assert Planner._gpu_of(planner, found) is None
    assert Planner._gpu_of(planner, replace(found, gpus=(replace(found.gpus[0], node_s=1e-6),)))
