"""Which GPU is used, and how much of it: what llama.cpp offers is made up here."""

from __future__ import annotations

import pytest

from edge_run import ConfigError
from edge_run.base.units import GIB, MIB
from edge_run.runtime import gpus
from edge_run.runtime._ggml import GpuDevice
from edge_run.runtime.gpus import DISCRETE, INTEGRATED, SOFTWARE, Gpu, choose_gpu

LARGE = Gpu(1, "CUDA1", "GeForce", DISCRETE, 8 * GIB, 7 * GIB)
SOFT = Gpu(3, "Vulkan0", "llvmpipe (LLVM 15.0.6, 256 bits)", SOFTWARE, 8 * GIB, 8 * GIB)


def test_those_with_most_memory_of_their_own_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        GpuDevice(1, "llvmpipe (LLVM 15.0.6, 256 bits)", "Vulkan0", True, 64 * GIB, 64 * GIB),
        GpuDevice(2, "Radeon Graphics", "Vulkan1", False, 16 * GIB, 16 * GIB),
        GpuDevice(3, "GeForce", "CUDA0", True, 8 * GIB, 2 * GIB),
        GpuDevice(4, "GeForce", "CUDA1", True, 8 * GIB, 7 * GIB),
    ]
    monkeypatch.setattr(gpus.ggml, "gpu_devices", lambda: devices)
    found = gpus.find_gpus()
    assert [gpu.handle for gpu in found] == [4, 3, 2, 1]
    assert [gpu.kind for gpu in found] == [DISCRETE, DISCRETE, INTEGRATED, SOFTWARE]


def test_what_is_free_less_a_margin_is_taken() -> None:
    assert choose_gpu(None, [LARGE]) == (LARGE, 7 * GIB - int(8 * GIB * gpus.MARGIN_SHARE))
    assert choose_gpu(3 * GIB, [LARGE]) == (LARGE, 3 * GIB)
    assert choose_gpu(0, [LARGE]) is None


def test_a_software_renderer_is_used_where_it_is_asked_for() -> None:
    assert choose_gpu(None, [SOFT]) is None
    assert choose_gpu(64 * MIB, [SOFT]) == (SOFT, 64 * MIB)


def test_without_a_gpu() -> None:
    assert choose_gpu(None, []) is None
    assert choose_gpu(0, []) is None
    with pytest.raises(ConfigError, match="no GPU here"):
        choose_gpu(1 * GIB, [])


def test_a_full_gpu_is_not_used() -> None:
    assert choose_gpu(None, [Gpu(1, "CUDA0", "GeForce", DISCRETE, 8 * GIB, 100 * MIB)]) is None
