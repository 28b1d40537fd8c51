"""What llama.cpp makes of a model file, found out in a process of its own, and remembered.

llama.cpp ends the process over some broken files. So a file is first opened by a child (`child.py`), which
loads no weights: it reports what the model's caches and buffers will take, and the graph of a pass. If it dies, the
file is refused in one line. What it found is kept in the cache folder, under the file's identity, the context's shape
and the library: a file that is known is not inspected again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from edge_run.base.config import KV_SPILL_ON, ModelConfig
from edge_run.base.files.identity import file_facts
from edge_run.base.files.whole import keep_file
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.runtime.inspection.launcher import ask_child
from edge_run.runtime.llama.context_shape import wants_streams
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import GgufModel

FORMAT = 16
MOST_REMEMBERED = 200
SHAPING = (
    "context_tokens",
    "micro_batch_tokens",
    "sequences",
    "branches",
    "rollback_tokens",
    "outputs_per_pass",
    "kv_type",
    "flash_attention",
    "exact",
    "embeddings",
    "pooling",
)
HASHED_BYTES = 1 << 16  # of each file


def inspect(gguf: GgufModel, config: ModelConfig, library: str, *, is_tried: bool = True) -> Inspection:
    """Return what is known of `gguf` when it is opened as `config` says; a child process finds out what is new.

    is_tried: what a file has to be that is opened; a plan needs less, and gets it sooner. Raises what opening the model
    would raise, ModelFileError when the child dies of it, and NoInspector.
    """
    place = config.cache / "inspected" / f"{_key(gguf, config, library)}.json.gz"
    try:
        known = Inspection.from_json(gzip.decompress(place.read_bytes()).decode())
        if known.is_tried or not is_tried:
            return known
    except (OSError, EOFError, ValueError, TypeError, KeyError, zlib.error):
        pass  # not there, or not ours
    text = ask_child(gguf.shards[0].path, _shaping(config), is_tried=is_tried)
    inspection = Inspection.from_json(text)
    _remember(place, text)
    return inspection


def _shaping(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that shape a context for `config`."""
    fields = {field: getattr(config, field) for field in SHAPING}
    return fields | ({"kv_spill": KV_SPILL_ON} if config.spills_kv and wants_streams(config) else {})


def _key(gguf: GgufModel, config: ModelConfig, library: str) -> str:
    """Return the name under which the outcome is kept: it changes with the files, the context and the library.

    And with the size of pages, to which mappings are rounded: kernels for one device differ in it. A file that takes
    another's place has another inode or change time, whatever its size and date.
    """
    facts: list[object] = [FORMAT, library, PAGE, *_shaping(config).values()]
    for shard in gguf.shards:
        facts += file_facts(shard.path, hashed_bytes=HASHED_BYTES)
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _remember(place: Path, text: str) -> None:
    """Keep an outcome, and as many others as are worth it; without a folder to write to, nothing is kept."""
    keep_file(place, gzip.compress(text.encode(), 1, mtime=0), "what was found about the model")
    with contextlib.suppress(OSError):  # without a folder, or of what another process has just removed
        known = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in known[:-MOST_REMEMBERED]:
            path.unlink(missing_ok=True)
