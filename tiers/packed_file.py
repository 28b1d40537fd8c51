"""Packed files: weights of one model again, to be read instead of the model's own bytes.

A packed file lies beside its model, which is left as it is. It holds blocks of the model's files; a block begins at a
multiple of the block size. Experts are compressed without loss, each block by itself, as two zstd frames with
checksums. One frame has the last bytes of all numbers (sign and exponent), the other the first bytes, which hardly
compress. Weights of models without experts are repacked for the kernels of one kind of processors; their blocks are
pages that are read straight to where they are computed with, padded with zeros after the end of a file, and what else
lies in a block is as it is in the model. These pages are the widest that any machine has; files of earlier versions
have the pages of the machine that packed. The file begins with a fixed head that says where its index is. The index is
written last: JSON and a table of blocks, with a digest. The JSON identifies the model by a hash of its sizes, its
headers, and one page from the middle of every packed tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from edge_run.base.errors import PackedFileError, not_opened, option, reason_of
from edge_run.base.files.identity import FileIdentity
from edge_run.base.units import KIB, MIB
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo
from edge_run.tiers.packed_index import (
    ENTRY,
    PAGES_BYTES,
    READ_BYTES,
    SMALLEST_BLOCK_BYTES,
    Facts,
    alignment_of,
    check_blocks,
    check_table,
    decode_facts,
)
from edge_run.tiers.pieces import read_at

SUFFIX = ".packed"
MAGIC = b"edge-run packed\n"
VERSION = 2
HEAD = struct.Struct(f"<{len(MAGIC)}sIQQQ32s")  # magic, version; index: where, JSON's length, table's length; digest
_MIDDLE_BYTES = 4096  # on every machine, whatever its pages are: packed files are copied with their models
ALIGNMENT_BYTES = PAGES_BYTES[-1]  # of blocks with repacked weights
WORK_BYTES = 256 * KIB  # of a reader that unpacks: what zstd keeps
Block: TypeAlias = "tuple[int, int]"  # the shard, and the number of the block in it
_MOST_JSON_BYTES, _MOST_TABLE_BYTES = 16 * MIB, 256 * MIB


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file whose head and index were checked.

    path: the file.
    facts: the JSON of its index.
    table: the table of its blocks, as in the file.
    identity: that of the file when its index was read.
    is_named: whether the user named the file.
    """

    path: Path
    facts: Facts
    table: bytes
    identity: FileIdentity
    is_named: bool = False

    @property
    def share(self) -> float:
        """The size of the packed blocks over their size before."""
        return self.facts.packed_bytes / self.facts.raw_bytes

    @property
    def alignment_bytes(self) -> int:
        """The pages that blocks with repacked weights are made of."""
        return alignment_of(self.table)

    def memory_bytes(self, n_readers: int) -> int:
        """Return the memory for reading: the table, and for each reader of compressed blocks a read and two blocks."""
        if self.facts.is_repacked:
            return 2 * len(self.table)
        return 2 * len(self.table) + n_readers * (READ_BYTES + 2 * PAGE + 2 * self.facts.block_bytes + WORK_BYTES)


def packed_path(model: Path) -> Path:
    """Return the path where runs look for the packed file of the model at `model`."""
    return model.with_name(model.name + SUFFIX)


def model_key(gguf: GgufModel, names: Sequence[str]) -> str:
    """Return the hash by which a packed file of the tensors `names` identifies its model. Raises ModelFileError."""
    known = {tensor.name: tensor for tensor in gguf.tensors}
    digest = hashlib.blake2b(digest_size=32)
    try:
        for number, shard in enumerate(gguf.shards):
            digest.update(struct.pack("<Q", shard.size_bytes))
            with shard.path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    with contextlib.suppress(OSError):  # advice only
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for start in range(0, shard.data_offset, MIB):
                    digest.update(read_at(file.fileno(), min(MIB, shard.data_offset - start), start))
                for tensor in (known[name] for name in names if name in known and known[name].shard == number):
                    digest.update(read_at(file.fileno(), *_middle(tensor)))
    except OSError as error:
        raise not_opened(error, f"{gguf.shards[0].path}: cannot be read ({reason_of(error)})") from error
    return digest.hexdigest()


