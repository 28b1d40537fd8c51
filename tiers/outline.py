"""Headers of model files without their vocabulary, for when only the model's shape is needed.

Most of the time of opening a model goes into reading its vocabulary. Without one, a model loads in milliseconds, if
llama.cpp is told the number of tokens.
"""

from __future__ import annotations

import struct

from edge_run.base.units import round_up
from edge_run.tiers.gguf import ArrayValue, GgufModel
from edge_run.tiers.gguf_format import DEFAULT_ALIGNMENT_BYTES, MAGIC

_VOCABULARY_PREFIX = "tokenizer."
_COUNTS = struct.Struct("<IQQ")  # version, tensors, metadata entries


def outline_heads(gguf: GgufModel) -> list[bytes]:
    """Return each shard's bytes before its tensor data, those of the first without the vocabulary. Raises OSError."""
    heads = []
    for number, shard in enumerate(gguf.shards):
        with shard.path.open("rb") as file:
            head = file.read(shard.data_offset)
        heads.append(_without_vocabulary(gguf, head) if number == 0 else head)
    return heads


def outline_metadata(gguf: GgufModel) -> dict[str, int | str]:
    """Return the metadata that llama.cpp needs in the vocabulary's place."""
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
