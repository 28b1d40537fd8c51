"""What llama.cpp makes of a model file, found out in a process of its own, and remembered.

llama.cpp ends the process over some broken files. So a file is first opened by a child (`inspector_child.py`), which
loads no weights: it reports what the model's caches and buffers will take, and the graph of a pass. If it dies, the
file is refused in one line. What it found is kept in the cache folder, under the file's identity, the context's shape
and the library: a file that is known is not inspected again.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_run.base import errors
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ModelFileError
from edge_run.runtime.graph import GraphMap, Node, WeightRead
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.territory import Span

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 46  # a file address: the shard's number times this, plus the offset in it
FORMAT = 3
LONGEST_S = 300
MOST_REMEMBERED = 200
SHAPING = ("context_tokens", "micro_batch_tokens", "sequences", "outputs_per_pass", "kv_type", "flash_attention")
_HASHED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a model before it is opened.

    load_s: what loading the vocabulary took. program_bytes: resident memory of a process that holds nothing but Python, llama.cpp and the vocabulary. kv_bytes
    and buffer_bytes: what the context will allocate. graph: of a pass of one token, its weights at file addresses, of
    which `spans` are the part that holds tensors.
    """

    context_tokens: int
    trained_context_tokens: int
    micro_batch_tokens: int
    vocabulary: int
    load_s: float
    program_bytes: int
    kv_bytes: int
    buffer_bytes: int
    spans: tuple[Span, ...]
    graph: GraphMap

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["spans"] = [dataclasses.astuple(span) for span in self.spans]
        fields["graph"] = [_pack(node) for node in self.graph]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """Return what `to_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        fields = json.loads(text)
        spans = tuple(Span(*span) for span in fields.pop("spans"))
        graph = tuple(_unpack(node) for node in fields.pop("graph"))
        return cls(spans=spans, graph=graph, **fields)


def inspect(gguf: GgufModel, config: ModelConfig, cache_folder: Path, library: str) -> Inspection:
    """Return what is known of `gguf` when it is opened as `config` says; a child process finds out what is new.

    Raises what opening the model would raise, and ModelFileError when the child dies of it.
    """
    place = cache_folder / "inspected" / f"{_key(gguf, config, library)}.json.gz"
    try:
        return Inspection.from_json(gzip.decompress(place.read_bytes()).decode())
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        pass  # not there, or not ours
    text = _ask_child(gguf.shards[0].path, config, cache_folder)
    inspection = Inspection.from_json(text)
    _remember(place, text)
    return inspection


def _key(gguf: GgufModel, config: ModelConfig, library: str) -> str:
    """Return the name under which the outcome is kept: it changes with the files, the context and the library."""
    facts: list[object] = [FORMAT, library, *(getattr(config, field) for field in SHAPING)]
    for shard in gguf.shards:
        status = shard.path.stat()
        with shard.path.open("rb") as file:
            start = hashlib.blake2b(file.read(_HASHED_BYTES), digest_size=16).hexdigest()
        facts += [str(shard.path.resolve()), status.st_size, status.st_mtime_ns, start]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _ask_child(path: Path, config: ModelConfig, cache_folder: Path) -> str:
    fields = {field: getattr(config, field) for field in SHAPING}
    request = json.dumps(
        {"path": os.fspath(path.absolute()), "config": fields, "cache_folder": os.fspath(cache_folder)}
    )
    try:
        child = subprocess.run(
            [sys.executable, "-m", "edge_run.runtime.inspector_child"],
            input=request.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=LONGEST_S,
            check=False,
            start_new_session=True,  # Ctrl-C ends it through us
        )
    except subprocess.TimeoutExpired as error:
        raise ModelFileError(
            f"{path}: llama.cpp did not finish reading its header in {LONGEST_S} s; the file is broken, or needs "
            "another llama.cpp; copy or download it again"
        ) from error
    answer, _, text = child.stdout.decode("utf-8", "replace").partition("\n")
    if child.returncode == 0 and answer == "ok":
        return text
    if child.returncode == 0 and answer == "error":
        kind, message = json.loads(text)
        raise getattr(errors, kind)(message)
    raise ModelFileError(
        f"{path}: llama.cpp ended over it ({_how(child.returncode)}{_last_words(child.stderr)}); the file is broken, "
        "or needs another llama.cpp; copy or download it again",
        found=child.returncode,
    )


def _how(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_words(output: bytes) -> str:
    """Return what llama.cpp said about its end, short."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    told = [line for line in lines if "ASSERT" in line or "what():" in line or "Error" in line]
    text = (told or lines[:1] or [""])[0].rpartition("/")[2]
    return f": {text[:160]}" if text else ""


def _remember(place: Path, text: str) -> None:
    """Keep an outcome, and as many others as are worth it; without a folder to write to, nothing is kept."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as draft:
            try:
                draft.write(gzip.compress(text.encode(), 1, mtime=0))
                draft.close()
                os.replace(draft.name, place)
            except BaseException:
                Path(draft.name).unlink(missing_ok=True)
                raise
        known = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in known[:-MOST_REMEMBERED]:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.info("what was found about the model cannot be kept in %s: %s", place.parent, error)


def _pack(node: Node) -> list[Any]:
    reads = [[read.name, read.address, read.length, read.row_bytes] for read in node.reads]
    return [node.name.decode("latin-1"), node.op, node.is_computed, node.expert_ids, *reads]


def _unpack(fields: list[Any]) -> Node:
    name, op, is_computed, expert_ids, *reads = fields
    return Node(name.encode("latin-1"), op, tuple(WeightRead(*read) for read in reads), is_computed, expert_ids)
