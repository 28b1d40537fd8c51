"""Files of saved rows and snapshots: written once, as a whole or not at all, and checked when they are read.

A file has a head (what it is, and the tokens of its rows), the bytes of the memory parts one after another, and a CRC
over both. Nothing in a file says how much is read or where to: sizes come from the context that reads it, and a file
that says otherwise is damaged. So is one whose tokens are not those that are looked for, or whose CRC is wrong.
"""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_run.base.files.whole import whole_file
from edge_run.base.units import round_down
from edge_run.tiers import _libc
from edge_run.tiers.kv.layout import MemoryPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMAT = 3  # raised, too, where what was kept before may be wrong
_MAGIC = b"EDGEROWS"
_HEAD = struct.Struct("<8sII16sQ")  # magic, format, tokens, the model's key, bytes of memory
_SUM = struct.Struct("<I")


class DamagedRows(ValueError):
    """A file that is not what its name says."""


class RowsVoid(Exception):
    """The rows changed while they were copied."""


class RowsHead(NamedTuple):
    """What a file is of: the model's key, the tokens of its rows, the bytes of its memory parts."""

    key: bytes
    tokens: Sequence[int]
    part_bytes: int

    def packed(self) -> bytes:
        """Return it as a file has it."""
        head = _HEAD.pack(_MAGIC, FORMAT, len(self.tokens), self.key, self.part_bytes)
        return head + struct.pack(f"<{len(self.tokens)}i", *self.tokens)

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return _HEAD.size + 4 * len(self.tokens) + self.part_bytes + _SUM.size


def write_rows(path: Path, head: RowsHead, copies: Iterable[bytes | memoryview]) -> int:
    """Write a file for this user alone; return its size. Raises OSError, and RowsVoid where `copies` does.

    copies: the bytes of the memory parts. The file is there once all of it is on the disk.
    """
    with whole_file(path, 0o600) as draft, draft.open("r+b", buffering=0) as file:
        total = size_bytes = 0
        for piece in itertools.chain([head.packed()], copies):
            size_bytes += _write(file.fileno(), piece)
            total = zlib.crc32(piece, total)
        size_bytes += _write(file.fileno(), _SUM.pack(total))
        _sync(file.fileno())
    return size_bytes


def read_rows(
    path: Path,
    head: RowsHead,
    parts: Iterable[MemoryPart],
    check: Callable[[], None],
    place: Callable[[MemoryPart, bytes], None],
) -> None:
    """Read a file into memory. Raises DamagedRows or OSError: then what lies there is void, and must not be read.

    check: runs after each part, and may raise. place: puts a part where it belongs, and may raise.
    """
    wanted = head.packed()
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        if os.fstat(descriptor).st_size != head.file_bytes:
            raise DamagedRows(f"{path.name}: is of another size than was written")
        if _read(descriptor, len(wanted)) != wanted:
            raise DamagedRows(f"{path.name}: is not what its name says")
        total = zlib.crc32(wanted)
        for part in parts:
            content = _read(descriptor, part.size_bytes)
            total = zlib.crc32(content, total)
            place(part, content)
            check()
        if _read(descriptor, _SUM.size) != _SUM.pack(total):
            raise DamagedRows(f"{path.name}: its checksum is wrong")
        _libc.forget_pages(descriptor)


def copy_part(part: MemoryPart) -> bytes:
    """Return the bytes of a memory part, strip by strip."""
    if part.n_strips == 1:
        return bytes(_libc.view(part.address, part.strip_bytes))
    return _strips(part).tobytes()


def place_part(part: MemoryPart, content: bytes) -> None:
    """Put the bytes of a memory part where they belong, strip by strip.

    Pages that are zeros already, and are to be, are not written: they may have no memory, as those of a sliding
    window's cells that no token has, which is lent.
    """
    import numpy as np

    memory = _strips(part)
    source = np.frombuffer(content, np.uint8).reshape(memory.shape)
    first = min(part.strip_bytes, -part.address % _libc.PAGE)
    stop = first + round_down(part.strip_bytes - first, _libc.PAGE)
    if part.n_strips > 1 or first == stop:
        memory[:] = source
        return
    memory[0, :first], memory[0, stop:] = source[0, :first], source[0, stop:]
    there, wanted = (pages[0, first:stop].reshape(-1, _libc.PAGE) for pages in (memory, source))
    is_written = wanted.max(axis=1) > 0
    if is_written.all():
        there[:] = wanted
    else:
        is_written |= there.max(axis=1) > 0
        there[is_written] = wanted[is_written]


def clear_part(part: MemoryPart) -> None:
    """Fill a memory part with zeros, as llama.cpp leaves what is not written."""
    place_part(part, bytes(part.size_bytes))


def _strips(part: MemoryPart) -> npt.NDArray[np.uint8]:
    import numpy as np

    stride = part.stride_bytes or part.strip_bytes
    memory = _libc.view(part.address, (part.n_strips - 1) * stride + part.strip_bytes)
    return np.ndarray((part.n_strips, part.strip_bytes), np.uint8, buffer=memory, strides=(stride, 1))


def _read(descriptor: int, length: int) -> bytes:
    content = b""
    while len(content) < length:
        if not (piece := os.read(descriptor, length - len(content))):
            raise DamagedRows("the file ends early")
        content += piece
    return content


def _write(descriptor: int, content: bytes | memoryview) -> int:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    return len(content)


def _sync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)
    _libc.forget_pages(descriptor)
