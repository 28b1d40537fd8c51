"""Packed files: whatever is read through one is what the model's own files have, or an error, and never other bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import EdgeRunError
from edge_run.runtime.tools import pack as module
from edge_run.runtime.tools.pack import pack
from edge_run.tiers import _libc
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.packed import PackedBlocks, PackedSource
from edge_run.tiers.packed_file import find_packed, packed_path
from edge_run.tiers.source import SourceFile
from packing import N_EXPERTS, model_of

MOST_PAGES = 400
tensors = st.lists(
    st.tuples(st.integers(0, 300).map(lambda n: 32 * n), st.integers(1, 20_000).map(lambda n: n * N_EXPERTS)),
    min_size=1,
    max_size=3,
)
models = st.tuples(st.lists(tensors, min_size=1, max_size=2), st.binary(max_size=7))
reads = st.lists(st.tuples(st.integers(0, MOST_PAGES), st.integers(1, MOST_PAGES)), min_size=1, max_size=8)


def packed_model(folder: Path, shards: list[list[tuple[int, int]]], tail: bytes) -> GgufModel:
    gguf = model_of(folder, shards, tail=tail)
    everything = mock.patch.object(module, "MOST_SHARE", 9.0)  # also tensors that are too small to gain anything
    with everything, mock.patch.object(module, "read_gguf", return_value=gguf):
        pack(gguf.shards[0].path)
    return gguf


@contextmanager
def opened(gguf: GgufModel) -> Iterator[tuple[PackedBlocks, list[PackedSource]]]:
    packed = find_packed(gguf, None)
    assert packed is not None
    plain = [SourceFile(shard.path) for shard in gguf.shards]
    blocks = PackedBlocks(packed)
    try:
        yield blocks, [PackedSource(source, number, blocks) for number, source in enumerate(plain)]
    finally:
        blocks.close()
        for source in plain:
            source.close()


@contextmanager
def memory() -> Iterator[int]:
    address = _libc.map_anonymous(MOST_PAGES * PAGE)
    try:
        yield address
    finally:
        _libc.unmap(address, MOST_PAGES * PAGE)


def check_read(source: PackedSource, truth: bytes, address: int, first_page: int, n_pages: int) -> None:
    offset, length = first_page * PAGE, n_pages * PAGE
    if offset >= len(truth):
        return
    wanted = truth[offset : offset + length]
    _libc.view(address, length)[:] = bytes(length)
    source.read_into(address, length, offset)
    assert bytes(_libc.view(address, len(wanted))) == wanted


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(models, reads, st.booleans())
def test_reads_give_what_the_model_has(
    model: tuple[list[list[tuple[int, int]]], bytes], reads: list[tuple[int, int]], is_on: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, memory() as address:
        gguf = packed_model(Path(folder), *model)
        truth = [shard.path.read_bytes() for shard in gguf.shards]
        with opened(gguf) as (blocks, sources):
            for first_page, n_pages in reads:
                for source, data in zip(sources, truth, strict=True):
                    check_read(source, data, address, first_page, n_pages)
                blocks.is_on = is_on


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_file_is_refused_and_never_gives_other_bytes(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, memory() as address:
        gguf = packed_model(Path(folder), [[(96, 20_000)]], b"")
        path = packed_path(gguf.shards[0].path)
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content[: data.draw(st.sampled_from((len(content), place)))])
        truth = gguf.shards[0].path.read_bytes()
        try:
            with opened(gguf) as (_, (source,)):
                check_read(source, truth, address, 0, len(truth) // PAGE + 1)
        except EdgeRunError:
            pass
