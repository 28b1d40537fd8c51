"""Stubs: files that look like the model to llama.cpp and hold nothing but its header.

llama.cpp maps the files that it opens, and populates the mapping; with the model's own file, that would read all of it.
A stub is the model's header, then a hole up to the full size. After llama.cpp has read the header, and before it maps
the file, `cut` shortens the stub, so that there is nothing to populate. `AddressSpace.reserve` then replaces the
mapping by our memory. Stubs lie in memory, so nothing can be left on a disk. The hole must never be read, as each page
that is touched takes memory: weights that llama.cpp copies while it loads (to a GPU, or repacked) need another way.

A header may go without its vocabulary where only the model's shape is needed: most of the time of opening a model goes
into reading the vocabulary. Without one, a model loads in milliseconds, if llama.cpp is told the number of tokens.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from edge_run.base.closing import Closing
from edge_run.base.errors import TierReadError, from_system, not_opened, reason_of
from edge_run.base.units import round_up
from edge_run.tiers import _libc
from edge_run.tiers.address_space import MappedSpan
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import DEFAULT_ALIGNMENT_BYTES, MAGIC
from edge_run.tiers.gguf_header import ArrayValue, Shard

_numbers = itertools.count()
_VOCABULARY_PREFIX = "tokenizer."
_COUNTS = struct.Struct("<IQQ")  # version, tensors, metadata entries


class Stubs(Closing):
    """The stubs of one model, which go away on closing. A context manager.

    paths: paths to the stubs, for this process only.
    heads: what the stubs begin with, where that is not the header of their shard.

    Raises ModelFileError when the model cannot be opened; TierReadError when this process may not have files as long as
    the model, or the drive fails; BudgetError when memory is out.
    """

    def __init__(self, shards: Sequence[Shard], heads: Sequence[bytes] = ()) -> None:
        self._shards = tuple(shards)
        self._head_bytes = [len(head) for head in heads] or [shard.data_offset for shard in shards]
        self._numbers: dict[bytes, int] = {}
        self._stack = contextlib.ExitStack()
        self._files: list[BinaryIO] = []
        try:
            for number, shard in enumerate(self._shards):
                self._write(self._new(number), shard, heads[number] if heads else None)
        except BaseException:
            self.close()
            raise
        self.paths = [Path(f"/proc/self/fd/{file.fileno()}") for file in self._files]

    def _new(self, number: int) -> BinaryIO:
        name = f"edge-run-stub-{next(_numbers)}"
        file = self._stack.enter_context(os.fdopen(_libc.memory_file(name), "wb"))
        self._files.append(file)
        self._numbers[f"/memfd:{name} (deleted)".encode()] = number
        return file

    def _write(self, stub: BinaryIO, shard: Shard, head: bytes | None) -> None:
        head_bytes = shard.data_offset if head is None else len(head)
        size_bytes = head_bytes + shard.size_bytes - shard.data_offset
        try:
            source = shard.path.open("rb")
        except OSError as error:
            why = reason_of(error)
            raise not_opened(error, f"{shard.path}: cannot be opened ({why}); check its permissions") from error
        with source:
            try:
                if head is None:
                    _copy(source, stub, head_bytes)
                else:
                    stub.write(head)
                stub.truncate(size_bytes)
            except OSError as error:
                what = (
                    f"{shard.path}: cannot make a file of {size_bytes:,} bytes in its place, a hole for the most part"
                )
                if error.errno != errno.EFBIG:
                    raise from_system(error, what) from error
                raise TierReadError(
                    f"{what} ({reason_of(error)}); raise the limit on the length of files (ulimit -f)",
                    needed_bytes=size_bytes,
                    errno=error.errno,
                ) from error

    def cut(self) -> None:
        """Shorten every stub to its head."""
        for file, head_bytes in zip(self._files, self._head_bytes, strict=True):
            file.truncate(head_bytes)

    def spans(self) -> list[MappedSpan]:
        """Return the parts of the stubs that this process has mapped."""
        spans = []
        for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
            addresses, _, offset, _, _, *name = line.split(None, 5) or [b""] * 5
            shard = self._numbers.get(name[0]) if name else None
            if shard is not None:
                start, stop = (int(text, 16) for text in addresses.split(b"-"))
                shift = self._head_bytes[shard] - self._shards[shard].data_offset
                spans.append(MappedSpan(shard, start, stop, start - int(offset, 16) + shift))
        return spans

    def close(self) -> None:
        """Close the stubs, which frees them. Idempotent."""
        self._stack.close()


def _copy(source: BinaryIO, target: BinaryIO, size_bytes: int) -> None:
    """Copy the first `size_bytes` bytes, or all there are, within the kernel."""
    copied = 0
    while more := os.sendfile(target.fileno(), source.fileno(), copied, size_bytes - copied):
        copied += more


def outline_heads(gguf: GgufModel) -> list[bytes]:
    """Return each shard's bytes before its tensor data, those of the first without the vocabulary. Raises OSError."""
    heads = []
    for number, shard in enumerate(gguf.shards):
        with shard.path.open("rb") as file:
            head = file.read(shard.data_offset)
        heads.append(_without_vocabulary(gguf, head) if number == 0 else head)
    return heads


def outline_metadata(gguf: GgufModel) -> dict[str, int | str]:
    """Return the metadata that llama.cpp needs in the vocabulary's place."""
    tokens = gguf.metadata.get(f"{_VOCABULARY_PREFIX}ggml.tokens")
    known: dict[str, int | str] = {f"{_VOCABULARY_PREFIX}ggml.model": "no_vocab"}
    if isinstance(types := gguf.metadata.get(key := f"{_VOCABULARY_PREFIX}ggml.token_type_count"), int):
        known[key] = types  # of which encoders have a table
    return known | {f"{gguf.architecture}.vocab_size": tokens.count} if isinstance(tokens, ArrayValue) else known


def _without_vocabulary(gguf: GgufModel, head: bytes) -> bytes:
    start = len(MAGIC)
    version, n_tensors, _ = _COUNTS.unpack_from(head, start)
    kept = [entry for entry in gguf.entries if not entry.key.startswith(_VOCABULARY_PREFIX)]
    last = gguf.entries[-1]
    alignment_bytes = gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    assert isinstance(alignment_bytes, int)
    parts = [MAGIC, _COUNTS.pack(version, n_tensors, len(kept))]
    parts += [head[entry.start : entry.start + entry.size_bytes] for entry in kept]
    parts.append(head[last.start + last.size_bytes : gguf.shards[0].header_bytes])
    outline = b"".join(parts)
    return outline.ljust(round_up(len(outline), alignment_bytes), b"\0")