def _middle(tensor: TensorInfo) -> tuple[int, int]:
    """Return the length and the offset of a few bytes in the middle of `tensor`."""
    length = min(_MIDDLE_BYTES, tensor.size_bytes)
    return length, tensor.offset + (tensor.size_bytes - length) // 2


def blocks_of(tensors: Sequence[TensorInfo], block_bytes: int) -> list[Block]:
    """Return the blocks that hold any byte of `tensors`, in file order."""
    found = {
        (tensor.shard, number)
        for tensor in tensors
        for number in range(tensor.offset // block_bytes, (tensor.offset + tensor.size_bytes - 1) // block_bytes + 1)
    }
    return sorted(found)


def write_head(index_start: int, index: bytes, table: bytes) -> bytes:
    """Return the head of a packed file whose index (JSON, then the table) begins at `index_start`."""
    return HEAD.pack(MAGIC, VERSION, index_start, len(index), len(table), _digest(index, table))


def _digest(index: bytes, table: bytes) -> bytes:
    digest = hashlib.blake2b(index, digest_size=32)
    digest.update(table)
    return digest.digest()


def write_index(facts: Facts) -> bytes:
    """Return the JSON of an index."""
    return json.dumps(asdict(facts)).encode()


def packed_anew() -> str:
    """Return what to do about a packed file that cannot be used, as advice."""
    return f"make it again with edge-run pack, or {_left_out()}"


def _left_out() -> str:
    return f"leave it out with {option('packed', 'off')}"


def read_packed(path: Path, model_bytes: Sequence[int] = ()) -> PackedFile:
    """Return the packed file at `path`. Raises PackedFileError where it is missing, damaged or of another kind.

    model_bytes: the sizes of the model's files, where they are known: a table for more than that is not read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would wait for ever
            raise PackedFileError(f"{path}: is no file; {_left_out()}")
        with path.open("rb") as file:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size or not head.startswith(MAGIC):
                raise PackedFileError(f"{path}: is no packed file; make one with edge-run pack")
            _, version, start, n_index, n_table, digest = HEAD.unpack(head)
            if version != VERSION:
                raise PackedFileError(
                    f"{path}: was packed by another version of edge-run ({version}, known is {VERSION}); make it again "
                    "with edge-run pack",
                    found=version,
                    needed=VERSION,
                )
            identity = FileIdentity.of(os.fstat(file.fileno()))
            if (
                n_index > _MOST_JSON_BYTES
                or n_table > _MOST_TABLE_BYTES
                or start + n_index + n_table != identity.size_bytes
            ):
                raise _damaged(path, "its index does not end where the file does")
            most_blocks = sum(-(-size // SMALLEST_BLOCK_BYTES) for size in model_bytes)
            if model_bytes and n_table > most_blocks * ENTRY.size:
                n_blocks = n_table // ENTRY.size
                raise _damaged(
                    path, f"or of a larger model: it has {n_blocks:,} blocks, at most {most_blocks:,} can be"
                )
            file.seek(start)
            index, table = file.read(n_index), file.read(n_table)
    except OSError as error:
        raise PackedFileError(f"{path}: cannot be read ({reason_of(error)}); {_left_out()}") from error
    if _digest(index, table) != digest:
        raise _damaged(path, "its index is not the one that was written")
    try:
        facts = decode_facts(index)
        check_table(facts, table, alignment_of(table) if facts.is_repacked else HEAD.size, start)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return PackedFile(path, facts, table, identity)


def find_packed(gguf: GgufModel, wanted: Path | None) -> PackedFile | None:
    """Return the packed file of `gguf`: the one at `wanted`, else the one beside the model, if there is one, else None.

    Raises PackedFileError where the file is another model's, damaged, or named and missing; ModelFileError.
    """
    path = wanted or packed_path(gguf.shards[0].path)
    if wanted is None and not path.exists():
        return None
    sizes = [shard.size_bytes for shard in gguf.shards]
    packed = replace(read_packed(path, sizes), is_named=wanted is not None)
    if packed.facts.model != model_key(gguf, packed.facts.names):
        raise PackedFileError(
            f"{path}: was packed from another model than {gguf.shards[0].path}; {packed_anew()}",
        )
    try:
        check_blocks(packed.facts, packed.table, gguf)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return packed


def _damaged(path: Path, why: str) -> PackedFileError:
    return PackedFileError(f"{path}: damaged, {why}; {packed_anew()}")
