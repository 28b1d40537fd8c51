"""Reads llama.cpp's graph as the callback shows it: nodes and their weights, found by structure, not by name.

A weight is a leaf whose buffer is marked as weights, or a view of one. A lookup of rows whose ids are an input of the
graph (token embeddings, learned positions) reads only those rows; any other node reads the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from edge_run.base.errors import KernelError, NotSupported, option
from edge_run.runtime.graph.nodes import COMPUTES_NOTHING, Node, WeightRead
from edge_run.runtime.llama import _ggml as ggml

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ENDS_OF_WEIGHTS = (b".weight", b".bias", b".scale")


class Observer:
    """Turns the nodes that the callback shows into `Node`s.

    copied: the weights that may be copied to a GPU, by name.
    cells: the addresses of keys and values whose readers and writers are to be known.
    """

    def __init__(self, copied: Mapping[bytes, WeightRead] | None = None, cells: AbstractSet[int] = frozenset()) -> None:
        self._may_be_copied, self._cells = copied or {}, cells

    def observe(self, address: int, seen: Sequence[Node]) -> Node:
        """Return the node of the tensor struct at `address`; `seen` are the nodes before it."""
        tensor = ggml.tensor_at(address)
        op = ggml.op_name(tensor.op)
        reads: list[WeightRead] = []
        cells: tuple[int, ...] = ()
        if op not in COMPUTES_NOTHING:
            if self._cells:
                cells = self._cells_of(tensor)
            for index, source in enumerate(tensor.src[:]):
                if source and (read := self._read(op, tensor, index, source)):
                    reads.append(read)
        ids = _producer(tensor.src[2], seen) if op == "MUL_MAT_ID" else None
        is_computed, is_on_gpu = bool(tensor.flags & ggml.FLAG_COMPUTE), not ggml.is_on_host(address)
        return Node(ggml.tensor_name(address), op, tuple(reads), is_computed, ids, is_on_gpu=is_on_gpu, cells=cells)

    def _cells_of(self, tensor: Any) -> tuple[int, ...]:
        """Return which of the keys and values asked about `tensor` reads, through views too, or writes."""
        sources = [*(source for source in tensor.src if source), *([tensor.view_src] if tensor.view_src else [])]
        roots = (ggml.tensor_at(ggml.tensor_at(source).view_src or source).data for source in sources)
        return tuple(sorted(self._cells & set(roots)))

    def _read(self, op: str, tensor: Any, index: int, source: int) -> WeightRead | None:
        part = ggml.tensor_at(source)
        root = part.view_src or source
        if copied := self._copied_weight(root):
            return copied
        if not ggml.is_weight(root) or not ggml.is_on_host(root):
            return None
        row_bytes = 0
        if op == "GET_ROWS" and index == 0 and part.ne[2] == part.ne[3] == 1 and self._is_input(tensor.src[1]):
            row_bytes = part.nb[1]
        length = ggml.functions().ggml_nbytes(source)
        is_matrix = op == "MUL_MAT" and index == 0 and part.nb[1] * part.ne[1] == length
        product_row_bytes = part.nb[1] if is_matrix else 0
        name = ggml.tensor_name(root).decode("utf-8", "replace")
        return WeightRead(name, part.data, length, row_bytes, product_row_bytes)

    def _copied_weight(self, source: int) -> WeightRead | None:
        """Return the weight that `source` is a copy of. Raises NotSupported where it is a copy of no known weight."""
        name = ggml.tensor_name(source)
        original = _copied(name)
        if original is name or not (read := self._may_be_copied.get(original)):
            if original is not name and original.endswith(_ENDS_OF_WEIGHTS):
                raise NotSupported(
                    f"GPU: llama.cpp would copy {original.decode('utf-8', 'replace')} there for every pass; give "
                    f"another {option('gpu_memory')}, or 0"
                )
            return None
        return read

    def _is_input(self, address: int) -> bool:
        ids = ggml.tensor_at(address)
        root = ggml.tensor_at(ids.view_src) if ids.view_src else ids
        return ggml.op_name(root.op) == "NONE" and ids.nb[0] == 4 and not ggml.is_weight(address)


def _producer(source: int, seen: Sequence[Node]) -> int | None:
    """Return the node that computes `source`, or the tensor that `source` is a view of; None for an input."""
    name = _copied(ggml.tensor_name(ggml.tensor_at(source).view_src or source))
    return next((i for i in range(len(seen) - 1, -1, -1) if seen[i].name == name), None)


def _copied(name: bytes) -> bytes:
    """Return the original's name, if `name` is that of a copy for another device (`CPU#name#0`)."""
    if b"#" not in name:
        return name
    parts = name.split(b"#")
    return parts[1] if len(parts) == 3 else name


def makes_ids(address: int) -> bool:
    """Return whether the node at `address` computes integers, which may be the ids of experts.

    Ids made on a GPU do not count, as they need no stop: they are copied before another node uses them.
    """
    tensor = ggml.tensor_at(address)
    is_made = tensor.type == ggml.I32 and ggml.op_name(tensor.op) not in COMPUTES_NOTHING
    return is_made and ggml.is_on_host(address)


def chosen_experts(address: int, n_experts: int) -> npt.NDArray[np.int32]:
    """Return the expert ids, (tokens, experts per token), of the MUL_MAT_ID node at `address`; they must be computed.

    There may be no token: the last layer leaves out those whose logits nobody wants. Raises KernelError for an id
    beyond `n_experts`.
    """
    ids = ggml.tensor_at(ggml.tensor_at(address).src[2])
    n_used, n_tokens = ids.ne[0], ids.ne[1]
    if n_tokens == 0:
        return ggml.read_int32(0, 0).reshape(0, n_used)
    rows = ggml.read_int32_rows(ids.data, (n_tokens, n_used), ids.nb[1])
    if rows.view("u4").max() >= n_experts:  # those below zero are the largest then
        beyond = rows[(rows < 0) | (rows >= n_experts)][0]
        raise KernelError(f"llama.cpp chose expert {beyond} of {n_experts}; please report this model")
    return rows


def looked_up_rows(address: int) -> list[int]:
    """Return the distinct rows that the GET_ROWS node at `address` reads; its ids must be an input of the graph."""
    ids = ggml.tensor_at(ggml.tensor_at(address).src[1])
    count = ids.ne[0] * ids.ne[1] * ids.ne[2] * ids.ne[3]
    return sorted(set(ggml.read_int32(ids.data, count).tolist()))
