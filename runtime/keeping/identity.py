"""Whose rows are kept: the model's files, the library, the numerics key, and the layout of the cache.

A row is of use only to a run that would compute the same bits. Whatever may change them is part of the key. The length
of a context is not: where it decides about a model's factors, the numerics key says which; where it decides how large a
ring or a state is, the layout does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass

from edge_run.base.files.identity import file_facts
from edge_run.base.results import Numerics
from edge_run.runtime.inspection.cache import HASHED_BYTES
from edge_run.runtime.llama.library import library_build
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.kv.block_file import FORMAT
from edge_run.tiers.kv.record import NAME_BYTES


@dataclass(frozen=True, slots=True)
class KeptIdentity:
    """key: of the rows, NAME_BYTES bytes. facts: what tells people, and a cleaning, what they were kept for."""

    key: bytes
    facts: dict[str, str]


def kept_identity(gguf: GgufModel, numerics: Numerics, signature: str) -> KeptIdentity:
    """Return whose the rows are of a context whose layout is `signature`.

    Raises OSError where the model's files cannot be read.
    """
    files = [file_facts(shard.path, hashed_bytes=HASHED_BYTES) for shard in gguf.shards]
    library = _digest([library_build(), numerics.kernels]).hex()
    key = _digest([FORMAT, library, files, dataclasses.asdict(numerics), signature])
    path = str(gguf.shards[0].path.resolve())
    facts = {"library": library, "path": path, "file": _digest(files).hex(), "machine": platform.node()}
    return KeptIdentity(key, facts)


def _digest(facts: object) -> bytes:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=NAME_BYTES).digest()
