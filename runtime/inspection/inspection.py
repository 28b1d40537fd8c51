"""What is known of a model file before it is opened, as a line of text can say it.

The process that found it out (`inspector.py`) needs no more of it than this, and who asks keeps it (`cache.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import MappedSpan
from edge_run.tiers.kv.cells import Cells, CellTensor

SHARD_BYTES = 1 << 46  # a file address: the shard's number times this, plus the offset in it


@dataclass(frozen=True)
class Inspection:
    """What is known of a model before it is opened.

    is_tried: whether the vocabulary was loaded and a pass computed, without which no file is opened. load_s: what
    loading the vocabulary takes. program_bytes: memory of a process, swapped out too, that holds nothing but Python,
    llama.cpp and the vocabulary. Both are estimates where it was not loaded. kv_bytes, buffer_bytes: what the context
    allocates. cell_bytes: of kv_bytes, keys and values written cell by cell; cell_rows: of each such tensor its
    rows (`CellTensor`), its share where all have as many cells, and how many it has at most, those of the ring of a
    sliding window, or 0 where these are the context's; cell_uses: which of them each attention reads. window_tokens,
    windowed_share: of attention with a sliding window, and in what share of the layers it is. narrow_bytes: what narrow
    passes touch of the compute buffer. packed_graph: see `graph`; `spans`: its part of the address space.
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
    cell_rows: tuple[tuple[int, float, int], ...]
    cell_uses: tuple[tuple[int, ...], ...]
    window_tokens: int
    windowed_share: float
    narrow_bytes: int
    spans: tuple[MappedSpan, ...]
    packed_graph: str

    @functools.cached_property
    def cells(self) -> Cells:
        """The context's keys and values."""
        tensors = [
            (rows, share, min(most or self.context_tokens, self.context_tokens)) for rows, share, most in self.cell_rows
        ]
        of_cell = self.cell_bytes / max(1, sum(share * n_cells for _, share, n_cells in tensors))
        sizes = ((n_cells, max(1, round(of_cell * share / rows)), rows) for rows, share, n_cells in tensors)
        return Cells([CellTensor(0, *size) for size in sizes], PAGE)

    @functools.cached_property
    def graph(self) -> GraphMap:
        """The graph of a pass of one token, its weights at file addresses; unpacked when it is first asked for.

        It is the same object for all contexts of a model that have the same graph.
        """
        return _unpacked(self.packed_graph)

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
            "cell_rows": tuple((int(n), float(share), int(most)) for n, share, most in rows),
            "cell_uses": tuple(tuple(map(int, use)) for use in fields["cell_uses"]),
        }
        return cls(**fields | lists)


def pack_graph(graph: GraphMap) -> str:
    """Return `graph` as an `Inspection` has it."""
    return json.dumps([_pack(node) for node in graph])


def _pack(node: Node) -> list[Any]:
    reads = [[read.name, read.address, read.length, read.row_bytes, read.product_row_bytes] for read in node.reads]
    return [node.name.decode("latin-1"), node.op, node.is_computed, node.expert_ids, *reads]


@functools.lru_cache(maxsize=2)  # a model, and its draft model
def _unpacked(text: str) -> GraphMap:
    return tuple(map(_unpack, json.loads(text)))


def _unpack(fields: list[Any]) -> Node:
    name, op, is_computed, expert_ids, *reads = fields
    return Node(name.encode("latin-1"), op, tuple(WeightRead(*read) for read in reads), is_computed, expert_ids)
