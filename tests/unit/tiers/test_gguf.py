"""Reading GGUF headers: against gguf-py and libggml, over shards, and on files broken in every way we know."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ModelFileError
from edge_run.tiers import gguf_format
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_format import F16, F32, Q4_0, STRING, TENSOR_TYPES
from edge_run.tiers.gguf_header import ArrayValue, read_header

N_TENSORS = 3


def write_model(path: Path, *, alignment_bytes: int | None = None, split_tensors: int = 0) -> Path:
    """Write a small model with every kind of metadata and three tensors; in shards of `split_tensors` when given."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_tensors)
    if alignment_bytes:
        writer.add_custom_alignment(alignment_bytes)
    writer.add_block_count(7)
    writer.add_name("née Ω")
    writer.add_float32("llama.epsilon", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_int8("test.negative", -3)
    writer.add_uint64("test.large", 1 << 40)
    writer.add_array("tokenizer.ggml.tokens", ["", "a", "longer than a window", "Ω"] * 20)
    writer.add_array("tokenizer.ggml.scores", [0.25] * 5)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    quantised = np.arange(3 * 2 * 18, dtype=np.uint8).reshape(3, 36)
    writer.add_tensor("blk.0.ffn_up.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("output_norm.weight", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def container(entries: bytes = b"", n_entries: int = 0, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    """Return a file's bytes with `general.architecture` and what is given."""
    architecture = text(b"general.architecture") + struct.pack("<I", STRING) + text(b"llama")
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_entries + 1) + architecture + entries + tensors
    return head + bytes(-len(head) % 32)


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"empty \(0 bytes\)"),
    "short": (b"GG", r"not a GGUF: starts with b'GG', b'GGUF' is needed"),
    "pytorch": (b"PK\x03\x04" + bytes(64), r"not a GGUF"),
    "safetensors": (struct.pack("<Q", 40) + b'{"__metadata__":{}}', r"not a GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"big-endian GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), r"version 1, versions 2 and 3"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), r"version 4, versions 2 and 3"),
    "magic only": (b"GGUF", r"the version ends at byte 8, the file has 4"),
    "many tensors": (container(n_tensors=1 << 60), r"[\d,]+ tensors .* at least [\d,]+ bytes, the file has 96"),
    "many entries": (container(n_entries=1 << 40), r"metadata entries take at least [\d,]+ bytes"),
    "long key": (container(struct.pack("<Q", 1 << 50) + bytes(90), 1), r"the key of metadata entry 1 ends at byte"),
    "long value": (
        container(text(b"k") + struct.pack("<IQ", STRING, 1 << 63) + bytes(99), 1),
        r"the value of 'k' ends at byte 9,2",
    ),
    "long string in an array": (
        container(text(b"k") + struct.pack("<IIQQ", 9, STRING, 2, (1 << 64) - 1) + bytes(99), 1),
        r"the array 'k' ends at byte",
    ),
    "long array": (container(text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61), 1), r"the array 'k' ends at byte"),
    "many strings": (container(text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 33), 1), r"claims 8,589,934,592 strings"),
    "array of arrays": (container(text(b"k") + struct.pack("<IIQ", 9, 9, 1), 1), r"'k' has the value type 9"),
    "unknown value": (container(text(b"k") + struct.pack("<IQ", 13, 1), 1), r"'k' has the value type 13"),
    "key not UTF-8": (container(text(b"\xff\xfe") + struct.pack("<IQ", 4, 1), 1), r"entry 1 at byte \d+ is not UTF-8"),
    "key twice": (container((text(b"k") + struct.pack("<IB", 0, 1)) * 2, 2), r"metadata key 'k' is there twice"),
    "no key": (container(text(b"") + struct.pack("<IQ", 10, 1), 1), r"a metadata key has no name"),
    "alignment 48": (container(text(b"general.alignment") + struct.pack("<II", 4, 48), 1), r"alignment is 48"),
    "alignment 0": (container(text(b"general.alignment") + struct.pack("<II", 4, 0), 1), r"alignment is 0"),
    "alignment a text": (container(text(b"general.alignment") + struct.pack("<I", 8) + text(b"a"), 1), r"is 'a'"),
    "unknown type": (container(tensors=tensor(type_id=77), n_tensors=1), r"tensor 't' has the ggml type 77"),
    "removed type": (container(tensors=tensor(type_id=4), n_tensors=1), r"tensor 't' has the ggml type 4"),
    "row off block": (container(tensors=tensor(shape=(33,), type_id=2), n_tensors=1), r"multiple of 32 are needed"),
    "five dimensions": (container(tensors=tensor(shape=(1,) * 5), n_tensors=1), r"has 5 dimensions"),
    "long name": (container(tensors=tensor(b"n" * 64), n_tensors=1), r"tensor 0 claims 64 bytes, at most 63"),
    "huge shape": (container(tensors=tensor(shape=((1 << 62),) * 4), n_tensors=1), r"the tensors end at byte"),
    "negative dimension": (container(tensors=tensor(shape=(0, 1 << 63)), n_tensors=1), r"has the shape \(0, 92"),
    "not aligned": (container(tensors=tensor(offset=8), n_tensors=1) + bytes(99), r"data byte 8, not a multiple"),
    "overlapping": (
        container(tensors=tensor(shape=(16,)) + tensor(b"u", offset=32), n_tensors=2) + bytes(999),
        r"'u' starts at data byte 32, overlapping the tensor before it, which ends at 64",
    ),
    "gap": (
        container(tensors=tensor() + tensor(b"u", offset=64), n_tensors=2) + bytes(999),
        r"'u' starts at data byte 64, leaving a gap after the tensor before it, which ends at 32",
    ),
    "tensor twice": (container(tensors=tensor() * 2, n_tensors=2) + bytes(99), r"tensor 't' is there twice"),
    "truncated data": (container(tensors=tensor(shape=(99,)), n_tensors=1) + bytes(9), r"the tensors end at byte 524,"),
    "split of a text": (container(text(b"split.count") + struct.pack("<I", 8) + text(b"a"), 1), r"split\.count is 'a'"),
    "no architecture": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), r"no text under general\.architecture"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / "broken.gguf").write_bytes(content)
    refused(tmp_path / "broken.gguf", message)


