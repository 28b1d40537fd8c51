"""llama.cpp's repacked kernels on weights that lie where we put them.

For some types of weights llama.cpp has kernels that compute several rows at once, whose numbers must lie interleaved.
By default it copies such weights into buffers of its own. Which kernel a weight gets is decided by two public fields
of it: `buffer`, of a type for such kernels, and `extra`, the kernel, which that type says. Sizes and addresses stay as
they are. So a weight whose fields are set, and whose rows are interleaved where they lie, is computed as llama.cpp's
default computes it, bit for bit. A context has to be made after the fields are set.

Which weights have such a kernel is asked of the processor's backend, as llama.cpp does. Left out are other kinds of
buffers, as those for AMX: they convert a matrix as a whole, or to another size.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.holdings import REPACKED_AT_ONCE_BYTES, repacking_bytes
from edge_run.tiers import _libc
from edge_run.tiers.gguf_format import TENSOR_TYPES

TOKENS = 512  # of the input that a kernel is asked for, as llama.cpp asks
_BUFFERS = "CPU_REPACK"  # whose groups of rows are interleaved independently of each other
_TENSORS, _HOLDER_BYTES = 8, 256
MOST_ROWS_TOGETHER = 64  # where slices of rows begin at multiples of it, no group is torn apart
_SUITING = 4096  # rows, and elements of a row


Described: TypeAlias = "tuple[int, tuple[int, ...], bool]"  # type, shape, and whether by expert


class Kernel(NamedTuple):
    """A repacked kernel for a weight.

    buffer: stands for its kind of buffers.
    traits: ggml's handle of the kernel.
    rows_together: the rows that it computes at once.
    """

    buffer: int
    traits: int
    rows_together: int


@dataclass(frozen=True, slots=True)
class RepackedWeight:
    """A weight that a repacked kernel computes.

    tensor: the address of its struct.
    address: where it lies; 0 where it is only described.
    size_bytes: how much it takes.
    group_bytes: the size of the rows that are interleaved with each other. One group after the other, each can be
        repacked on its own; experts follow each other as well.
    """

    tensor: int
    address: int
    size_bytes: int
    group_bytes: int

    def repack(self, address: int, length: int, copy: int) -> None:
        """Repack whole groups, `length` bytes that were read to `address`, where they lie.

        copy: the address of the memory that they are copied to first, some at a time: `repacking_bytes` at least.
        """
        step = max(1, REPACKED_AT_ONCE_BYTES // self.group_bytes) * self.group_bytes
        for start in range(address, address + length, step):
            size_bytes = min(step, address + length - start)
            _libc.copy(start, copy, size_bytes)
            ggml.repack_rows(self.tensor, size_bytes, copy, start)


class Repacking:
    """Gives weights repacked kernels. It must live as long as contexts that compute with them."""

    def __init__(self) -> None:
        self._buffers: dict[int, int] = {}
        self._before: dict[int, tuple[int | None, int | None]] = {}
        self._descriptions: list[int] = []

    def kernel(self, type_id: int, shape: tuple[int, ...], *, by_expert: bool) -> Kernel | None:
        """Return the kernel for a weight of such a type and `shape`, (row elements, rows, experts); None for none.

        by_expert: whether each token is multiplied by experts of its own.
        """
        for kind in ggml.repacked_buffer_types():
            if ggml.buffer_type_name(kind) != _BUFFERS:
                continue
            buffer = self._buffer(kind)
            traits = _traits(kind, buffer, type_id, shape, by_expert=by_expert)
            if traits and (together := _rows_together(buffer, type_id, shape, traits)):
                return Kernel(buffer, traits, together)
        return None

    def mark(self, weight: int, kernel: Kernel) -> RepackedWeight:
        """Have the weight whose tensor struct is at `weight` computed by `kernel`; it is to be repacked then."""
        tensor = ggml.tensor_at(weight)
        self._before.setdefault(weight, (tensor.buffer, tensor.extra))
        tensor.buffer, tensor.extra = kernel.buffer, kernel.traits
        size_bytes = tensor.nb[1] * tensor.ne[1] * tensor.ne[2]
        return RepackedWeight(weight, tensor.data or 0, size_bytes, tensor.nb[1] * kernel.rows_together)

    def describe(self, type_id: int, shape: tuple[int, ...], *, by_expert: bool) -> RepackedWeight | None:
        """Return a weight of no model, by which rows of such weights are repacked; None without a kernel for them."""
        kernel = self.kernel(type_id, shape, by_expert=by_expert)
        if kernel is None:
            return None
        self._descriptions.append(ggml.describing_context(1, 1))
        row_elements, rows, experts, *_ = (*shape, 1, 1)
        tensor = ggml.functions().ggml_new_tensor_3d(self._descriptions[-1], type_id, row_elements, rows, experts)
        return self.mark(tensor, kernel)

    def undo(self) -> None:
        """Give all weights the kernels that they had; their rows must not have been repacked."""
        for weight, (buffer, extra) in self._before.items():
            tensor = ggml.tensor_at(weight)
            tensor.buffer, tensor.extra = buffer, extra
        self._before.clear()

    def close(self) -> None:
        """Free the buffers. Idempotent."""
        for buffer in self._buffers.values():
            ggml.functions().ggml_backend_buffer_free(buffer)
        self._buffers.clear()
        while self._descriptions:
            ggml.functions().ggml_free(self._descriptions.pop())

    def _buffer(self, kind: int) -> int:
        """Return a buffer of type `kind`, which stands for the type and holds no weights."""
        if kind not in self._buffers:
            functions = ggml.functions()
            self._buffers[kind] = functions.ggml_backend_buft_alloc_buffer(kind, _HOLDER_BYTES)
            functions.ggml_backend_buffer_set_usage(self._buffers[kind], ggml.USAGE_WEIGHTS)
        return self._buffers[kind]


def groups_of(weights: Iterable[Described]) -> dict[Described, int]:
    """Return those of `weights` that have a repacked kernel here, and the bytes of the rows that are interleaved."""
    repacking = Repacking()
    try:
        return {
            (type_id, shape, by_expert): kernel.rows_together * TENSOR_TYPES[type_id].size_bytes(shape[0])
            for type_id, shape, by_expert in weights
            if (kernel := repacking.kernel(type_id, shape, by_expert=by_expert))
        }
    finally:
        repacking.close()


def layout_of(weights: Iterable[Described]) -> str:
    """Return a digest of the order in which numbers of `weights` lie when repacked here.

    It is found by repacking a group of rows of each. So it is equal where repacked weights are, whatever the processor
    and the version of llama.cpp are called.
    """
    repacking, digest = Repacking(), hashlib.blake2b(digest_size=32)
    try:
        with ggml.log.listening(lambda line: None):  # a line for each slice that is repacked
            for type_id, shape, by_expert in sorted(weights):
                weight = repacking.describe(type_id, shape, by_expert=by_expert)
                digest.update(repr((type_id, shape, by_expert, weight.group_bytes if weight else 0)).encode())
                if weight:
                    rows = np.frombuffer(bytearray(random.Random(1).randbytes(weight.group_bytes)), np.uint8)
                    copy = np.zeros(repacking_bytes(weight.group_bytes), np.uint8)
                    weight.repack(rows.ctypes.data, len(rows), copy.ctypes.data)
                    digest.update(rows.tobytes())
        return digest.hexdigest()
    finally:
        repacking.close()


def types_with_kernels() -> dict[str, int]:
    """Return the types of weights that have a repacked kernel on this processor, and the rows that it computes at once.

    Of matrices whose sizes suit all kernels.
    """
    repacking, found = Repacking(), dict[str, int]()
    try:
        for type_id, kind in TENSOR_TYPES.items():
            if kernel := repacking.kernel(type_id, (_SUITING, _SUITING), by_expert=False):
                found[kind.name] = kernel.rows_together
        return found
    finally:
        repacking.close()


@contextlib.contextmanager
def _description() -> Iterator[int]:
    context = ggml.describing_context(_TENSORS, 1)
    try:
        yield context
    finally:
        ggml.functions().ggml_free(context)


def _traits(kind: int, buffer: int, type_id: int, shape: tuple[int, ...], *, by_expert: bool) -> int | None:
    """Return the kernel of buffers of type `kind` for a weight; None where there is none, or it needs other sizes."""
    functions = ggml.functions()
    row_elements, rows, experts, *_ = (*shape, 1, 1)
    with _description() as context:
        twin = functions.ggml_new_tensor_3d(context, type_id, row_elements, rows, experts)
        if functions.ggml_backend_buft_get_alloc_size(kind, twin) != functions.ggml_nbytes(twin):
            return None
        ggml.tensor_at(twin).buffer = buffer
        if by_expert:
            inputs = functions.ggml_new_tensor_3d(context, 0, row_elements, 1, TOKENS)
            chosen = functions.ggml_new_tensor_2d(context, ggml.I32, min(experts, 4), TOKENS)
            product = functions.ggml_mul_mat_id(context, twin, inputs, chosen)
        else:
            inputs = functions.ggml_new_tensor_3d(context, 0, row_elements, TOKENS, experts)
            product = functions.ggml_mul_mat(context, twin, inputs)
        is_there = functions.ggml_backend_dev_supports_op(ggml.processor(), product)
    return _kernel_of(buffer, type_id, (row_elements, rows, experts)) if is_there else None


def _kernel_of(buffer: int, type_id: int, shape: tuple[int, int, int]) -> int | None:
    """Return what `buffer` says is the kernel for a weight of `shape`, which it need not have room for."""
    functions = ggml.functions()
    with _description() as context:
        holder = functions.ggml_new_tensor_2d(context, 0, 1, 1)
        ggml.tensor_at(holder).buffer = buffer
        ggml.tensor_at(holder).data = functions.ggml_backend_buffer_get_base(buffer)
        twin = functions.ggml_new_tensor_3d(context, type_id, *shape)
        ggml.tensor_at(twin).view_src = holder
        functions.ggml_backend_view_init(twin)
        traits: int | None = ggml.tensor_at(twin).extra
        return traits


def _rows_together(buffer: int, type_id: int, shape: tuple[int, ...], traits: int) -> int:
    """Return the rows that a kernel computes at once: the fewest that get the same one as all of them; 0 for none.

    There are none where a slice of rows might tear a group apart.
    """
    count = 2
    while count <= min(MOST_ROWS_TOGETHER, shape[1]):
        if shape[1] % count == 0 and _kernel_of(buffer, type_id, (shape[0], count, 1)) == traits:
            return count
        count *= 2
    return 0
