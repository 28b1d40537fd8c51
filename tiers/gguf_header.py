"""One GGUF file's header: its metadata entries and its tensors, each with its extent in the file.

The header of a single file is checked by llama.cpp's own rules for the layout, so that a broken file is refused, with
figures, before llama.cpp sees it. `tiers/gguf.py` joins several shards to one model; `tiers/gguf_format.py` decodes
bytes and counts.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from edge_run.base.errors import ModelFileError, not_opened, reason_of
from edge_run.base.files.identity import FileIdentity
from edge_run.base.units import format_size, round_up
from edge_run.tiers.gguf_format import (
    ARRAY,
    DEFAULT_ALIGNMENT_BYTES,
    FETCH_AGAIN,
    MAGIC,
    MAX_ALIGNMENT_BYTES,
    MAX_DIMENSIONS,
    MAX_ENTRIES,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_TENSOR_NAME_BYTES,
    SCALARS,
    STRING,
    SUPPORTED_VERSIONS,
    TENSOR_TYPES,
    UINT32,
    WHOLE_NUMBERS,
    HeaderCursor,
    broken_header,
)

_SMALLEST_ENTRY_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 4 + 8
_SHAPE_TYPE_OFFSET = [struct.Struct(f"<{n}QIQ") for n in range(MAX_DIMENSIONS + 1)]
_LARGEST_DIMENSION = (1 << 63) - 1
MOST_LAYERS = 512  # llama.cpp's


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """A metadata array that was skipped: `count` elements of the metadata type `type_id`.

    largest: of whole numbers that are as few as layers can be, the largest; 0 of others.
    """

    type_id: int
    count: int
    largest: int = 0


MetadataValue = int | float | bool | str | ArrayValue


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One metadata key and its value.

    key: its name.
    type_id: the metadata type of its value.
    value: what was read.
    start: the offset of the entry in the file.
    size_bytes: the length of key, type and value in the file.
    """

    key: str
    type_id: int
    value: MetadataValue
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    name: its name in the file.
    shape: its dimensions in ggml's order, the length of a row first.
    type_id: its type, a key of `TENSOR_TYPES`.
    shard: the number of its shard.
    offset: its first byte in the shard's file.
    size_bytes: its length.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    shard: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model.

    path: the file.
    size_bytes: its length.
    data_offset: where tensor data starts, which is aligned.
    header_bytes: the length of the header before it.
    identity: that of the file when its header was read.
    """

    path: Path
    size_bytes: int
    data_offset: int
    header_bytes: int
    identity: FileIdentity | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Header:
    """One GGUF file's header.

    shard: the file.
    version: the version of the format.
    alignment_bytes: every tensor's offset within the data is a multiple of it.
    entries: the metadata.
    tensors: the tensors, in file order.
    """

    shard: Shard
    version: int
    alignment_bytes: int
    entries: tuple[MetadataEntry, ...]
    tensors: tuple[TensorInfo, ...]

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        """The entries as a dictionary, in file order."""
        return {entry.key: entry.value for entry in self.entries}


def read_header(path: Path, shard: int = 0) -> Header:
    """Return the header of the file at `path`, which is shard number `shard`. Raises like `read_gguf`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelFileError(f"{path}: {kind}, a GGUF file is needed; give the path of the .gguf file")
        file = path.open("rb", buffering=0)
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise not_opened(error, f"{path}: cannot open: {reason}; check the path and its permissions") from error
    with file:
        identity = FileIdentity.of(os.fstat(file.fileno()))
        return _read_header(HeaderCursor(file, path, identity.size_bytes), shard, identity)