@pytest.mark.parametrize("missing_bytes", [1, 100])
def test_truncated_data_tells_both_sizes(model_path: Path, missing_bytes: int) -> None:
    last = read_gguf(model_path).tensors[-1]
    needed_bytes = last.offset + last.size_bytes
    os.truncate(model_path, needed_bytes)
    assert read_gguf(model_path).tensors[-1] == last
    os.truncate(model_path, needed_bytes - missing_bytes)
    error = refused(model_path, r"truncated: the tensors end at byte .* copy or download the file again")
    assert (error.found_bytes, error.needed_bytes) == (needed_bytes - missing_bytes, needed_bytes)


def test_every_cut_of_the_header_is_refused(model_path: Path) -> None:
    header_bytes = read_header(model_path).shard.header_bytes
    for size_bytes in reversed(range(header_bytes)):
        os.truncate(model_path, size_bytes)
        refused(model_path, "")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.gguf", r"cannot open: No such file"),
        (".", r"a folder, a GGUF file is needed"),
        ("a\0b", r"cannot open"),
    ],
)
def test_path_that_is_no_file_is_refused(tmp_path: Path, path: str, message: str) -> None:
    refused(tmp_path / path, message)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", r"not a regular file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission_is_refused(model_path: Path) -> None:
    model_path.chmod(0)
    refused(model_path, r"cannot open: Permission denied")


Mutation = Callable[[bytes], bytes]


def mutations(header_bytes: int) -> st.SearchStrategy[Mutation]:
    """Changes that happen to files, and changes aimed at counts and lengths: all within the header."""
    position = st.integers(0, header_bytes)
    numbers = [st.integers(0, 255).map(lambda n: bytes([n])), st.integers(0, 99), st.integers(0, (1 << 64) - 1)]
    raw = st.one_of(numbers[0], *(n.map(lambda n: struct.pack("<Q", n)) for n in numbers[1:]), st.binary(max_size=24))
    overwrite = st.tuples(position, raw).map(lambda c: lambda data: data[: c[0]] + c[1] + data[c[0] + len(c[1]) :])
    insert = st.tuples(position, raw).map(lambda c: lambda data: data[: c[0]] + c[1] + data[c[0] :])
    cut = st.tuples(position, st.integers(0, 99)).map(lambda c: lambda data: data[: c[0]] + data[c[0] + c[1] :])
    return st.one_of(overwrite, insert, cut, position.map(lambda at: lambda data: data[:at]))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_header_is_read_or_refused(model_path: Path, data: st.DataObject) -> None:
    original = model_path.with_name("original.gguf")
    if not original.exists():
        original.write_bytes(model_path.read_bytes())
    content = original.read_bytes()
    for mutate in data.draw(st.lists(mutations(read_header(original).shard.header_bytes), min_size=1, max_size=3)):
        content = mutate(content)
    model_path.write_bytes(content)
    try:
        model = read_gguf(model_path)
    except ModelFileError as error:
        message = str(error)
    else:
        message = ""
        assert isinstance(model, GgufModel)
        assert all(tensor.offset + tensor.size_bytes <= len(content) for tensor in model.tensors)
    assert "\n" not in message


