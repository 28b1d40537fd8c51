"""What llama.cpp makes of a model file, found out in a process of its own, and remembered.

llama.cpp ends the process over some broken files. So a file is first opened by a child (`child.py`), which
loads no weights: it reports what the model's caches and buffers will take, and the graph of a pass. If it dies, the
file is refused in one line. What it found is kept in the cache folder, under the file's identity, the context's shape
and the library: a file that is known is not inspected again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.base.files import keep_file
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.inspection.launcher import ask_child
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import MappedSpan
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.kv.cells import Cells, CellTensor

SHARD_BYTES = 1 << 46  # a file address: the shard's number times this, plus the offset in it
FORMAT = 9
MOST_REMEMBERED = 200
SHAPING = (
    "context_tokens",
    "micro_batch_tokens",
    "sequences",
    "branches",
    "outputs_per_pass",
    "kv_type",
    "flash_attention",
    "exact",
)
_HASHED_BYTES = 1 << 16


@dataclass(frozen=True)
class Inspection:
    """What is known of a model before it is opened.

    is_tried: whether the vocabulary was loaded and a pass computed, without which no file is opened. load_s: what
    loading the vocabulary takes. program_bytes: resident memory of a process that holds nothing but Python, llama.cpp
    and the vocabulary. Both are estimates where it was not loaded. kv_bytes and buffer_bytes: what the context will
    allocate. cell_bytes: of kv_bytes, keys and values that are written cell by cell; cell_rows: of each such tensor its
    rows (`CellTensor`) and its share of cell_bytes; cell_uses: which of them each attention reads. narrow_bytes: what
    narrow passes touch of the compute buffer. packed_graph: see `graph`; `spans`: its part of the address space.
    """

    is_tried: bool
    context_tokens: int
    trained_context_tokens: int
    micro_batch_tokens: int
    vocabulary: int
    load_s: float
    program_bytes: int
    kv_bytes: int
    buffer_bytes: int
    cell_bytes: int
    cell_rows: tuple[tuple[int, float], ...]
    cell_uses: tuple[tuple[int, ...], ...]
    narrow_bytes: int
    spans: tuple[MappedSpan, ...]
    packed_graph: str

    @functools.cached_property
    def cells(self) -> Cells:
        """The context's keys and values, as if all were for the whole context."""
        tokens = self.context_tokens
        return Cells(
            [
                CellTensor(0, tokens, max(1, round(self.cell_bytes * share / (rows * tokens))), rows)
                for rows, share in self.cell_rows
            ],
            PAGE,
        )

    @functools.cached_property
    def graph(self) -> GraphMap:
        """The graph of a pass of one token, its weights at file addresses; unpacked when it is first asked for."""
        return tuple(map(_unpack, json.loads(self.packed_graph)))

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, default=dataclasses.astuple
        )

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """Return what `to_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        fields = json.loads(text)
        spans, rows = fields["spans"], fields["cell_rows"]
        lists = {
            "spans": tuple(MappedSpan(*span) for span in spans),
            "cell_rows": tuple((int(n), float(s)) for n, s in rows),
            "cell_uses": tuple(tuple(map(int, use)) for use in fields["cell_uses"]),
        }
        return cls(**fields | lists)


def pack_graph(graph: GraphMap) -> str:
    """Return `graph` as an `Inspection` has it."""
    return json.dumps([_pack(node) for node in graph])


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
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        pass  # not there, or not ours
    fields = {field: getattr(config, field) for field in SHAPING}
    text = ask_child(gguf.shards[0].path, fields, is_tried=is_tried)
    inspection = Inspection.from_json(text)
    _remember(place, text)
    return inspection


def _key(gguf: GgufModel, config: ModelConfig, library: str) -> str:
    """Return the name under which the outcome is kept: it changes with the files, the context and the library.

    A file that takes another's place has another inode or change time, whatever its size and date.
    """
    import hashlib  # which takes long to load, and the inspector does without

    facts: list[object] = [FORMAT, library, *(getattr(config, field) for field in SHAPING)]
    for shard in gguf.shards:
        facts += file_facts(shard.path)
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def file_facts(path: Path) -> list[object]:
    """Return what tells a model file from others, and from what it was before a change. Raises OSError."""
    import hashlib

    status = path.stat()
    with path.open("rb") as file:
        start = hashlib.blake2b(file.read(_HASHED_BYTES), digest_size=16).hexdigest()
    place = os.fsencode(path.resolve()).hex()
    return [place, status.st_size, status.st_ino, start, status.st_mtime_ns, status.st_ctime_ns]


def _remember(place: Path, text: str) -> None:
    """Keep an outcome, and as many others as are worth it; without a folder to write to, nothing is kept."""
    keep_file(place, gzip.compress(text.encode(), 1, mtime=0), "what was found about the model")
    with contextlib.suppress(OSError):  # without a folder, or of what another process has just removed
        known = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in known[:-MOST_REMEMBERED]:
            path.unlink(missing_ok=True)


def _pack(node: Node) -> list[Any]:
    reads = [[read.name, read.address, read.length, read.row_bytes, read.product_row_bytes] for read in node.reads]
    return [node.name.decode("latin-1"), node.op, node.is_computed, node.expert_ids, *reads]


def _unpack(fields: list[Any]) -> Node:
    name, op, is_computed, expert_ids, *reads = fields
    return Node(name.encode("latin-1"), op, tuple(WeightRead(*read) for read in reads), is_computed, expert_ids)
