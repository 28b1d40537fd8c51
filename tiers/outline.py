"""Heads of model files without their vocabulary, for when only the model's shape is asked for.

Reading a vocabulary is most of what opening a model costs. Without it a model loads in milliseconds, if llama.cpp is
told how many tokens there are.
"""

from __future__ import annotations

import struct

from edge_run.base.units import round_up
from edge_run.tiers.gguf import ArrayValue, GgufModel
from edge_run.tiers.gguf_format import DEFAULT_ALIGNMENT_BYTES, MAGIC

_VOCABULARY_PREFIX = "tokenizer."
_COUNTS = struct.Struct("<IQQ")  # version, tensors, metadata entries


def outline_heads(gguf: GgufModel) -> list[bytes]:
    """Return the head of each shard, up to where its data starts; the first one has no vocabulary. Raises OSError."""
    heads = []
    for number, shard in enumerate(gguf.shards):
        with shard.path.open("rb") as file:
            head = file.read(shard.data_offset)
        heads.append(_without_vocabulary(gguf, head) if number == 0 else head)
    return heads


def outline_metadata(gguf: GgufModel) -> dict[str, int | str]:
    """Return what llama.cpp has to be told in the vocabulary's place."""
    tokens = gguf.metadata.get(f"{_VOCABULARY_PREFIX}ggml.tokens")
    known: dict[str, int | str] = {f"{_VOCABULARY_PREFIX}ggml.model": "no_vocab"}
    return known | {f"{gguf.architecture}.vocab_size": tokens.count} if isinstance(tokens, ArrayValue) else known


def _without_vocabulary(gguf: GgufModel, head: bytes) -> bytes:
    start = len(MAGIC)
    version, n_tensors, _ = _COUNTS.unpack_from(head, start)
    kept = [entry for entry in gguf.entries if not entry.key.startswith(_VOCABULARY_PREFIX)]
    last = gguf.entries[-1]
    alignment_bytes = gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    assert isinstance(alignment_bytes, int)
    parts = [MAGIC, _COUNTS.pack(version, n_tensors, len(kept))]
    parts += [head[entry.start : entry.start + entry.size_bytes] for entry in kept]
    parts.append(head[last.start + last.size_bytes : gguf.shards[0].header_bytes])
    outline = b"".join(parts)
    return outline.ljust(round_up(len(outline), alignment_bytes), b"\0")
