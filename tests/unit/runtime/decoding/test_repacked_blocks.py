"""Blocks of a packed file with repacked weights, read in place of a shard's own, wherever reads begin and end."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.files.identity import FileIdentity
from edge_run.runtime.decoding.repacked_blocks import RepackedBlocks
from edge_run.tiers import _libc
from edge_run.tiers._libc import PAGE
from edge_run.tiers.packed_file import PackedFile
from edge_run.tiers.packed_index import ENTRY, SMALLEST_BLOCK_BYTES, Facts, check_blocks
from edge_run.tiers.source import SourceFile
from packing import model_of

BLOCK = SMALLEST_BLOCK_BYTES
SHARDS = (5 * BLOCK + 100, 3 * BLOCK)
BLOCKS = {0: (1, 2, 5), 1: (0, 2)}  # of the first shard the last one, which is no whole page


def written(folder: Path) -> tuple[list[Path], PackedFile, list[bytes]]:
    """Write two shards and a packed file of some blocks; return them, and what the shards are to be read as."""
    random, paths, expected = np.random.default_rng(1), list[Path](), list[bytes]()
    packed, table, raw_bytes = bytearray(PAGE), bytearray(), 0
    for shard, size_bytes in enumerate(SHARDS):
        paths.append(folder / f"shard-{shard}")
        content = bytearray(random.bytes(size_bytes))
        paths[-1].write_bytes(content)
        for number in BLOCKS[shard]:
            block = random.bytes(len(content[number * BLOCK : (number + 1) * BLOCK]))
            content[number * BLOCK : number * BLOCK + len(block)] = block
            padded = block + bytes(-len(block) % PAGE)
            table += ENTRY.pack(shard, number, len(packed), len(padded), 0)
            packed += padded
            raw_bytes += len(block)
        expected.append(bytes(content))
    path = folder / "packed"
    path.write_bytes(packed)
    facts = Facts("0" * 64, BLOCK, 1, ("x",), raw_bytes, len(packed) - PAGE, "0" * 64)
    return paths, PackedFile(path, facts, bytes(table), FileIdentity.of(path.stat())), expected


def test_reads_are_of_both_files(tmp_path: Path) -> None:
    paths, packed, expected = written(tmp_path)
    most = max(SHARDS) + 2 * PAGE
    memory = _libc.map_anonymous(most)
    try:
        with closing(SourceFile(packed.path)) as file:
            for shard, path in enumerate(paths):
                with closing(SourceFile(path)) as plain:
                    source = RepackedBlocks(plain, shard, packed, file)
                    end = -(-SHARDS[shard] // PAGE) * PAGE
                    bounds = sorted({0, end, *(n * BLOCK + d * PAGE for n in range(6) for d in (-1, 0, 1))})
                    for start, stop in itertools.combinations([b for b in bounds if 0 <= b <= end], 2):
                        wanted = expected[shard][start:stop]
                        assert source.read_into(memory, stop - start, start) >= len(wanted)
                        assert bytes(_libc.view(memory, len(wanted))) == wanted, f"{start} to {stop}"
                        pieces = [(memory + PAGE, PAGE), (memory + 3 * PAGE, stop - start - PAGE)]
                        if stop - start > PAGE:
                            source.read_pieces(pieces, start)
                            halves = (_libc.view(at, length) for at, length in pieces)
                            assert b"".join(map(bytes, halves))[: len(wanted)] == wanted
    finally:
        _libc.unmap(memory, most)


def test_blocks_of_another_length_are_damaged(tmp_path: Path) -> None:
    gguf = model_of(tmp_path, [[(0, BLOCK)]])  # of two bytes each
    (tensor,), (shard,) = gguf.tensors, gguf.shards
    first, last = tensor.offset // BLOCK, (tensor.offset + tensor.size_bytes - 1) // BLOCK
    lengths = [min(BLOCK, shard.size_bytes - number * BLOCK) for number in range(first, last + 1)]
    facts = Facts("0" * 64, BLOCK, 1, (tensor.name,), sum(lengths), 1, "0" * 64)
    padded = [-(-length // PAGE) * PAGE for length in lengths]
    for change in (0, -PAGE):
        sizes = [*padded[:-1], padded[-1] + change]
        table = b"".join(ENTRY.pack(0, first + i, PAGE, size, 0) for i, size in enumerate(sizes))
        if not change:
            check_blocks(facts, table, gguf)
            continue
        with pytest.raises(ValueError, match="not as long as those of its model"):
            check_blocks(facts, table, gguf)
