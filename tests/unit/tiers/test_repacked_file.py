"""Packed files of repacked weights, from machines whose pages are as wide as here and otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import PackedFileError
from edge_run.base.units import round_up
from edge_run.runtime.planning import packed_choice
from edge_run.runtime.planning.packed_choice import choose_repacked_file
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.packed_file import blocks_of, find_packed, model_key, packed_path, write_head, write_index
from edge_run.tiers.packed_index import ENTRY, LARGEST_BLOCK_BYTES, Facts, alignment_of, decode_facts
from packing import model_of


def repacked_file(gguf: GgufModel, page_bytes: int) -> Path:
    """Write a packed file of repacked weights, as the packer does where pages have so many bytes."""
    names, size = (gguf.tensors[0].name,), LARGEST_BLOCK_BYTES
    path, place, table = packed_path(gguf.shards[0].path), page_bytes, b""
    for shard, number in blocks_of(gguf.tensors, size):
        length = round_up(min(size, gguf.shards[0].size_bytes - number * size), page_bytes)
        table += ENTRY.pack(shard, number, place, length, 0)
        place += length
    raw_bytes = gguf.shards[0].size_bytes
    facts = Facts(model_key(gguf, names), size, 1, names, raw_bytes, place - page_bytes, "0" * 64)
    index = write_index(facts)
    head = write_head(place, index, table)
    path.write_bytes(head + bytes(place - len(head)) + index + table)
    return path


@pytest.mark.parametrize("page_bytes", [4096, 16384, 65536])
def test_weights_that_were_repacked_on_machines_with_other_pages(
    tmp_path: Path, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read where pages are as wide or less wide, and left alone elsewhere."""
    gguf = model_of(tmp_path, [[(96, 200_000)]])
    path = repacked_file(gguf, page_bytes)
    packed = find_packed(gguf, None)
    assert packed
    assert packed.alignment_bytes == page_bytes
    monkeypatch.setattr(packed_choice, "PAGE", 2 * page_bytes)
    assert choose_repacked_file(gguf, ModelConfig()) is None
    with pytest.raises(PackedFileError, match=r"where pages have .*edge-run pack"):
        choose_repacked_file(gguf, ModelConfig(packed=path))


@pytest.mark.parametrize("page_bytes", [512, 1 << 17])
def test_blocks_that_begin_with_no_page_are_refused(tmp_path: Path, page_bytes: int) -> None:
    gguf = model_of(tmp_path, [[(96, 200_000)]])
    repacked_file(gguf, page_bytes)
    with pytest.raises(PackedFileError, match="do not begin with a page"):
        find_packed(gguf, None)


def test_an_index_of_lists_without_end_is_refused_before_it_takes_memory() -> None:
    """Beside a model that was downloaded, a packed file is read without being named."""
    with pytest.raises(ValueError, match="lists and objects, at most"):
        decode_facts(b"[" + b"[]," * 100_000 + b"[]]")


def test_a_table_that_is_cut_short_is_refused() -> None:
    with pytest.raises(ValueError, match="begin with a page"):
        alignment_of(bytes(ENTRY.size - 1))
