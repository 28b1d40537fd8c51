"""GGUF files made by hand: whole ones with a little of everything, and bytes of which one thing is wrong."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from edge_run.base.errors import ModelFileError
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import ARRAY, STRING


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


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def container(entries: bytes = b"", n_entries: int = 0, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    """Return a file's bytes with `general.architecture` and what is given."""
    architecture = text(b"general.architecture") + struct.pack("<I", STRING) + text(b"llama")
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_entries + 1) + architecture + entries + tensors
    return head + bytes(-len(head) % 32)


def string_entry(key: str, value: str) -> bytes:
    return text(key.encode()) + struct.pack("<I", STRING) + text(value.encode())


def array(key: str, values: Sequence[str]) -> bytes:
    """Return an entry with an array of strings."""
    head = text(key.encode()) + struct.pack("<IIQ", ARRAY, STRING, len(values))
    return head + b"".join(text(value.encode()) for value in values)


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


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
