"""The GPUs that llama.cpp offers: their kinds, the memory that a run takes of one, and the speed of uploads."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from edge_run.base.errors import BudgetError, ConfigError, NotSupported, TierReadError, option
from edge_run.base.units import MIB, format_size, round_up
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc
from edge_run.tiers.source import Source
from edge_run.tiers.upload import STAGING_BYTES, Staging

logger = logging.getLogger(__name__)

DISCRETE, INTEGRATED, SOFTWARE = "discrete", "integrated", "software"
_SOFTWARE_NAMES = ("llvmpipe", "softpipe", "swiftshader")
MARGIN_BYTES, MARGIN_SHARE = 256 * MIB, 0.05
UPLOAD_BYTES, UPLOAD_S = 32 * MIB, 0.2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    handle: llama.cpp's handle.
    name: llama.cpp's name.
    description: the name of the product.
    kind: `discrete` with memory of its own, `integrated` with the machine's, `software` where the processor plays one.
    total_bytes: its memory.
    free_bytes: the part of it that is free.
    """

    handle: int
    name: str
    description: str
    kind: str
    total_bytes: int
    free_bytes: int

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the machine's."""
        return self.kind == DISCRETE

    @property
    def is_software(self) -> bool:
        """Whether the processor plays it."""
        return self.kind == SOFTWARE

    @property
    def default_bytes(self) -> int:
        """The default budget: the free memory less a margin; 0 for a software renderer."""
        if self.is_software:
            return 0
        return max(0, self.free_bytes - max(MARGIN_BYTES, int(self.total_bytes * MARGIN_SHARE)))


def find_gpus() -> list[Gpu]:
    """Return the GPUs that llama.cpp offers, those with the most free memory of their own first."""
    gpus = [
        Gpu(found.handle, found.name, found.description, kind_of(found), found.total_bytes, found.free_bytes)
        for found in ggml.gpu_devices()
    ]
    kinds = (DISCRETE, INTEGRATED, SOFTWARE)
    return sorted(gpus, key=lambda gpu: (kinds.index(gpu.kind), -gpu.free_bytes))


def kind_of(device: ggml.GpuDevice) -> str:
    """Return the kind of the GPU `device`."""
    if any(name in device.description.lower() for name in _SOFTWARE_NAMES):
        return SOFTWARE
    return DISCRETE if device.has_own_memory else INTEGRATED


def choose_gpu(wanted_bytes: int | None, gpus: Sequence[Gpu]) -> tuple[Gpu, int] | None:
    """Return the GPU to use and the bytes to take of its memory; None for no GPU.

    wanted_bytes: the budget that the user named; None for the default.

    Of memory of its own no more is taken than is free less a margin: where llama.cpp finds none in the middle of a
    pass, it ends the process. Raises ConfigError where memory of a GPU is asked for and there is none, BudgetError
    where none of it is free.
    """
    if wanted_bytes == 0:
        return None
    if not gpus:
        if wanted_bytes:
            raise ConfigError(
                f"GPU memory: llama.cpp offers no GPU here; leave out {option('gpu_memory')}, or see edge-run doctor "
                "for how to build it for one"
            )
        return None
    gpu, free_bytes = gpus[0], gpus[0].default_bytes
    if wanted_bytes is None or (gpu.has_own_memory and wanted_bytes > free_bytes):
        if wanted_bytes and not free_bytes:
            raise BudgetError(
                f"GPU memory {format_size(wanted_bytes)}: {gpu.name} ({gpu.description}) has "
                f"{format_size(gpu.free_bytes)} free, too little for anything beside its driver; end what uses it, or "
                f"give {option('gpu_memory', 0)}",
                found_bytes=gpu.free_bytes,
            )
        return (gpu, free_bytes) if free_bytes else None
    return gpu, wanted_bytes


class PinnedStaging(Staging):
    """Staging in pinned memory, which a GPU copies from without a copy in between."""

    def __init__(self, gpu: Gpu, source: Source) -> None:
        """Allocate it. Raises NotSupported where `gpu` has none, or files like `source` cannot be read into it."""
        self._memory = ggml.PinnedMemory(gpu.handle, STAGING_BYTES + _libc.PAGE)
        self.address = round_up(self._memory.address, _libc.PAGE)
        try:
            source.read_into(self.address, _libc.PAGE, 0)
        except TierReadError as error:  # a driver's own pages, which no drive writes to
            self._memory.close()
            raise NotSupported(f"pinned memory: {error}") from error
        except BaseException:
            self._memory.close()
            raise

    def close(self) -> None:
        """Give it back. Idempotent."""
        self._memory.close()


def open_staging(gpu: Gpu, source: Source) -> Staging:
    """Return memory for uploads to `gpu` from files like `source`, pinned where that is possible."""
    try:
        return PinnedStaging(gpu, source)
    except NotSupported as error:
        logger.info("%s: uploads go through ordinary memory: %s", gpu.name, error)
        return Staging()


def measure_upload(gpu: Gpu) -> float:
    """Measure how many bytes a second reach the memory of `gpu`. Takes a quarter of a second, and 32 MiB on both sides.

    Raises KernelError when it has no room.
    """
    memory = _libc.map_anonymous(UPLOAD_BYTES)
    try:
        return upload_speed(gpu, memory)
    finally:
        _libc.unmap(memory, UPLOAD_BYTES)


def upload_speed(gpu: Gpu, memory: int) -> float:
    """Return how many bytes a second reach the memory of `gpu` from the `UPLOAD_BYTES` in `memory`, which are zeroed.

    Raises KernelError when it has no room.
    """
    _libc.view(memory, UPLOAD_BYTES)[:] = bytes(UPLOAD_BYTES)
    with ggml.tensor_on(gpu.handle, UPLOAD_BYTES) as tensor:
        ggml.set_tensor(tensor, memory, 0, UPLOAD_BYTES)  # the first one also finds its way
        n_uploads, started, elapsed_s = 0, time.monotonic(), 0.0
        while elapsed_s < UPLOAD_S:
            ggml.set_tensor(tensor, memory, 0, UPLOAD_BYTES)
            n_uploads, elapsed_s = n_uploads + 1, time.monotonic() - started
        return n_uploads * UPLOAD_BYTES / elapsed_s
