"""An address space without llama.cpp: anonymous memory as large as a file, in chunks, as if a stub were mapped."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_run.base.units import round_up
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace, MappedSpan

PAGE = _libc.PAGE


def write_random(path: Path, size_bytes: int, seed: int = 0) -> bytes:
    """Write a file of random bytes, so that no two pages are alike, and return its bytes."""
    data = random.Random(seed).randbytes(size_bytes)
    path.write_bytes(data)
    return data


@contextmanager
def mapped(
    sizes_bytes: Sequence[int], chunk_bytes: int, *, shift_bytes: int = 0, hole: range | None = None
) -> Iterator[AddressSpace]:
    """Claim memory for shards of these sizes, `shift_bytes` off the grid of chunks; the first may have a hole."""
    areas = []
    spans = []
    for shard, size_bytes in enumerate(sizes_bytes):
        length = round_up(size_bytes, PAGE)
        area = _libc.map_anonymous(length + 2 * chunk_bytes + shift_bytes)
        areas.append((area, length + 2 * chunk_bytes + shift_bytes))
        base = round_up(area, chunk_bytes) + shift_bytes
        if shard == 0 and hole:
            spans.append(MappedSpan(shard, base, base + hole.start, base))
            spans.append(MappedSpan(shard, base + hole.stop, base + length, base))
        else:
            spans.append(MappedSpan(shard, base, base + length, base))
    address_space = AddressSpace(spans, chunk_bytes)
    address_space.reserve()
    try:
        yield address_space
    finally:
        for area in areas:
            _libc.unmap(*area)


def content(address: int, length: int) -> bytes:
    """The bytes of memory that is readable; of other memory this ends the process."""
    return bytes(_libc.view(address, length))


def is_readable(address: int) -> bool:
    """Whether the byte at `address` can be read: the kernel says so where reading it would end the process."""
    memory = os.memfd_create("is-readable")
    try:
        os.write(memory, _libc.view(address, 1))
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    else:
        return True
    finally:
        os.close(memory)


def advice_at(address: int) -> set[str]:
    """The flags of the mapping that holds `address`, as two-letter codes of /proc/self/smaps."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            start, stop = (int(text, 16) for text in key.split("-"))
            is_here = start <= address < stop
        elif is_here and key == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"{address:#x} is in no mapping")
