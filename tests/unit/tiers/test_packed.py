"""Packing: what is packed and what is not, what is refused, and that nothing half-made is left behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, ModelFileMissing, NotSupported, PackedFileError, TierReadError
from edge_run.base.units import MIB
from edge_run.runtime.planning import packed_choice
from edge_run.runtime.planning.packed_choice import choose_packed
from edge_run.runtime.tools import pack as module
from edge_run.runtime.tools.pack import pack
from edge_run.tiers import packed_file
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import F16, F32
from edge_run.tiers.packed import PackedBlocks, set_apart, set_together
from edge_run.tiers.packed_file import HEAD, find_packed, model_key, packed_path, read_packed
from edge_run.tiers.packed_index import check_blocks, read_table
from packing import HEAD_BYTES, model_of

N_NUMBERS = 200_000


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GgufModel]:
    """Write a model of one tensor of experts, which the packer finds."""

    def write(**options: int) -> GgufModel:
        gguf = model_of(tmp_path, [[(96, N_NUMBERS)]], **options)
        monkeypatch.setattr(module, "read_gguf", lambda path: gguf)
        return gguf

    return write


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".gguf")]


def test_a_model_is_known_by_the_same_key_on_machines_with_other_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = model_of(tmp_path, [[(96, N_NUMBERS)]])
    names = [tensor.name for tensor in gguf.tensors]
    key = model_key(gguf, names)
    monkeypatch.setattr(packed_file, "PAGE", 16 * packed_file.PAGE)
    assert model_key(gguf, names) == key
    gguf.shards[0].path.unlink()
    with pytest.raises(ModelFileMissing, match="cannot be read"):
        model_key(gguf, names)


@pytest.mark.parametrize("length", [0, 1, 2, 4096, 4097])
@pytest.mark.parametrize("number_bytes", [1, 2])
def test_bytes_come_back_together(length: int, number_bytes: int) -> None:
    block = np.random.default_rng(0).bytes(length)
    last, first = set_apart(block, number_bytes)
    target = np.zeros(length, np.uint8)
    set_together(last, first, target)
    assert target.tobytes() == block
    assert len(last) + len(first) == length


def test_experts_of_16_bits_become_smaller(model: Callable[..., GgufModel]) -> None:
    gguf, told = model(), list[tuple[int, int]]()
    made = pack(gguf.shards[0].path, progress=lambda *done: told.append(done))
    assert made.path == packed_path(gguf.shards[0].path)
    assert 0.8 < made.share < 0.9
    assert (made.tensors, made.left_out) == (1, {})
    assert told
    assert told[-1][0] <= told[-1][1]
    packed = read_packed(made.path)
    assert (packed.facts.number_bytes, packed.facts.names) == (2, (gguf.tensors[0].name,))
    assert packed.share == made.share
    assert leftovers(made.path.parent) == [made.path.name]


def test_what_gains_too_little_is_refused_with_the_figure(model: Callable[..., GgufModel]) -> None:
    gguf = model()
    path = gguf.shards[0].path
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
    with pytest.raises(NotSupported, match=r"come down to F16 to 100% of their size"):
        pack(path)
    assert not leftovers(path.parent)


def test_types_that_gain_nothing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = model_of(tmp_path, [[(0, N_NUMBERS), (0, N_NUMBERS)]])
    path, noise = gguf.shards[0].path, gguf.tensors[1]
    data = bytearray(path.read_bytes())
    data[noise.offset :] = np.random.default_rng(0).bytes(noise.size_bytes)
    path.write_bytes(data)
    monkeypatch.setattr(module, "read_gguf", lambda path: gguf)
    made = pack(path)
    assert made.tensors == 1
    assert made.left_out["F16"] > 0.99
    assert read_packed(made.path).facts.names == (gguf.tensors[0].name,)


def test_tensors_whose_bytes_are_not_set_apart_alike_are_not_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = model_of(tmp_path, [[(0, N_NUMBERS), (0, N_NUMBERS), (0, N_NUMBERS)]])
    first = gguf.tensors[0]
    other = type(first)(first.name, first.shape, F32, first.shard, first.offset, first.size_bytes)
    path = gguf.shards[0].path
    data = bytearray(path.read_bytes())
    data[first.offset : first.offset + first.size_bytes] = bytes(first.size_bytes)
    path.write_bytes(data)
    gguf = GgufModel(gguf.shards, (other, *gguf.tensors[1:]), gguf.metadata)
    monkeypatch.setattr(module, "read_gguf", lambda path: gguf)
    assert read_packed(pack(path).path).facts.names == tuple(tensor.name for tensor in gguf.tensors[1:])


def test_a_file_that_is_there_is_kept(model: Callable[..., GgufModel], tmp_path: Path) -> None:
    path = model().shards[0].path
    target = tmp_path / "there"
    target.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="exists"):
        pack(path, target)
    with pytest.raises(ConfigError, match="the model itself"):
        pack(path, path, is_overwritten=True)
    with pytest.raises(ConfigError, match="folder is not there"):
        pack(path, tmp_path / "none" / "x")
    assert target.read_bytes() == b"mine"
    link = tmp_path / "link"
    link.symlink_to(target)
    assert pack(path, link, is_overwritten=True).path == target
    assert link.is_symlink()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    model: Callable[..., GgufModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model().shards[0].path
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(TierReadError, match=r"are needed, the disk has 1000 B free"):
        pack(path)
    assert not leftovers(path.parent)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_whatever_stops_it_leaves_no_file(model: Callable[..., GgufModel], error: BaseException) -> None:
    path = model().shards[0].path

    def stop(done_bytes: int, all_bytes: int) -> None:
        assert leftovers(path.parent), "it is being written"
        raise error

    with pytest.raises(TierReadError if isinstance(error, OSError) else KeyboardInterrupt):
        pack(path, progress=stop)
    assert not leftovers(path.parent)


def test_another_models_file_is_refused_in_one_line(model: Callable[..., GgufModel]) -> None:
    gguf = model()
    path = gguf.shards[0].path
    pack(path)
    assert find_packed(gguf, None) is not None
    model(seed=5)  # another model of the same name and shape
    with pytest.raises(PackedFileError, match=r"packed from another model.*edge-run pack") as caught:
        find_packed(gguf, None)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 13


def test_a_header_that_changed_is_another_model(model: Callable[..., GgufModel]) -> None:
    gguf = model()
    path = gguf.shards[0].path
    pack(path)
    with path.open("r+b") as file:
        file.seek(HEAD_BYTES - 1)
        byte = file.read(1)
        file.seek(HEAD_BYTES - 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(PackedFileError, match="another model"):
        find_packed(gguf, None)


def test_what_is_no_packed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(PackedFileError, match="cannot be read"):
        read_packed(path)
    path.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(PackedFileError, match="no packed file"):
        read_packed(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for path in (tmp_path, tmp_path / "x", Path("/dev/zero")):
        with pytest.raises(PackedFileError, match="is no file"):
            read_packed(path)


def test_another_version_and_a_cut_file_are_refused(model: Callable[..., GgufModel]) -> None:
    path = pack(model().shards[0].path).path
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(PackedFileError, match="damaged"):
        read_packed(path)
    head = list(HEAD.unpack(data[: HEAD.size]))
    path.write_bytes(HEAD.pack(head[0], 3, *head[2:]) + data[HEAD.size :])
    with pytest.raises(PackedFileError, match=r"another version of edge-run \(3, known is 2\)"):
        read_packed(path)


def test_a_block_outside_the_file_is_refused(model: Callable[..., GgufModel]) -> None:
    packed = read_packed(pack(model().shards[0].path).path)
    table = bytearray(packed.table)
    struct.pack_into("<Q", table, 8, 1 << 40)
    other = type(packed)(**{name: getattr(packed, name) for name in packed.__slots__} | {"table": bytes(table)})
    with pytest.raises(PackedFileError, match="a block is outside"):
        PackedBlocks(other)


def rewritten(
    path: Path, facts: Mapping[str, object] | bytes, edit: Callable[[Any], object] = lambda blocks: None
) -> None:
    """Write the packed file again with other facts and another table, sealed as the packer would."""
    data = path.read_bytes()
    magic, version, start, n_index, *_ = HEAD.unpack(data[: HEAD.size])
    index = data[start : start + n_index]
    blocks = read_table(data[start + n_index :]).copy()
    changed = edit(blocks)
    table = (blocks if changed is None else changed).tobytes()  # type: ignore[union-attr]
    index = facts if isinstance(facts, bytes) else json.dumps({**json.loads(index), **facts}).encode()
    path.write_bytes(data[:start] + index + table)
    digest = hashlib.blake2b(index + table, digest_size=32).digest()
    with path.open("r+b") as file:
        file.write(HEAD.pack(magic, version, start, len(index), len(table), digest))


@pytest.mark.parametrize(
    "facts",
    [
        *(
            {"block_bytes": size}
            for size in (64, 100, 0, -1, 4096, 65537, 1 << 19, 1 << 62, 10**4000, 65536.0, "65536", None, True)
        ),
        *({"number_bytes": size} for size in (0, 3, -1, True, 2.0, "2")),
        *({"names": names} for names in ([], "blk.0.exps", [1], None, ["blk.0.exps", "blk.0.exps"], [["blk.0.exps"]])),
        *({"model": model} for model in ("", "A" * 64, 5, None, "a" * 63)),
        *({"raw_bytes": size} for size in (0, -5, 1, 2.5, 1 << 60, "400096")),
        *({"packed_bytes": size} for size in (0, 1, 1 << 60, None)),
        {"more": 1},
        b"[]",
        b"7",
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"model": 1}',
    ],
    ids=lambda facts: repr(facts)[:40],
)
def test_an_index_that_the_packer_would_not_write_is_refused(
    model: Callable[..., GgufModel], facts: Mapping[str, object] | bytes
) -> None:
    """It has the right digest: whoever can write a file can write that, too."""
    gguf = model()
    path = pack(gguf.shards[0].path).path
    rewritten(path, {})
    assert find_packed(gguf, None) is not None, "what is written again unchanged is right"
    rewritten(path, facts)
    with pytest.raises(PackedFileError, match=r"damaged|another model") as caught:
        find_packed(gguf, None)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def _set(column: str, row: int, value: int) -> Callable[[Any], None]:
    def edit(blocks: Any) -> None:
        blocks[column][row] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        *(_set("shard", row, value) for row in (0, -1) for value in (1, 2**31, 2**32 - 1)),
        *(_set("number", row, value) for row in (0, -1) for value in (77, 2**32 - 1)),
        *(_set("start", row, value) for row in (0, 1) for value in (0, 2**62, 2**64 - 1)),
        *(_set("first", row, value) for row in (0, 1) for value in (0, 2**32 - 1)),
        *(_set("second", row, value) for row in (0, 1) for value in (0, 2**32 - 1)),
        lambda blocks: blocks[::-1].copy(),
        lambda blocks: blocks[:-1].copy(),
        lambda blocks: blocks[1:].copy(),
        lambda blocks: blocks[:0].copy(),
        lambda blocks: np.frombuffer(blocks.tobytes()[:-1], np.uint8),
        lambda blocks: np.concatenate([blocks, blocks[-1:]]),
    ],
)
def test_a_table_that_the_packer_would_not_write_is_refused(
    model: Callable[..., GgufModel], edit: Callable[[Any], object]
) -> None:
    """Blocks out of order, twice, over each other, outside, missing, or of another tensor."""
    gguf = model()
    path = pack(gguf.shards[0].path).path
    assert len(read_table(read_packed(path).table)) > 2
    rewritten(path, {}, edit)
    with pytest.raises(PackedFileError, match="damaged"):
        find_packed(gguf, None)


def test_a_table_that_the_model_has_no_room_for_is_not_read(model: Callable[..., GgufModel]) -> None:
    """100 MiB beside a small model."""
    gguf, n_table = model(), 100 * MIB
    path = packed_path(gguf.shards[0].path)
    path.write_bytes(HEAD.pack(packed_file.MAGIC, packed_file.VERSION, HEAD.size, 2, n_table, bytes(32)))
    os.truncate(path, HEAD.size + 2 + n_table)
    tracemalloc.start()
    try:
        with pytest.raises(PackedFileError, match=r"or of a larger model: it has 4,369,066 blocks, at most 7 can be;"):
            find_packed(gguf, None)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_a_tensor_of_a_file_with_holes_makes_no_large_tables(model: Callable[..., GgufModel]) -> None:
    """It says that it has 2**60 bytes, and a file system may have room for as many holes."""
    gguf = model()
    packed = read_packed(pack(gguf.shards[0].path).path)
    huge = replace(gguf, tensors=(replace(gguf.tensors[0], size_bytes=1 << 60),))
    with pytest.raises(ValueError, match="its blocks are not those of its tensors"):
        check_blocks(packed.facts, packed.table, huge)


def test_which_file_a_run_reads(model: Callable[..., GgufModel], tmp_path: Path) -> None:
    gguf = model()
    beside = packed_path(gguf.shards[0].path)
    assert choose_packed(gguf, ModelConfig()) is None
    with pytest.raises(PackedFileError, match="cannot be read"):
        choose_packed(gguf, ModelConfig(packed=beside))
    pack(gguf.shards[0].path)
    found = choose_packed(gguf, ModelConfig())
    assert found is not None
    assert found.path == beside
    assert choose_packed(gguf, ModelConfig(packed="off")) is None
    elsewhere = tmp_path / "off"
    beside.rename(elsewhere)
    assert choose_packed(gguf, ModelConfig()) is None
    named = choose_packed(gguf, ModelConfig(packed=elsewhere))
    assert named is not None
    assert named.path == elsewhere


def test_without_zstandard_a_file_beside_the_model_is_left_alone(
    model: Callable[..., GgufModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = model()
    beside = pack(gguf.shards[0].path).path

    def missing(name: str, extra: str) -> None:
        raise NotSupported(f"{name}: pip install 'edge-run[{extra}]'")

    monkeypatch.setattr(packed_choice, "need", missing)
    assert choose_packed(gguf, ModelConfig()) is None
    with pytest.raises(NotSupported, match=r"edge-run\[pack\]"):
        choose_packed(gguf, ModelConfig(packed=beside))
    assert gguf.tensors[0].type_id == F16