def _read_header(cursor: HeaderCursor, shard: int, identity: FileIdentity) -> Header:
    version = _read_version(cursor)
    n_tensors = cursor.unsigned64("the number of tensors")
    n_entries = cursor.unsigned64("the number of metadata entries")
    needed_bytes = cursor.position + n_tensors * _SMALLEST_TENSOR_BYTES + n_entries * _SMALLEST_ENTRY_BYTES
    if needed_bytes > cursor.size_bytes:
        finding = f"{n_tensors:,} tensors and {n_entries:,} metadata entries take at least {needed_bytes:,} bytes"
        finding = f"{finding}, the file has {cursor.size_bytes:,}"
        raise broken_header(cursor.path, finding, found_bytes=cursor.size_bytes, needed_bytes=needed_bytes)
    if max(n_tensors, n_entries) > MAX_ENTRIES:
        finding = f"{n_tensors:,} tensors and {n_entries:,} metadata entries, {MAX_ENTRIES:,} of each make sense"
        raise broken_header(cursor.path, finding, found=max(n_tensors, n_entries), needed=MAX_ENTRIES)
    entries = tuple(_read_entry(cursor, number) for number in range(n_entries))
    _check_unique(cursor.path, [entry.key for entry in entries], "metadata key")
    alignment_bytes = _alignment_bytes(cursor.path, entries)
    relative = [_read_tensor(cursor, number, shard) for number in range(n_tensors)]
    _check_unique(cursor.path, [tensor.name for tensor in relative], "tensor")
    header_bytes = cursor.position
    if header_bytes > MAX_HEADER_BYTES:
        finding = f"it has {header_bytes:,} bytes, at most {MAX_HEADER_BYTES:,} make sense"
        raise broken_header(cursor.path, finding, found_bytes=header_bytes, needed_bytes=MAX_HEADER_BYTES)
    data_offset = round_up(header_bytes, alignment_bytes) if relative else header_bytes
    layout = Shard(cursor.path, cursor.size_bytes, data_offset, header_bytes, identity)
    return Header(layout, version, alignment_bytes, entries, _place(relative, layout, alignment_bytes))


def _read_version(cursor: HeaderCursor) -> int:
    if cursor.size_bytes == 0:
        raise ModelFileError(f"{cursor.path}: empty (0 bytes), not a GGUF; {FETCH_AGAIN}", found_bytes=0)
    magic = cursor.take(min(len(MAGIC), cursor.size_bytes), "the magic")
    if magic != MAGIC:
        raise ModelFileError(
            f"{cursor.path}: not a GGUF: starts with {magic!r}, {MAGIC!r} is needed; give a .gguf file, or convert the "
            "model with llama.cpp's convert_hf_to_gguf.py",
        )
    version = cursor.unsigned32("the version")
    if version and version & 0xFFFF == 0:
        raise ModelFileError(
            f"{cursor.path}: a big-endian GGUF, a little-endian one is needed; convert it with gguf-convert-endian",
            found=version,
        )
    if version not in SUPPORTED_VERSIONS:
        raise ModelFileError(
            f"{cursor.path}: GGUF version {version:,}, versions 2 and 3 are supported; convert the model again with a "
            "current llama.cpp",
            found=version,
        )
    return version


def _read_entry(cursor: HeaderCursor, number: int) -> MetadataEntry:
    start = cursor.position
    key = cursor.text(f"the key of metadata entry {number}", MAX_KEY_BYTES)
    type_id = cursor.unsigned32(f"the type of {key!r:.100}")
    value: MetadataValue
    if type_id == ARRAY:
        value = _skip_array(cursor, key)
    elif type_id == STRING:
        value = cursor.text(f"the value of {key!r:.100}", is_strict=False)
    elif type_id in SCALARS:
        value = cursor.scalar(type_id, f"the value of {key!r:.100}")
    else:
        raise _unknown_metadata_type(cursor.path, key, type_id)
    return MetadataEntry(key, type_id, value, start, cursor.position - start)


def _skip_array(cursor: HeaderCursor, key: str) -> ArrayValue:
    what = f"the array {key!r:.100}"
    type_id = cursor.unsigned32(f"the type of {what}")
    count = cursor.unsigned64(f"the length of {what}")
    if type_id == STRING:
        cursor.skip_strings(count, what)
    elif type_id in WHOLE_NUMBERS and 0 < count <= MOST_LAYERS:
        return ArrayValue(type_id, count, max(int(cursor.scalar(type_id, what)) for _ in range(count)))
    elif type_id in SCALARS:
        cursor.skip(count * SCALARS[type_id].size, what)
    else:
        raise _unknown_metadata_type(cursor.path, key, type_id)
    return ArrayValue(type_id, count)