LONG = b"k" * 60_000


@pytest.mark.parametrize(
    "content",
    [
        container((text(LONG) + struct.pack("<IB", 0, 1)) * 2, 2),
        container(text(LONG) + struct.pack("<I", 99), 1),
        container(text(LONG) + struct.pack("<IQ", STRING, 1 << 40), 1),
        container(text(b"general.alignment") + struct.pack("<I", STRING) + text(LONG), 1),
        container(text(b"split.count") + struct.pack("<I", STRING) + text(LONG), 1),
        container()[:16]
        + struct.pack("<Q", 1)
        + text(b"general.architecture")
        + struct.pack("<I", STRING)
        + text(LONG),
    ],
    ids=["twice", "type", "length", "alignment", "split", "architecture"],
)
def test_a_refusal_is_a_line_that_can_be_read(tmp_path: Path, content: bytes) -> None:
    """Whatever the file has in it: a key or a text may be as long as it likes."""
    path = tmp_path / "long.gguf"
    path.write_bytes(content)
    assert len(str(refused(path, "kkk|letters"))) < 1000


HOLE_BYTES = 1 << 40  # a file's size says nothing where most of it is a hole: these are archives of a few kB


def one_string(name: bytes, size_bytes: int) -> bytes:
    return text(name) + struct.pack("<IQ", STRING, size_bytes) + bytes(size_bytes)


def empty_strings(name: bytes, count: int) -> bytes:
    return text(name) + struct.pack("<IIQ", 9, STRING, count) + bytes(8 * count)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: container(n_entries=1 << 32), "4,294,967,297 metadata entries, 65,536 of each make sense"),
        (lambda: container(n_tensors=1 << 32), "4,294,967,296 tensors .* make sense"),
        (
            lambda: container(one_string(b"a", 60 << 20) + one_string(b"b", 60 << 20), 2),
            "its strings up to the value of 'b' have more than 100,663,296 bytes",
        ),
        (
            lambda: container(empty_strings(b"a", 3 << 20) + empty_strings(b"b", 3 << 20), 2),
            "its arrays up to the array 'b' have more than 4,194,304 strings",
        ),
        (
            lambda: container(text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 38), 1),
            "it has [0-9,]+ bytes, at most 268,435,456 make sense",
        ),
        (
            lambda: container(text(b"general.alignment") + struct.pack("<II", 4, 1 << 31), 1, tensor(), 1),
            "general.alignment is 2147483648 of value type 4, a power of two of type 4 is needed, at most 1,048,576",
        ),
    ],
    ids=["entries", "tensors", "strings", "arrays", "bytes", "alignment"],
)
def test_a_hole_behind_a_header_costs_nothing(tmp_path: Path, make: Callable[[], bytes], told: str) -> None:
    path = tmp_path / "hole.gguf"
    path.write_bytes(make())
    os.truncate(path, HOLE_BYTES)
    started_s = time.process_time()
    refused(path, told)
    assert time.process_time() - started_s < 10


def refused(path: Path, message: str) -> ModelFileError:
    """Assert that `path` is refused in one line that matches `message`; return the error."""
    with pytest.raises(ModelFileError) as caught:
        read_gguf(path)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def patch(path: Path, old: bytes, new: bytes) -> None:
    """Replace the bytes `old`, with the length before them where they are a text, by `new`."""
    content = path.read_bytes()
    if len(old) != len(new):
        old, new = text(old), text(new)
    assert content.count(old) == 1
    content = content.replace(old, new)
    path.write_bytes(content + bytes(-len(content) % 32 + 32))
