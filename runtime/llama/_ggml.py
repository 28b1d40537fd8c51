"""llama.cpp and ggml, as llama-cpp-python ships them. One of the two files with ctypes.

`L` is llama-cpp-python's own low-level binding, so function signatures and parameter structs are always those of the
installed library. What it does not bind (ggml's public tensor struct and a few ggml functions) is declared here and
checked against the library on first use (`check_library`), with a tensor and a graph made for the purpose.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from edge_run.base.errors import KernelError, NotSupported
from edge_run.runtime.llama.bindings import low_level
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.processes.forks import before_forks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

L: Any = low_level()
logger = logging.getLogger("edge_run.llama")
_Said = TypeVar("_Said", str, bytes)

_LOG_LEVEL_DEBUG = 1
FLAG_COMPUTE = 16
USAGE_WEIGHTS, USAGE_COMPUTE = 1, 2
I32 = 26
LOAD_MODE_NONE, LOAD_MODE_MMAP = 0, 1
_OVERRIDE_INTEGER, _OVERRIDE_TEXT = 0, 3
_GPU_KINDS = (1, 2)  # with memory of their own, and with the host's
LAZY_MODE_OFF = 0
_TELL_SPLITS = "GGML_SCHED_DEBUG"
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
TYPE_IDS = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip


def _library(name: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    folder = Path(L.__file__).parent / "lib"
    for pattern in (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll"):
        if (folder / pattern).exists():
            return kind(str(folder / pattern))
    raise KernelError(f"lib{name}: not found beside llama-cpp-python in {folder}; reinstall llama-cpp-python")


class Tensor(ctypes.Structure):
    """ggml_tensor of ggml.h."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.c_void_p * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


class _InitParams(ctypes.Structure):
    """ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _PoolParams(ctypes.Structure):
    """ggml_threadpool_params of ggml.h."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


FLAGS_OFFSET: int = Tensor.flags.offset
EvalCallback: Any = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_blck_size": (ctypes.c_int64, [ctypes.c_int]),
    "ggml_backend_buffer_get_usage": (ctypes.c_int, [ctypes.c_void_p]),
    "ggml_backend_buffer_get_base": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_buffer_get_size": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_buffer_get_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, [ctypes.c_void_p]),
    "ggml_backend_buft_alloc_buffer": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
    "ggml_backend_buft_get_alignment": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_buft_get_alloc_size": (ctypes.c_size_t, [ctypes.c_void_p] * 2),
    "ggml_backend_buft_get_max_size": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_buffer_set_usage": (None, [ctypes.c_void_p, ctypes.c_int]),
    "ggml_backend_cpu_buffer_type": (ctypes.c_void_p, []),
    "ggml_backend_dev_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_dev_host_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_dev_init": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [ctypes.c_void_p] * 2),
    "ggml_backend_view_init": (ctypes.c_int, [ctypes.c_void_p]),
    "ggml_backend_tensor_set": (None, [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2]),
    "ggml_backend_tensor_get": (None, [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2]),
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
    "ggml_backend_dev_type": (ctypes.c_int, [ctypes.c_void_p]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_description": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_memory": (None, [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2]),
    "ggml_threadpool_params_default": (_PoolParams, [ctypes.c_int]),
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_init": (ctypes.c_void_p, [_InitParams]),
    "ggml_free": (None, [ctypes.c_void_p]),
    "ggml_new_tensor_2d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "ggml_set_name": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_add": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_mul": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_view_1d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t]),
    "ggml_new_graph": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_build_forward_expand": (None, [ctypes.c_void_p] * 2),
    "ggml_get_rows": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_mul_mat": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_mul_mat_id": (ctypes.c_void_p, [ctypes.c_void_p] * 4),
    "ggml_flash_attn_ext": (ctypes.c_void_p, [*[ctypes.c_void_p] * 5, *[ctypes.c_float] * 3]),
    "ggml_prec_set_acc": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int]),
    "ggml_permute": (ctypes.c_void_p, [*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 4]),
    "ggml_new_tensor_3d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 3]),
    "ggml_new_graph_custom": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]),
    "ggml_graph_overhead_custom": (ctypes.c_size_t, [ctypes.c_size_t, ctypes.c_bool]),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    ),
    "ggml_backend_cpu_buffer_from_ptr": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
    "ggml_backend_tensor_alloc": (ctypes.c_int, [ctypes.c_void_p] * 3),
    "ggml_backend_get_device": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_dev_backend_reg": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_reg_get_proc_address": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_backend_init_by_type": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]),
    "ggml_backend_alloc_ctx_tensors": (ctypes.c_void_p, [ctypes.c_void_p] * 2),
    "ggml_backend_graph_compute": (ctypes.c_int, [ctypes.c_void_p] * 2),
    "ggml_backend_buffer_free": (None, [ctypes.c_void_p]),
    "ggml_backend_free": (None, [ctypes.c_void_p]),
}