def _unknown_metadata_type(path: Path, key: str, type_id: int) -> ModelFileError:
    finding = f"{key!r:.100} has the value type {type_id}, types 0 to 12 are known, and no array in an array"
    return broken_header(path, finding, found=type_id)


def _alignment_bytes(path: Path, entries: tuple[MetadataEntry, ...]) -> int:
    for entry in entries:
        if entry.key == "general.alignment":
            value = entry.value
            is_power = isinstance(value, int) and value.bit_count() == 1 and value <= MAX_ALIGNMENT_BYTES
            if entry.type_id != UINT32 or not isinstance(value, int) or not is_power:
                finding = f"general.alignment is {value!r:.100} of value type {entry.type_id}"
                needed = f"a power of two of type {UINT32} is needed, at most {MAX_ALIGNMENT_BYTES:,}"
                raise broken_header(path, f"{finding}, {needed}")
            return value
    return DEFAULT_ALIGNMENT_BYTES


def _read_tensor(cursor: HeaderCursor, number: int, shard: int) -> TensorInfo:
    """Return the next tensor description, its offset still counted from the start of the tensor data."""
    path, name = cursor.path, cursor.text(f"the name of tensor {number}", MAX_TENSOR_NAME_BYTES)
    n_dimensions = cursor.unsigned32(f"the dimensions of tensor {name!r}")
    if n_dimensions > MAX_DIMENSIONS:
        finding = f"tensor {name!r} has {n_dimensions:,} dimensions, at most {MAX_DIMENSIONS} are possible"
        raise broken_header(path, finding, found=n_dimensions, needed=MAX_DIMENSIONS)
    what = f"the shape, type and offset of tensor {name!r}"
    *extents, type_id, offset = cursor.unpack(_SHAPE_TYPE_OFFSET[n_dimensions], what)
    shape = tuple(extents)
    if type_id not in TENSOR_TYPES:
        raise ModelFileError(
            f"{path}: tensor {name!r} has the ggml type {type_id}, edge-run knows those up to {max(TENSOR_TYPES)} that "
            "ggml still has; update edge-run, or quantise the model to another type",
            found=type_id,
        )
    kind = TENSOR_TYPES[type_id]
    if any(extent > _LARGEST_DIMENSION for extent in shape) or (shape or (1,))[0] % kind.block_elements:
        finding = f"tensor {name!r} of type {kind.name} has the shape {shape}, rows of a multiple of"
        finding = f"{finding} {kind.block_elements} are needed"
        raise broken_header(path, finding)
    return TensorInfo(name, shape, type_id, shard, offset, kind.size_bytes(math.prod(shape)))


def _check_unique(path: Path, names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen or not name:
            finding = f"{what} {name!r:.100} is there twice" if name else f"a {what} has no name"
            raise broken_header(path, finding)
        seen.add(name)


def _place(relative: list[TensorInfo], shard: Shard, alignment_bytes: int) -> tuple[TensorInfo, ...]:
    """Return the tensors with absolute offsets. Raises ModelFileError where they overlap or end beyond the file."""
    expected = 0
    placed = []
    for tensor in relative:
        if tensor.offset != expected:
            if tensor.offset % alignment_bytes:
                reason = f"not a multiple of the alignment, {alignment_bytes}"
            elif tensor.offset < expected:
                reason = f"overlapping the tensor before it, which ends at {expected:,}"
            else:
                reason = f"leaving a gap after the tensor before it, which ends at {expected:,}"
            finding = f"tensor {tensor.name!r} starts at data byte {tensor.offset:,}, {reason}"
            raise broken_header(shard.path, finding, found_bytes=tensor.offset, needed_bytes=expected)
        placed.append(replace(tensor, offset=shard.data_offset + tensor.offset))
        expected += round_up(tensor.size_bytes, alignment_bytes)
    needed_bytes = max((tensor.offset + tensor.size_bytes for tensor in placed), default=0)
    if needed_bytes > shard.size_bytes:
        raise ModelFileError(
            f"{shard.path}: truncated: the tensors end at byte {needed_bytes:,}, the file has {shard.size_bytes:,} "
            f"({format_size(needed_bytes - shard.size_bytes)} missing); {FETCH_AGAIN}",
            found_bytes=shard.size_bytes,
            needed_bytes=needed_bytes,
        )
    return tuple(placed)
