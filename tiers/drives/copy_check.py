"""Whether files are copies of a model's: their lengths, all of their headers, and samples of their weights.

Reading all of both would take as long as two first tokens. So 64 KiB are compared in each of 64 equal parts of the
weights, at a place that is drawn anew each time; a small file is compared whole. Copies that differ in length, in a
header, or in much of what they hold are found for certain, a single bit that fell over only by chance.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

from edge_run.base.errors import ConfigError, ModelFileError
from edge_run.base.files.identity import FileIdentity
from edge_run.base.units import KIB, MIB, round_down
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_header import Shard
from edge_run.tiers.source import SourceFile

SAMPLES, SAMPLE_BYTES = 64, 64 * KIB
_READ_BYTES = 2 * MIB


def find_copies(gguf: GgufModel, also: Path) -> list[Path]:
    """Return the copies of the shards of `gguf`. Raises ConfigError, ModelFileError or TierReadError.

    also: the copy's only or first file, or the folder that holds the copies under the names of the model's own.
    """
    if also.is_dir():
        copies = [also / shard.path.name for shard in gguf.shards]
    else:
        copies = [shard.path for shard in read_gguf(also).shards]
    if len(copies) != len(gguf.shards):
        raise ModelFileError(f"{also}: {len(copies)} files, no copy of {gguf.shards[0].path}; copy the model again")
    for shard, copy in zip(gguf.shards, copies, strict=True):
        if copy.exists() and os.path.samefile(shard.path, copy):
            raise ConfigError(f"{copy}: is the model itself; name a copy of it on another drive")
    return copies


def check_copy(shard: Shard, copy: Path, draw: random.Random | None = None) -> FileIdentity:
    """Return which file `copy` is. Raises ModelFileError unless it is found to be one of `shard`; see above.

    draw: where samples are taken; None: anywhere.
    """
    with contextlib.closing(SourceFile(shard.path)) as model, contextlib.closing(SourceFile(copy)) as other:
        if other.size_bytes != model.size_bytes:
            raise _differs(shard, copy, f"{other.size_bytes} bytes instead of {model.size_bytes}")
        buffers = _libc.map_anonymous(2 * _READ_BYTES)
        try:
            for offset, length in _compared(shard, draw or random.Random()):
                contents = []
                for source, buffer in ((model, buffers), (other, buffers + _READ_BYTES)):
                    n_bytes = source.read_into(buffer, length, offset)
                    contents.append(_libc.view(buffer, n_bytes))
                if contents[0] != contents[1]:
                    what = "another header" if offset < shard.data_offset else f"another content at byte {offset}"
                    raise _differs(shard, copy, what)
        finally:
            _libc.unmap(buffers, 2 * _READ_BYTES)
        other.check_unchanged()
        return other.identity


def _differs(shard: Shard, copy: Path, how: str) -> ModelFileError:
    return ModelFileError(f"{copy}: no copy of {shard.path}: {how}; copy the model again")


def _compared(shard: Shard, draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of what is compared, in whole pages."""
    weights_bytes = shard.size_bytes - shard.data_offset
    part_bytes = round_down(weights_bytes // SAMPLES, _libc.PAGE)
    is_whole = part_bytes <= SAMPLE_BYTES
    for offset in range(0, shard.size_bytes if is_whole else shard.data_offset, _READ_BYTES):
        yield offset, _READ_BYTES
    start = shard.data_offset
    for part in range(0 if is_whole else SAMPLES):
        place = start + part * part_bytes + draw.randrange(part_bytes - SAMPLE_BYTES)
        yield round_down(place, _libc.PAGE), SAMPLE_BYTES
    if not is_whole:
        yield round_down(shard.size_bytes - 1, _libc.PAGE), _libc.PAGE