# They describe a graph, or say what a struct says, in well under a microsecond. To let other threads run meanwhile
# could cost one a thousand times that: readers hold Python's lock for as long as they find something to do.
_DESCRIBING = frozenset(
    f"ggml_{name}"
    for name in (
        *("tensor_overhead", "graph_overhead_custom", "init", "free", "new_tensor_2d", "new_tensor_3d"),
        *("get_rows", "mul_mat", "mul_mat_id", "new_graph_custom", "build_forward_expand"),
        *("op_name", "nbytes", *(f"backend_buffer_{what}" for what in ("get_usage", "get_type", "is_host"))),
        *(f"backend_buffer_{what}" for what in ("get_base", "get_size")),
    )
)


class _Ggml:
    """ggml's functions by name, looked up in the libraries that define them."""

    def __init__(self) -> None:
        names = "ggml-base", "ggml"
        free, locked = ([_library(name, kind) for name in names] for kind in (ctypes.CDLL, ctypes.PyDLL))
        for name, (result, arguments) in _SIGNATURES.items():
            libraries = locked if name in _DESCRIBING else free
            function = next((getattr(lib, name) for lib in libraries if hasattr(lib, name)), None)
            if function is None:
                raise KernelError(f"this llama.cpp has no {name}; {_advice()}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@functools.cache
def functions() -> _Ggml:
    """Return ggml's functions. Raises KernelError when this build lacks one."""
    found = _Ggml()
    with log.listening(lambda line: None):  # what GPUs are here, which is said on standard error at the first question
        found.ggml_backend_dev_count()
    return found


def _advice() -> str:
    return f"edge-run knows llama-cpp-python 0.3.36, here is {library_version()}; install that one"


@functools.cache
def kernel_features() -> str:
    """Return what of the processor llama.cpp's kernels use here, and what they were built with, in a line."""
    features = L.llama_print_system_info().decode("utf-8", "replace").strip().removesuffix("|")
    return " ".join(features.replace(" = 1", "").replace("|", " ").split())


@functools.cache
def op_name(op: int) -> str:
    """Return ggml's name of an operation, as `MUL_MAT`."""
    name: bytes = functions().ggml_op_name(op)
    return name.decode()


def tensor_at(address: int) -> Any:
    """Return the tensor struct at `address` (a view, not a copy)."""
    return Tensor.from_address(address)


def tensor_name(address: int) -> bytes:
    """Return the name of the tensor at `address`."""
    name: bytes = Tensor.from_address(address).name
    return name


def settle(address: int, name: bytes, is_computed: bool) -> bool:
    """Let llama.cpp compute the node at `address` or skip it, if that is its name; return whether it is.

    Quick enough for every node of every pass.
    """
    tensor = Tensor.from_address(address)
    if tensor.name != name:
        return False
    if (tensor.flags & FLAG_COMPUTE != 0) is not is_computed:
        tensor.flags ^= FLAG_COMPUTE
    return True


def is_weight(address: int) -> bool:
    """Return whether the tensor at `address` lies in a buffer of weights."""
    buffer = tensor_at(address).buffer
    return bool(buffer) and functions().ggml_backend_buffer_get_usage(buffer) == USAGE_WEIGHTS


def compute_buffer(address: int) -> tuple[int, int] | None:
    """Return address and bytes of the buffer that llama.cpp computes in, if the tensor at `address` lies there."""
    buffer, ggml = tensor_at(address).buffer, functions()
    if not buffer or ggml.ggml_backend_buffer_get_usage(buffer) != USAGE_COMPUTE or not is_on_host(address):
        return None
    return ggml.ggml_backend_buffer_get_base(buffer), ggml.ggml_backend_buffer_get_size(buffer)


def set_compute_flag(address: int, is_computed: bool) -> None:
    """Let llama.cpp compute the node at `address`, or skip it."""
    flags = ctypes.c_int32.from_address(address + FLAGS_OFFSET)
    flags.value = flags.value | FLAG_COMPUTE if is_computed else flags.value & ~FLAG_COMPUTE


def rows_written(address: int) -> tuple[int, npt.NDArray[np.int64]] | None:
    """Return where the node at `address` writes rows, and which, `(n_rows,)`; None where it writes none.

    It must be asked about, when the graph's inputs are set, and the rows be an input.
    """
    import numpy as np

    tensor = tensor_at(address)
    if op_name(tensor.op) != "SET_ROWS" or not tensor.view_src:
        return None
    ids = tensor_at(tensor.src[1])
    kind = np.int32 if ids.type == I32 else np.int64
    rows = np.frombuffer(ctypes.string_at(ids.data, ids.ne[0] * kind().itemsize), kind)
    return tensor_at(tensor.view_src).data, rows.astype(np.int64)


def clear_data(address: int) -> None:
    """Fill what the tensor at `address` holds with zeros."""
    ctypes.memset(tensor_at(address).data, 0, functions().ggml_nbytes(address))


def read_int32(address: int, count: int) -> npt.NDArray[np.int32]:
    """Return a copy of `count` int32 at `address`."""
    import numpy as np

    return np.frombuffer(ctypes.string_at(address, 4 * count), np.int32)


def read_int32_rows(address: int, shape: tuple[int, int], row_bytes: int) -> npt.NDArray[np.int32]:
    """Return a copy of int32 that lie in rows, each `row_bytes` after the last; `shape`: rows, and their length."""
    import numpy as np

    content = ctypes.string_at(address, (shape[0] - 1) * row_bytes + 4 * shape[1])
    return np.ndarray(shape, np.int32, content, strides=(row_bytes, 4)).copy()


def floats_at(address: int, count: int) -> npt.NDArray[np.float32]:
    """Return the `count` floats at `address`, `(count,)`, without copying: as long as they are there."""
    import numpy as np

    memory: Any = (ctypes.c_float * count).from_address(address)
    return np.frombuffer(memory, np.float32)


def float_rows(pointer: Any, columns: int) -> npt.NDArray[np.float32]:
    """Return one row of `columns` floats at a ctypes pointer, `(columns,)`, without copying.

    Raises KernelError where it points nowhere.
    """
    if not (address := address_of(pointer)):
        raise KernelError("llama.cpp has no row where a pass was to give one")
    return floats_at(address, columns)


def address_of(pointer: Any) -> int:
    """Return the address that a ctypes pointer holds, 0 for none."""
    return ctypes.addressof(pointer.contents) if pointer else 0


def numbers_at(pointer: Any, count: int) -> Any:
    """Return the `count` numbers at a ctypes pointer as an array, whose slices can be set, without copying."""
    return (pointer._type_ * count).from_address(ctypes.addressof(pointer.contents))


def describing_context(tensors: int, nodes: int) -> int:
    """Return a new ggml context with room for `tensors` tensors, without their data, and a graph of `nodes` nodes."""
    ggml = functions()
    size_bytes = tensors * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(nodes, False)
    context: int | None = ggml.ggml_init(_InitParams(size_bytes + 4096, None, True))
    if not context:
        raise KernelError(f"ggml cannot make a context of {size_bytes:,} bytes")
    return context


class GpuDevice(NamedTuple):
    """A GPU that llama.cpp offers: its handle, what it is, llama.cpp's name of it (`CUDA0`), its memory."""

    handle: int
    description: str
    name: str
    has_own_memory: bool
    total_bytes: int
    free_bytes: int


def gpu_devices() -> list[GpuDevice]:
    """Return the GPUs that llama.cpp offers; none where it was built for the processor alone."""
    ggml, devices = functions(), []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        if (kind := ggml.ggml_backend_dev_type(device)) in _GPU_KINDS:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            texts = (ggml.ggml_backend_dev_description(device), ggml.ggml_backend_dev_name(device))
            description, name = (text.decode("utf-8", "replace") for text in texts)
            devices.append(GpuDevice(device, description, name, kind == _GPU_KINDS[0], total.value, free.value))
    return devices


@contextlib.contextmanager
def tensor_on(device: int, size_bytes: int) -> Iterator[int]:
    """Make a tensor of `size_bytes` bytes (a multiple of 4) on the GPU `device`, for as long as the block.

    Raises KernelError when it has no room.
    """
    ggml, context = functions(), describing_context(1, 1)
    buffer = None
    try:
        tensor: int = ggml.ggml_new_tensor_2d(context, 0, size_bytes // 4, 1)
        kind = ggml.ggml_backend_dev_buffer_type(device)
        buffer = ggml.ggml_backend_buft_alloc_buffer(kind, ggml.ggml_backend_buft_get_alloc_size(kind, tensor))
        if not buffer:
            raise KernelError(f"the GPU has no {size_bytes:,} bytes free; end what uses it")
        ggml.ggml_backend_tensor_alloc(buffer, tensor, ggml.ggml_backend_buffer_get_base(buffer))
        yield tensor
    finally:
        if buffer:
            ggml.ggml_backend_buffer_free(buffer)
        ggml.ggml_free(context)


class PinnedMemory:
    """Memory of the machine that the GPU `device` copies from without a copy in between, as its driver sees to."""

    def __init__(self, device: int, size_bytes: int) -> None:
        """Raises NotSupported where the GPU's backend has none, or no more of it."""
        ggml = functions()
        kind = ggml.ggml_backend_dev_host_buffer_type(device)
        self._buffer = kind and ggml.ggml_backend_buft_alloc_buffer(kind, size_bytes)
        if not self._buffer:
            raise NotSupported("the GPU's backend pins no memory")
        self.address: int = ggml.ggml_backend_buffer_get_base(self._buffer)

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self._buffer:
            functions().ggml_backend_buffer_free(self._buffer)
            self._buffer = None


def set_tensor(tensor: int, source: int, offset: int, length: int) -> None:
    """Copy `length` bytes at the address `source` into `tensor`, from byte `offset` on, wherever it is."""
    functions().ggml_backend_tensor_set(tensor, source, offset, length)


def get_tensor(tensor: int, target: int, offset: int, length: int) -> None:
    """Copy `length` bytes of `tensor`, wherever it is, from byte `offset` on to the address `target`."""
    functions().ggml_backend_tensor_get(tensor, target, offset, length)


def is_on_host(address: int) -> bool:
    """Return whether what the tensor at `address` holds is in memory that the processor reads."""
    buffer, ggml = tensor_at(address).buffer, functions()
    if not buffer or ggml.ggml_backend_buffer_is_host(buffer):
        return True
    return ggml.ggml_backend_buffer_get_type(buffer) in repacked_buffer_types()


def model_tensors(model: Any) -> list[int]:
    """Return the tensors of a loaded model, those that it has twice under one name twice.

    llama.cpp tells of them through a function of its C++ interface alone, which returns a vector of pairs of
    a name and a tensor. Raises KernelError where what it returns is none.
    """
    library = _library("llama")
    symbols = {"_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model": 40}
    symbols["_Z29llama_internal_get_tensor_mapPK11llama_model"] = 32  # built with libc++, whose strings are shorter
    for symbol, pair_bytes in symbols.items():
        if hasattr(library, symbol):
            function = getattr(library, symbol)
            function.restype, function.argtypes = ctypes.POINTER(ctypes.c_void_p), [ctypes.c_void_p]
            pairs = function(model)
            start, stop = pairs[0] or 0, pairs[1] or 0
            if 0 < stop - start < pair_bytes << 20 and (stop - start) % pair_bytes == 0:
                last = range(start + pair_bytes - 8, stop, pair_bytes)
                return [ctypes.c_void_p.from_address(address).value or 0 for address in last]
    raise KernelError(f"this llama.cpp does not tell which tensors a model has; {_advice()}")


def allocated_bytes(tensors: Iterable[int]) -> int:
    """Return what `tensors`, of one model and one device, take there, or would."""
    ggml, used_bytes = functions(), 0
    for tensor in tensors:
        kind = ggml.ggml_backend_buffer_get_type(tensor_at(tensor).buffer)
        alignment = ggml.ggml_backend_buft_get_alignment(kind)
        used_bytes += -(-ggml.ggml_backend_buft_get_alloc_size(kind, tensor) // alignment) * alignment
    return used_bytes


def cpu_backend(threads: int) -> int:
    """Return a new CPU backend of ggml that computes with `threads` threads."""
    ggml = functions()
    backend: int | None = ggml.ggml_backend_init_by_type(0, None)
    if not backend:
        raise KernelError("ggml has no CPU backend here; reinstall llama-cpp-python")
    set_threads = _cpu_function(backend, "ggml_backend_set_n_threads", None, [ctypes.c_void_p, ctypes.c_int])
    if not set_threads:
        ggml.ggml_backend_free(backend)
        raise KernelError(f"this llama.cpp's CPU backend does not let the threads be set; {_advice()}")
    set_threads(backend, threads)
    return backend


def _cpu_function(backend: int, name: str, result: Any, arguments: list[Any]) -> Any:
    """Return a function that only the library of a CPU backend has, None where it has not."""
    ggml = functions()
    registry = ggml.ggml_backend_dev_backend_reg(ggml.ggml_backend_get_device(backend))
    address = ggml.ggml_backend_reg_get_proc_address(registry, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


@functools.cache
def processor() -> int:
    """Return ggml's handle of the processor. Raises KernelError where it has none."""
    ggml = functions()
    for index in range(ggml.ggml_backend_dev_count()):
        device: int = ggml.ggml_backend_dev_get(index)
        if ggml.ggml_backend_dev_type(device) == 0:
            return device
    raise KernelError("ggml has no CPU backend here; reinstall llama-cpp-python")


@functools.cache
def repacked_buffer_types() -> tuple[int, ...]:
    """Return the types of buffers in which the processor's kernels find weights repacked, none in most builds but one.

    llama.cpp prefers the first that has a kernel.
    """
    ggml = functions()
    registry = ggml.ggml_backend_dev_backend_reg(processor())
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return ()
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(processor())
    found: list[int] = []
    while listed and (kind := listed[len(found)]):
        found.append(kind)
    return tuple(found)


def buffer_type_name(kind: int) -> str:
    """Return ggml's name of a type of buffers, as `CPU_REPACK`."""
    name: bytes = functions().ggml_backend_buft_name(kind)
    return name.decode()


def repack_rows(weight: int, size_bytes: int, source: int, target: int) -> None:
    """Write repacked to the address `target` what `source` has of the weight at `weight`, not repacked.

    Its `buffer` and `extra` say how. `size_bytes` are of whole groups of rows that its kernel computes together.
    """
    rows = Tensor.from_buffer_copy(tensor_at(weight))
    rows.ne[1:], rows.nb[2:] = (size_bytes // rows.nb[1], 1, 1), (size_bytes, size_bytes)
    rows.data = target
    functions().ggml_backend_tensor_set(ctypes.addressof(rows), source, 0, size_bytes)


class ThreadPool:
    """Threads for one context, each of which stays on a core of its own while it computes."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Make a pool of as many threads as `cores`. Raises NotSupported where llama.cpp's is not the one we know."""
        ggml, n = functions(), len(cores)
        params = ggml.ggml_threadpool_params_default(n)
        is_known = (params.n_threads, params.prio, params.poll, params.strict_cpu) == (n, 0, 50, False)
        backend = cpu_backend(n)
        make = _cpu_function(backend, "ggml_threadpool_new", ctypes.c_void_p, [ctypes.POINTER(_PoolParams)])
        self._free = _cpu_function(backend, "ggml_threadpool_free", None, [ctypes.c_void_p])
        ggml.ggml_backend_free(backend)
        if not (is_known and make and self._free) or max(cores) >= len(params.cpumask):
            raise NotSupported(f"this llama.cpp's threads cannot be told which cores to use; {_advice()}")
        for core in cores:
            params.cpumask[core] = True
        params.strict_cpu = True
        self._handle = make(ctypes.byref(params))

    def attach(self, context: Any) -> None:
        """Have a llama.cpp context compute with these threads; it must end before them."""
        attach = _library("llama").llama_attach_threadpool
        attach.restype, attach.argtypes = None, [ctypes.c_void_p] * 3
        attach(context, self._handle, self._handle)

    def close(self) -> None:
        """Free the threads. Idempotent."""
        if self._handle:
            self._free(self._handle)
            self._handle = None


def gpu_backend(device: int) -> int:
    """Return a new backend of ggml on the GPU `device`."""
    backend: int | None = functions().ggml_backend_dev_init(device, None)
    if not backend:
        raise KernelError("the GPU cannot be used at present; see edge-run doctor")
    return backend


def quantize(type_id: int, values: npt.NDArray[np.float32], size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return `values`, whole blocks of them, in the type `type_id`, where they take `size_bytes`.

    Not for types that want an importance matrix, which ggml asserts.
    """
    import numpy as np

    source, target = np.ascontiguousarray(values, np.float32), np.zeros(size_bytes, np.uint8)
    functions().ggml_quantize_chunk(type_id, source.ctypes.data, target.ctypes.data, 0, 1, len(source), None)
    return target


@functools.cache
def check_library() -> str:
    """Return why this llama.cpp is not the one we know, or an empty string when every check holds.

    Checks the tensor struct field by field on tensors made for the purpose, and that a node without the compute flag is
    skipped.
    """
    try:
        ggml = functions()
        if ggml.ggml_tensor_overhead() < ctypes.sizeof(Tensor):
            return f"its tensor struct has another size; {_advice()}"
        context = ggml.ggml_init(_InitParams(1 << 20, None, True))
        try:
            return _check_structs(ggml, context)
        finally:
            ggml.ggml_free(context)
    except KernelError as error:
        return str(error)


def _check_structs(ggml: Any, context: int) -> str:
    a, b = (ggml.ggml_new_tensor_2d(context, 0, 4, 3) for _ in range(2))
    ggml.ggml_set_name(a, b"edge-run-check")
    total = ggml.ggml_add(context, a, b)
    window = ggml.ggml_view_1d(context, a, 2, 8)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, total)
    backend = cpu_backend(1)  # OpenMP would keep more threads, of which passes of other threads have to take account
    buffer = ggml.ggml_backend_alloc_ctx_tensors(context, backend)
    try:
        one, node, part = tensor_at(a), tensor_at(total), tensor_at(window)
        base = ggml.ggml_backend_buffer_get_base(buffer)
        facts = {
            "type": one.type == 0 and tuple(one.ne) == (4, 3, 1, 1) and tuple(one.nb) == (4, 16, 48, 48),
            "name": tensor_name(a) == b"edge-run-check",
            "op": op_name(node.op) == "ADD" and op_name(one.op) == "NONE",
            "src": (node.src[0], node.src[1], node.src[2]) == (a, b, None),
            "view_src": part.view_src == a and part.view_offs == 8,
            "buffer": one.buffer == buffer and base <= one.data < base + (1 << 20),
            "flags": node.flags & FLAG_COMPUTE != 0 and one.flags & FLAG_COMPUTE == 0,
            "compute": _check_compute_flag(ggml, backend, graph, a, b, total),
        }
    finally:
        ggml.ggml_backend_buffer_free(buffer)
        ggml.ggml_backend_free(backend)
    wrong = [name for name, is_right in facts.items() if not is_right]
    return f"its public structs differ in {', '.join(wrong)}; {_advice()}" if wrong else ""


def _check_compute_flag(ggml: Any, backend: int, graph: int, a: int, b: int, total: int) -> bool:
    values = [(ctypes.c_float * 12).from_address(tensor_at(t).data) for t in (a, b, total)]
    for array, value in zip(values, (1.0, 2.0, 9.0), strict=True):
        array[:] = [value] * 12
    set_compute_flag(total, False)
    ggml.ggml_backend_graph_compute(backend, graph)
    is_skipped = set(values[2]) == {9.0}
    set_compute_flag(total, True)
    ggml.ggml_backend_graph_compute(backend, graph)
    return is_skipped and set(values[2]) == {3.0}


def _tell(listeners: Iterable[tuple[int, Callable[[_Said], None]]], said: _Said) -> None:
    """Pass `said` to those of `listeners` that belong to this thread."""
    for thread, listener in listeners:
        if thread == threading.get_ident():
            listener(said)


class _Log:
    """llama.cpp has one log for the whole process. Its lines go to our logger, and to listeners of the same thread.

    While nobody listens, they go to a function of C: readers that repack make thousands a second, and each would wait
    for the interpreter.
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[int, Callable[[str], None]]] = []
        self._overhearers: list[tuple[int, Callable[[bytes], None]]] = []
        self._changing = threading.Lock()  # lists are replaced: another thread may be telling those of the old one
        self._callback = L.llama_log_callback(self._on_line)
        self._deaf = ctypes.cast(L.llama_supports_mmap, L.llama_log_callback)  # a function that does nothing
        self._failures: dict[int, BaseException] = {}  # by the thread that heard

    def _on_line(self, level: int, text: bytes, _: Any) -> None:
        try:
            _tell(self._overhearers, text)
            if level <= _LOG_LEVEL_DEBUG and not logger.isEnabledFor(logging.DEBUG):
                return  # thousands of lines while a large model loads
            line = text.decode("utf-8", "replace").rstrip("\n")
            _tell(self._listeners, line)
            logger.debug("%s", line)
        except BaseException as error:  # it cannot travel through llama.cpp: raised when the listening ends
            self._failures[threading.get_ident()] = error

    @contextlib.contextmanager
    def overhearing(self, overhear: Callable[[bytes], None]) -> Iterator[None]:
        """Pass all that is logged by this thread, piece by piece, to `overhear`; else as `listening`."""
        entry = threading.get_ident(), overhear
        with self._changing:
            self._overhearers = [*self._overhearers, entry]
        try:
            with self.listening(lambda line: None):
                yield
        finally:
            with self._changing:
                self._overhearers = [one for one in self._overhearers if one is not entry]

    @contextlib.contextmanager
    def listening(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Pass this thread's lines to `listener`, which must be quick and must not raise.

        What it raises all the same is raised at the end, unless the block has failed already.
        """
        entry = threading.get_ident(), listener
        with self._changing:
            self._listeners = [*self._listeners, entry]
            L.llama_log_set(self._callback, None)  # every time: others in this process may have set theirs
        try:
            yield
        finally:
            with self._changing:
                self._listeners = [one for one in self._listeners if one is not entry]
                if not (self._listeners or logger.isEnabledFor(logging.DEBUG)):
                    L.llama_log_set(self._deaf, None)
            failure = self._failures.pop(threading.get_ident(), None)  # also where the block failed
        if failure is not None:
            raise failure


log = _Log()


@contextlib.contextmanager
def telling_splits() -> Iterator[None]:
    """Contexts that are made in this block log how each graph is cut, with the names of what is copied.

    ggml asks the environment about that, and has no other way to be told.
    """
    before = os.environ.get(_TELL_SPLITS)
    os.environ[_TELL_SPLITS] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TELL_SPLITS]
        else:
            os.environ[_TELL_SPLITS] = before


def cast_callback(function: Callable[[int, bool, int], bool], target: Any) -> tuple[Any, Any]:
    """Return (the C callback, to be kept alive by the caller; the same as `target`'s pointer type)."""
    callback = EvalCallback(function)
    return callback, ctypes.cast(callback, type(target))


def device_list(*devices: int) -> Any:
    """Return the GPUs that llama.cpp may use, none of them: everything stays on the CPU; the caller keeps it alive."""
    return (ctypes.c_void_p * (len(devices) + 1))(*devices, None)


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def kept_on_host(patterns: Sequence[str]) -> Any:
    """Return overrides that keep tensors of these names (regular expressions) in DRAM; the caller keeps it alive."""
    host = functions().ggml_backend_cpu_buffer_type()
    entries = [_BufferOverride(pattern.encode(), host) for pattern in patterns]
    return (_BufferOverride * (len(entries) + 1))(*entries, _BufferOverride(None, None))


class LoadProgress:
    """llama.cpp's callback for progress, which it asks before each tensor: `on_tensor` is called, and may raise."""

    def __init__(self, on_tensor: Callable[[], None]) -> None:
        self._on_tensor = on_tensor
        self._failure: BaseException | None = None
        self.callback = L.llama_progress_callback(self._on_progress)

    def _on_progress(self, share: float, _: Any) -> bool:
        try:
            if self._failure is None:
                self._on_tensor()
        except BaseException as error:  # it cannot travel through llama.cpp
            self._failure = error
        return self._failure is None

    def raise_failure(self) -> None:
        """Raise what `on_tensor` raised, which ended the loading."""
        if self._failure is not None:
            raise self._failure


class StopFlag:
    """What llama.cpp looks at after each node: while it is up, a pass ends there, with code 2. Any thread may set it.

    The callback is the C library's `strlen` over a text that is empty or not: Python's would take the interpreter's
    lock a thousand times a pass.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self, is_up: bool) -> None:
        """Raise or lower it."""
        self._text[0] = b"\1" if is_up else b"\0"

    def watch(self, context: Any) -> None:
        """Have passes of a llama.cpp context end while it is up; it must live as long as that."""
        L.llama_set_abort_callback(context, _strlen(), ctypes.cast(self._text, ctypes.c_void_p))


@functools.cache
def _strlen() -> Any:
    try:
        library = ctypes.CDLL(None)
    except TypeError:  # Windows has no library without a name
        library = ctypes.CDLL("msvcrt")
    return ctypes.cast(library.strlen, L.ggml_abort_callback)


_PAUSE_SOFT = 1


def rest_threads() -> None:
    """Have the threads end that compute for this one, until it computes again.

    OpenMP keeps them for each thread that ever computed, and where all of them are more than the cores, they sleep at
    each barrier instead of waiting for it: passes of another thread take up to a tenth longer then.
    """
    with contextlib.suppress(AttributeError, KernelError):  # a build without OpenMP, which minds forks
        _library("llama").omp_pause_resource_all(_PAUSE_SOFT)


before_forks(rest_threads)


_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_TERMINATE_CALLBACK = ctypes.CFUNCTYPE(None)
_SIGNAL_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int)
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate
_callbacks: list[Any] = []  # which the library has for good


def announce_end(say: Callable[[str], None]) -> None:
    """Have `say` called with what llama.cpp ends the process over, right before: it asserts, throws, or meets a page.

    That is one of a mapped file that cannot be read, as its drive failed or it was cut (SIGBUS). `say` is called on any
    thread, may end the process, and must do little else.
    """
    end_of_file = "a page of a mapped file could not be read (SIGBUS): it was cut, or its drive failed"
    _callbacks[:] = [
        _ABORT_CALLBACK(lambda message: say((message or b"").decode("utf-8", "replace").rpartition("/")[2])),
        _TERMINATE_CALLBACK(lambda: say("an exception that nobody caught; as a rule there is too little memory")),
    ]
    _library("llama").ggml_set_abort_callback(_callbacks[0])
    with contextlib.suppress(AttributeError, TypeError):  # other names, other systems
        getattr(_library("llama"), _SET_TERMINATE)(_callbacks[1])
        set_handler = ctypes.CDLL(None).signal
        set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]

        def on_page_error(number: int) -> None:
            set_handler(number, None)  # met again, it ends the process
            say(end_of_file)

        _callbacks.append(_SIGNAL_CALLBACK(on_page_error))
        set_handler(signal.SIGBUS, ctypes.cast(_callbacks[2], ctypes.c_void_p))


def string_array(texts: list[bytes]) -> Any:
    """Return a C array of C strings."""
    return (ctypes.c_char_p * len(texts))(*texts)


def overrides(values: dict[str, int | str]) -> Any:
    """Return metadata that llama.cpp takes instead of a file's; the caller keeps it alive."""
    array = (L.llama_model_kv_override * (len(values) + 1))()
    for entry, (key, value) in zip(array, values.items(), strict=False):
        entry.key = key.encode()
        if isinstance(value, int):
            entry.tag, entry.value.val_i64 = _OVERRIDE_INTEGER, value
        else:
            entry.tag, entry.value.val_str = _OVERRIDE_TEXT, value.encode()
    return array


def void_pointer(thing: Any) -> Any:
    """Return `thing` (an array) as a void pointer."""
    return ctypes.cast(thing, ctypes.c_void_p)


def model_metadata(model: Any, key: str) -> str | None:
    """Return a metadata value of a loaded model as text, None when it has none."""
    size: int = L.llama_model_meta_val_str(model, key.encode(), None, 0)
    if size < 0:
        return None
    buffer = ctypes.create_string_buffer(size + 1)
    L.llama_model_meta_val_str(model, key.encode(), buffer, size + 1)
    return buffer.value.decode("utf-8", "replace")


def tokenize(vocab: Any, text: str, add_special: bool, parse_special: bool) -> list[int]:
    """Return the tokens of `text`.

    add_special: with the model's BOS or EOS. parse_special: control tokens written out, as `<|im_end|>`, count as such.
    llama.cpp ends the process over characters that `Spelling` does not find.
    """
    data = text.encode("utf-8", "surrogateescape")
    tokens = (ctypes.c_int32 * (len(data) + 8))()
    n: int = L.llama_tokenize(vocab, data, len(data), tokens, len(tokens), add_special, parse_special)
    if n < 0:
        tokens = (ctypes.c_int32 * -n)()
        n = L.llama_tokenize(vocab, data, len(data), tokens, len(tokens), add_special, parse_special)
    if n < 0:
        raise KernelError(f"tokenizing {len(data)} bytes of text failed in llama.cpp ({n})")
    return list(tokens[:n])


def count_tokens(vocab: Any, text: str) -> int:
    """Return how many tokens `text` has, control tokens in it included; see `tokenize`."""
    data = text.encode("utf-8", "surrogateescape")
    return abs(L.llama_tokenize(vocab, data, len(data), None, 0, False, True))


def token_texts(vocab: Any, n_tokens: int) -> list[bytes]:
    """Return the first `n_tokens` tokens as the vocabulary writes them (a space of SentencePiece is U+2581)."""
    return [L.llama_vocab_get_text(vocab, token) or b"" for token in range(n_tokens)]


def token_bytes(vocab: Any, token: int, special: bool) -> bytes:
    """Return the bytes that `token` stands for; special: control tokens have text too."""
    buffer = ctypes.create_string_buffer(64)
    n: int = L.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    if n < 0:
        buffer = ctypes.create_string_buffer(-n)
        n = L.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    return buffer.raw[:n]


def candidates(table: npt.NDArray[np.void]) -> Any:
    """Return llama.cpp's candidate array over `table`, `(n,)` of (id int32, logit float32, p float32), n >= 1.

    No copy: samplers sort and cut `table` in place. The array keeps the table's memory alive, and
    `data[selected].id` is the token once a sampler has chosen; `data` may then point elsewhere than to the table.
    """
    data = (L.llama_token_data * len(table)).from_buffer(table)
    return L.llama_token_data_array(data, len(table), -1, False)


def suppressed_tokens(vocab: Any) -> list[int]:
    """Return the tokens that the model file says are never to be chosen; usually none."""
    n_tokens = ctypes.c_int32(0)
    tokens = L.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(n_tokens))
    return [int(tokens[index]) for index in range(n_tokens.value)]
