"""GGUF files that are broken in every way we know: each is refused in one line, and costs nothing."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ModelFileError
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_format import STRING
from edge_run.tiers.gguf_header import read_header
from gguf_files import container, refused, tensor, text, write_model


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf")


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
