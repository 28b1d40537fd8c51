"""Conversions: each part once, when all chunks that hold it were read, and before the last of them counts as read."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest

from edge_run.runtime.decoding.conversions import Conversions
from edge_run.tiers import _libc
from edge_run.tiers.readers import Readers
from edge_run.tiers.residency import Residency
from edge_run.tiers.source import SourceFile
from edge_run.tiers.weights import Weights
from mapped import PAGE, content, mapped, write_random

CHUNK = 4 * PAGE


@pytest.mark.parametrize("seed", range(5))
def test_all_of_a_file_is_converted_as_it_is_read(tmp_path: Path, seed: int) -> None:
    """Parts of random sizes, some within a page and some over many chunks, by four readers."""
    choose = random.Random(seed)
    size_bytes = 40 * CHUNK + choose.randrange(CHUNK)
    data = write_random(tmp_path / "file", size_bytes)
    with mapped([size_bytes], CHUNK, shift_bytes=choose.randrange(4) * PAGE) as address_space:
        base, ends = address_space.spans[0].base, {0, size_bytes}
        ends.update(choose.randrange(size_bytes) for _ in range(60))
        borders = sorted(ends)
        parts = [(base + start, stop - start) for start, stop in itertools.pairwise(borders)]
        parts = parts[::2]  # what lies between stays as it is
        converted: list[int] = []

        def convert(number: int) -> None:
            address, length = parts[number]
            memory = _libc.view(address, length)
            memory[:] = bytes(memory)[::-1]
            converted.append(number)

        conversions = Conversions(address_space, parts, convert)
        chunks = range(address_space.n_chunks)
        readers, source = Readers(4), SourceFile(tmp_path / "file")
        try:
            state = Residency(len(chunks), chunks, chunks, 0)
            weights = Weights(address_space, [source], readers, state, on_read=conversions.note_read)
            assert not conversions.is_done
            weights.start()
            weights.acquire(chunks)
            assert conversions.is_done
            wanted = bytearray(data)
            for address, length in parts:
                start = address - base
                wanted[start : start + length] = data[start : start + length][::-1]
            assert content(base, size_bytes) == bytes(wanted)
            assert sorted(converted) == list(range(len(parts)))
        finally:
            readers.close()
            source.close()


def test_a_part_waits_for_its_last_chunk() -> None:
    with mapped([4 * CHUNK], CHUNK) as address_space:
        base, done = address_space.spans[0].base, list[int]()
        parts = [(base, 10), (base + CHUNK - 1, 2), (base + 3 * CHUNK, CHUNK)]
        conversions = Conversions(address_space, parts, done.append)
        conversions.note_read([1])
        assert done == []
        conversions.note_read([0, 2])
        assert done == [0, 1]
        conversions.note_read([3])
        assert done == [0, 1, 2]


def test_threads_that_read_at_once_convert_each_part_once() -> None:
    with mapped([64 * CHUNK], CHUNK) as address_space:
        base, done = address_space.spans[0].base, list[int]()
        parts = [(base + i * CHUNK // 2, CHUNK // 2) for i in range(128)]
        conversions = Conversions(address_space, parts, done.append)
        threads = [
            threading.Thread(target=lambda i=i: [conversions.note_read([c]) for c in range(i, 64, 4)])  # type: ignore[misc]
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == list(range(128))
