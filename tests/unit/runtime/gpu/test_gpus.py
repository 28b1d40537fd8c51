"""Which GPU is used, and how much of it: what llama.cpp offers is made up here."""

from __future__ import annotations

import pytest

from edge_run import BudgetError, ConfigError
from edge_run.base.errors import NotSupported, TierReadError
from edge_run.base.units import GIB, MIB
from edge_run.partition.placement import Placement
from edge_run.runtime.gpu import devices as gpu_devices
from edge_run.runtime.gpu.devices import DISCRETE, INTEGRATED, SOFTWARE, Gpu, choose_gpu
from edge_run.runtime.gpu.offload import Offload, OffloadSizes
from edge_run.runtime.llama._ggml import GpuDevice
from edge_run.runtime.llama.holdings import Holdings
from edge_run.tiers import _libc
from edge_run.tiers.upload import STAGING_BYTES

LARGE = Gpu(1, "CUDA1", "GeForce", DISCRETE, 8 * GIB, 7 * GIB)
SOFT = Gpu(3, "Vulkan0", "llvmpipe (LLVM 15.0.6, 256 bits)", SOFTWARE, 8 * GIB, 8 * GIB)


def test_those_with_most_memory_of_their_own_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        GpuDevice(1, "llvmpipe (LLVM 15.0.6, 256 bits)", "Vulkan0", True, 64 * GIB, 64 * GIB),
        GpuDevice(2, "Radeon Graphics", "Vulkan1", False, 16 * GIB, 16 * GIB),
        GpuDevice(3, "GeForce", "CUDA0", True, 8 * GIB, 2 * GIB),
        GpuDevice(4, "GeForce", "CUDA1", True, 8 * GIB, 7 * GIB),
    ]
    monkeypatch.setattr(gpu_devices.ggml, "gpu_devices", lambda: devices)
    found = gpu_devices.find_gpus()
    assert [gpu.handle for gpu in found] == [4, 3, 2, 1]
    assert [gpu.kind for gpu in found] == [DISCRETE, DISCRETE, INTEGRATED, SOFTWARE]


def test_what_is_free_less_a_margin_is_taken() -> None:
    assert choose_gpu(None, [LARGE]) == (LARGE, 7 * GIB - int(8 * GIB * gpu_devices.MARGIN_SHARE))
    assert choose_gpu(3 * GIB, [LARGE]) == (LARGE, 3 * GIB)
    assert choose_gpu(0, [LARGE]) is None


def test_more_than_is_free_is_not_taken() -> None:
    """llama.cpp ends the process where it finds none for a pass. What a GPU shares with the machine counts there."""
    assert choose_gpu(8 * GIB, [LARGE]) == choose_gpu(None, [LARGE])
    with pytest.raises(BudgetError, match=r"CUDA0 \(GeForce\) has 100 MiB free"):
        choose_gpu(1 * GIB, [Gpu(1, "CUDA0", "GeForce", DISCRETE, 8 * GIB, 100 * MIB)])
    shared = Gpu(1, "CUDA0", "Orin", INTEGRATED, 8 * GIB, 100 * MIB)
    assert choose_gpu(1 * GIB, [shared]) == (shared, 1 * GIB)


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


def test_what_is_copied_for_a_pass_takes_memory_of_the_machine_on_its_way() -> None:
    sizes = OffloadSizes(500, 20, 30, 4, 5, frozenset(), copied_bytes=700)
    narrow, wide = (
        Offload(LARGE, 1000, Placement(3, 0), sizes, has_op_offload=has_op_offload) for has_op_offload in (False, True)
    )
    held = Holdings(100, 0, kv_bytes=40, buffer_bytes=50)
    taken = [offload.added_to(held) for offload in (narrow, wide)]
    assert [holdings.upload_bytes for holdings in taken] == [STAGING_BYTES, STAGING_BYTES + 700]
    assert [(holdings.kv_bytes, holdings.buffer_bytes, holdings.gpu_bytes) for holdings in taken] == [(4, 5, 0)] * 2
    assert "op offload" in wide.key
    assert "op offload" not in narrow.key


def test_where_no_memory_is_pinned_uploads_go_through_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_at_all(device: int, size_bytes: int) -> None:
        raise NotSupported("the GPU's backend pins no memory")

    monkeypatch.setattr(gpu_devices.ggml, "PinnedMemory", none_at_all)
    staging = gpu_devices.open_staging(LARGE, UnusedSource())
    assert not isinstance(staging, gpu_devices.PinnedStaging)
    _libc.view(staging.address, STAGING_BYTES)[-1] = 1
    staging.close()
    staging.close()


@pytest.mark.parametrize("error", [TierReadError("the driver's own pages"), KeyboardInterrupt(), OSError(5, "broken")])
def test_pinned_memory_is_given_back_whatever_ends_its_first_use(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    class Memory:
        address, is_closed = 4096, False

        def close(self) -> None:
            self.is_closed = True

    class Broken(UnusedSource):
        def read_into(self, address: int, length: int, offset: int) -> int:
            raise error

    memory = Memory()
    monkeypatch.setattr(gpu_devices.ggml, "PinnedMemory", lambda device, size_bytes: memory)
    with pytest.raises(NotSupported if isinstance(error, TierReadError) else type(error)):
        gpu_devices.PinnedStaging(LARGE, Broken())
    assert memory.is_closed


class UnusedSource:
    def read_into(self, address: int, length: int, offset: int) -> int:
        raise AssertionError("there is nothing to read into")
