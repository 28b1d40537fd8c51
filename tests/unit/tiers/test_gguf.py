"""Reading GGUF headers: against gguf-py and libggml, and over shards."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import pytest

from edge_run.base.errors import TierReadError
from edge_run.tiers import gguf_format
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import F16, F32, Q4_0, STRING, TENSOR_TYPES
from edge_run.tiers.gguf_header import ArrayValue, read_header
from gguf_files import patch, refused, write_model


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf")


@pytest.fixture
def shard_paths(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "split.gguf", split_tensors=1)
    return sorted(tmp_path.glob("split-*.gguf"))


def libggml() -> ctypes.CDLL:
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / f"libggml-base{suffix}"))


def test_types_are_those_of_libggml() -> None:
    library = libggml()
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    for type_id in range(43):
        kind = TENSOR_TYPES.get(type_id)
        known = (kind.block_elements, kind.block_bytes) if kind else (0, 0)
        assert known == (library.ggml_blck_size(type_id), library.ggml_type_size(type_id)), type_id
        if kind:
            assert kind.name.lower() == library.ggml_type_name(type_id).decode().lower()


@pytest.mark.parametrize("alignment_bytes", [None, 8, 256])
def test_tensors_lie_where_gguf_py_finds_them(tmp_path: Path, alignment_bytes: int | None) -> None:
    path = write_model(tmp_path / "small.gguf", alignment_bytes=alignment_bytes)
    model = read_gguf(path)
    theirs = gguf.GGUFReader(path).tensors
    assert [tensor.name for tensor in model.tensors] == [tensor.name for tensor in theirs]
    for ours, tensor in zip(model.tensors, theirs, strict=True):
        assert (ours.offset, ours.size_bytes, ours.shard) == (tensor.data_offset, tensor.n_bytes, 0)
        assert (ours.shape, ours.type_id) == (tuple(tensor.shape.tolist()), tensor.tensor_type)
    assert {tensor.type_id for tensor in model.tensors} == {F32, Q4_0, F16}
    assert model.shards[0].data_offset == model.tensors[0].offset
    assert model.data_bytes == 4 * 32 * 4 + 3 * 36 + 5 * 2


def test_metadata_is_decoded_and_arrays_are_counted(model_path: Path) -> None:
    model = read_gguf(model_path)
    assert model.architecture == "llama"
    assert model.value("block_count") == 7
    assert model.value("epsilon") == 0.5
    assert model.value("nothing") is None
    assert model.metadata["general.name"] == "née Ω"
    assert model.metadata["tokenizer.ggml.add_bos_token"] is True
    assert model.metadata["test.negative"] == -3
    assert model.metadata["test.large"] == 1 << 40
    assert model.metadata["tokenizer.ggml.tokens"] == ArrayValue(STRING, 80)
    assert model.metadata["tokenizer.ggml.scores"] == ArrayValue(6, 5)


def test_entries_cover_the_header_up_to_the_tensors(model_path: Path) -> None:
    header, raw = read_header(model_path), model_path.read_bytes()
    position = 4 + 4 + 8 + 8
    for entry in header.entries:
        assert entry.start == position
        assert raw[position + 8 :].startswith(entry.key.encode())
        position += entry.size_bytes
    assert raw[position + 8 :].startswith(b"token_embd.weight")
    assert raw[header.shard.header_bytes : header.shard.data_offset].strip(b"\0") == b""


@pytest.mark.parametrize("window_bytes", [1, 8, 33])
def test_any_window_reads_the_same(model_path: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_gguf(model_path)
    monkeypatch.setattr(gguf_format, "WINDOW_BYTES", window_bytes)
    assert read_gguf(model_path) == whole


class Stingy(io.FileIO):
    """A file that gives at most so many bytes at a time, and after `end` none; those of some networks do."""

    def __init__(self, path: Path, most_bytes: int, end: int = 1 << 62, error: OSError | None = None) -> None:
        super().__init__(path)
        self._most_bytes, self._end, self._error = most_bytes, end, error

    def read(self, size: Any = -1, /) -> bytes:
        """Return the next bytes. Raises `error` at the end, where there is one."""
        if self._error and self.tell() >= self._end:
            raise self._error
        return super().read(min(size, self._most_bytes, max(0, self._end - self.tell())))


@pytest.mark.parametrize("most_bytes", [1, 7, 100])
@pytest.mark.parametrize("window_bytes", [8, gguf_format.WINDOW_BYTES])
def test_a_header_that_comes_in_short_reads_is_read_the_same(
    model_path: Path, most_bytes: int, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_gguf(model_path)
    monkeypatch.setattr(gguf_format, "WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Stingy(path, most_bytes))
    assert read_gguf(model_path) == whole


def test_a_file_that_is_cut_while_its_header_is_read_is_refused_wherever_it_ends(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in range(read_header(model_path).shard.header_bytes):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", lambda path, *_, end=end, **__: Stingy(path, 64, end))
            refused(model_path, r"truncated or broken header: .* the file has")


def test_a_drive_that_fails_within_a_header_is_told_as_such(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Stingy(path, 64, 128, error))
    with pytest.raises(TierReadError, match="Input/output error; check the disk"):
        read_gguf(model_path)


def test_model_without_tensors_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = read_gguf(tmp_path / "vocabulary.gguf")
    assert (model.tensors, model.data_bytes) == ((), 0)


def test_shards_make_one_model(shard_paths: list[Path], model_path: Path) -> None:
    model, single = read_gguf(shard_paths[0]), read_gguf(model_path)
    assert [shard.path for shard in model.shards] == shard_paths
    assert [tensor.shard for tensor in model.tensors] == [0, 1, 2]
    for ours, expected in zip(model.tensors, single.tensors, strict=True):
        assert ours.name == expected.name
        raw = shard_paths[ours.shard].read_bytes()[ours.offset :][: ours.size_bytes]
        assert raw == model_path.read_bytes()[expected.offset :][: expected.size_bytes]


def test_later_shard_names_the_first(shard_paths: list[Path]) -> None:
    refused(shard_paths[1], r"shard 2 of 3, the first is needed; open split-00001-of-00003\.gguf")


def test_missing_shard_is_named(shard_paths: list[Path]) -> None:
    shard_paths[2].unlink()
    refused(shard_paths[0], r"split-00003-of-00003\.gguf: missing: shard 3 of 3")
    with pytest.raises(FileNotFoundError, match="missing: shard 3 of 3"):
        read_gguf(shard_paths[0])


def test_renamed_first_shard_is_refused(shard_paths: list[Path]) -> None:
    refused(shard_paths[0].rename(shard_paths[0].with_name("renamed.gguf")), r"rename it to <model>-00001-of-00003")


def test_swapped_shards_are_refused(shard_paths: list[Path]) -> None:
    shard_paths[2].write_bytes(shard_paths[1].read_bytes())
    refused(shard_paths[0], r"inside it is shard 2 of 3, shard 3 of 3 is needed")


def test_shard_of_a_plain_model_is_refused(shard_paths: list[Path], model_path: Path) -> None:
    shard_paths[1].write_bytes(model_path.read_bytes())
    refused(shard_paths[0], r"inside it is shard 1 of 1, shard 2 of 3 is needed")


def test_tensor_in_two_shards_is_refused(shard_paths: list[Path]) -> None:
    patch(shard_paths[1], b"blk.0.ffn_up.weight", b"token_embd.weight")
    refused(shard_paths[0], r"'token_embd\.weight' is also in split-00001-of-00003\.gguf")


def test_wrong_number_of_tensors_is_refused(shard_paths: list[Path]) -> None:
    key = b"split.tensors.count" + struct.pack("<I", 5)
    patch(shard_paths[0], key + struct.pack("<i", 3), key + struct.pack("<i", 4))
    refused(shard_paths[0], r"3 shards hold 3 tensors, split\.tensors\.count says 4")
