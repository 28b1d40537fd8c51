"""The graph map: the nodes of llama.cpp's graph, and the weights that each of them reads. `observer.py` makes it."""

from __future__ import annotations

from dataclasses import dataclass

# Operators, as ggml names them.
COMPUTES_NOTHING = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})  # a leaf, or another look at memory
MATMULS = frozenset({"MUL_MAT", "MUL_MAT_ID"})  # the second by expert
ATTENTION, WRITES_ROWS = "FLASH_ATTN_EXT", "SET_ROWS"


@dataclass(frozen=True, slots=True)
class WeightRead:
    """One weight that a node reads.

    name: its name in the model.
    address: where it lies.
    length: its size in bytes.
    row_bytes: the size of a row, where only rows are looked up; else 0.
    product_row_bytes: the size of a row of a matrix that the processor multiplies by, row for row; else 0.
    is_copied: whether the node, on a GPU, reads a copy, which llama.cpp makes before it asks about the node.
    """

    name: str
    address: int
    length: int
    row_bytes: int = 0
    product_row_bytes: int = 0
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the graph.

    name: its name in llama.cpp.
    op: its operator.
    reads: the weights in the machine's memory that it reads.
    is_computed: whether llama.cpp means to compute it; this is the flag that we may clear.
    expert_ids: for a multiplication by experts, the node whose output holds the ids of the chosen experts (int32,
        perhaps a strided view).
    is_border: whether a pass stops before it, whatever it reads.
    is_on_gpu: whether a GPU computes it.
    cells: the addresses of the keys and values that it reads or writes, of those that are asked about.
    """

    name: bytes
    op: str
    reads: tuple[WeightRead, ...]
    is_computed: bool
    expert_ids: int | None = None
    is_border: bool = False
    is_on_gpu: bool = False
    cells: tuple[int, ...] = ()


GraphMap = tuple[Node, ...]


def choice_of_outputs(graph: GraphMap) -> int:
    """Return the node after which only the tokens whose logits are wanted are computed.

    It is the last lookup of rows in a computed tensor, the weights of chosen experts left aside.
    """
    chosen = (i for i, node in enumerate(graph) if node.op == "GET_ROWS" and not node.reads and b"moe" not in node.name)
    return max(chosen, default=len(graph))
