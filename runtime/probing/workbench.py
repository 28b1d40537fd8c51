"""A bench to measure kernels on: tensors in one block of memory, and a graph over them that one backend computes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from edge_run.base.errors import KernelError, NotSupported
from edge_run.base.units import MIB
from edge_run.runtime.llama import _ggml

ENOUGH_S, MIN_REPETITIONS = 0.2, 3
TOO_LONG_S = 0.4
HUGE_PAGE_BYTES = 2 * MIB
MIN_ARENA_BYTES = 34 * MIB  # glibc returns so large a block to the kernel as soon as it is freed
ALIGNMENT_BYTES = 64
GPU_ALIGNMENT_BYTES = 512
GPU_PADDING_BYTES = 4096  # for each tensor: kernels may read a little further


_Measure = TypeVar("_Measure", bound="Callable[..., object]")


def apart(measure: _Measure) -> _Measure:
    """Have `measure` run in a thread of its own, with which those end that OpenMP keeps for it.

    Passes of another thread would have to share the cores with them (`runtime/processes/model_thread.py`).
    """

    @wraps(measure)
    def measure_apart(*arguments: object, **options: object) -> object:
        with ThreadPoolExecutor(1, "edge-run-bench") as pool:
            return pool.submit(measure, *arguments, **options).result()

    return measure_apart  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class GpuBench:
    """A GPU to measure.

    device: llama.cpp's handle of it.
    has_own_memory: whether its memory is not the machine's.
    slowness: by how much less it is given to do.
    """

    device: int
    has_own_memory: bool
    slowness: int = 1


class Workbench:
    """Tensors in one block of the machine's memory, and a graph of nodes over them. Made and freed by `workbench`."""

    def __init__(self, context: int, backend: int, arena: npt.NDArray[np.uint8], nodes: int) -> None:
        self.ggml, self.context = _ggml.functions(), context
        self._backend, self._arena, self._used_bytes = backend, arena, 0
        self._graph = self.ggml.ggml_new_graph_custom(context, 4 * nodes + 8, False)
        self._buffer = self._take_memory()

    def _take_memory(self) -> int:
        buffer: int = self.ggml.ggml_backend_cpu_buffer_from_ptr(self._arena.ctypes.data, self._arena.size)
        return buffer

    def reserve(self, size_bytes: int) -> int:
        """Return the address of so many bytes that nothing else uses, filled with zeros."""
        start = -(-self._used_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._used_bytes = start + size_bytes
        assert self._used_bytes <= self._arena.size
        self._arena[start : self._used_bytes] = 0  # otherwise the first computation pays for fresh pages
        return int(self._arena.ctypes.data + start)

    def tensor(self, type_id: int, *shape: int) -> int:
        """Return a new tensor with memory of its own; `shape` has 2 or 3 dimensions, the contiguous one first."""
        tensor: int = self.ggml.ggml_new_tensor_3d(self.context, type_id, *(*shape, 1)[:3])
        self._place(tensor, self.reserve(self.ggml.ggml_nbytes(tensor)))
        return tensor

    def view(self, tensor: int) -> int:
        """Return `tensor`, a view of one that has memory, as one that kernels may read."""
        self.ggml.ggml_backend_view_init(tensor)
        return tensor

    def fill(self, tensors: list[int], pattern: npt.NDArray[np.uint8]) -> None:
        """Repeat `pattern` through the tensors' memory."""
        for tensor in tensors:
            start = _ggml.tensor_at(tensor).data - self._arena.ctypes.data
            memory = self._arena[start : start + self.ggml.ggml_nbytes(tensor)]
            whole = memory.size // pattern.size * pattern.size
            memory[:whole].reshape(-1, pattern.size)[:] = pattern
            memory[whole:] = pattern[: memory.size - whole]

    def node(self, tensor: int, address: int) -> None:
        """Let the graph compute `tensor` into the memory at `address`. Raises NotSupported where nobody can."""
        self._place(tensor, address)
        self.ggml.ggml_build_forward_expand(self._graph, tensor)

    def measure_s(self) -> float:
        """Return the median time of computing the whole graph; see `measure_in_turn`."""
        return measure_in_turn(self)[0]

    def free(self) -> None:
        """Free the block."""
        self.ggml.ggml_backend_buffer_free(self._buffer)

    def _place(self, tensor: int, address: int) -> None:
        status = self.ggml.ggml_backend_tensor_alloc(self._buffer, tensor, address)
        assert status == 0, f"ggml_backend_tensor_alloc: {status}"

    def compute_s(self) -> float:
        """Return the seconds of computing the whole graph once."""
        started = time.perf_counter()
        status = self.ggml.ggml_backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise KernelError(f"ggml failed to compute a graph made to measure its kernels ({status})")
        return time.perf_counter() - started


class _GpuWorkbench(Workbench):
    """The same in a GPU's memory. Raises KernelError when it has no room."""

    def __init__(self, context: int, backend: int, device: int, size_bytes: int, nodes: int) -> None:
        self._device, self._size_bytes = device, size_bytes
        super().__init__(context, backend, np.empty(0, np.uint8), nodes)
        self._start = self.ggml.ggml_backend_buffer_get_base(self._buffer)

    def _take_memory(self) -> int:
        kind = self.ggml.ggml_backend_dev_buffer_type(self._device)
        buffer: int | None = self.ggml.ggml_backend_buft_alloc_buffer(kind, self._size_bytes)
        if not buffer:
            raise KernelError(f"the GPU has no {self._size_bytes:,} bytes free; end what uses it")
        return buffer

    def reserve(self, size_bytes: int) -> int:
        start = -(-self._used_bytes // GPU_ALIGNMENT_BYTES) * GPU_ALIGNMENT_BYTES
        self._used_bytes = start + size_bytes + GPU_PADDING_BYTES
        assert self._used_bytes <= self._size_bytes
        return int(self._start + start)

    def fill(self, tensors: list[int], pattern: npt.NDArray[np.uint8]) -> None:
        for tensor in tensors:
            content = np.resize(pattern, self.ggml.ggml_nbytes(tensor))
            _ggml.set_tensor(tensor, content.ctypes.data, 0, content.size)

    def node(self, tensor: int, address: int) -> None:
        super().node(tensor, address)
        if not self.ggml.ggml_backend_dev_supports_op(self._device, tensor):
            raise NotSupported("llama.cpp has no kernel for this on the GPU")

    def measure_s(self) -> float:
        self.compute_s()  # compiles the kernel, with some drivers
        return super().measure_s()


def measure_in_turn(*benches: Workbench) -> list[float]:
    """Return the median time of computing the whole graph of each, one after the other and again.

    So they can be compared where the device's speed changes from second to second. The first computation counts where
    it took too long.
    """
    times = [[bench.compute_s()] for bench in benches]
    if max(map(sum, times)) < TOO_LONG_S:
        times = [[] for _ in benches]
        while min(map(sum, times)) < ENOUGH_S or len(times[0]) < MIN_REPETITIONS:
            for bench, taken in zip(benches, times, strict=True):
                taken.append(bench.compute_s())
    return [statistics.median(taken) for taken in times]


@contextmanager
def workbench(threads: int, arena_bytes: int, nodes: int, gpu: GpuBench | None = None) -> Iterator[Workbench]:
    """Give a workbench for `nodes` nodes with room for `arena_bytes` and the gaps between tensors."""
    ggml = _ggml.functions()
    with ExitStack() as stack:
        context = _ggml.describing_context(8 * nodes + 8, 4 * nodes + 8)
        stack.callback(ggml.ggml_free, context)
        if gpu:
            backend = _ggml.gpu_backend(gpu.device)
            stack.callback(ggml.ggml_backend_free, backend)
            gaps_bytes = (GPU_ALIGNMENT_BYTES + GPU_PADDING_BYTES) * (4 * nodes + 8)
            bench: Workbench = _GpuWorkbench(context, backend, gpu.device, arena_bytes + gaps_bytes, nodes)
        else:
            backend = _ggml.cpu_backend(threads)
            stack.callback(ggml.ggml_backend_free, backend)
            room_bytes = max(MIN_ARENA_BYTES, arena_bytes + ALIGNMENT_BYTES * (4 * nodes + 8))
            block = np.empty(room_bytes + HUGE_PAGE_BYTES, np.uint8)  # NumPy asks for huge pages
            start = -block.ctypes.data % HUGE_PAGE_BYTES
            bench = Workbench(context, backend, block[start : start + room_bytes], nodes)
        stack.callback(bench.free)
        yield bench
