"""The graph map: what each node of llama.cpp's graph is and which weights it reads. `observer.py` makes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightRead:
    """One weight that a node reads: `length` bytes at `address`. row_bytes: above 0 when only rows are looked up.

    is_copied: the node, on a GPU, reads a copy, which llama.cpp makes before anybody is asked about the node.
    """

    name: str
    address: int
    length: int
    row_bytes: int = 0
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the graph.

    is_computed: llama.cpp means to compute it (the flag that we may clear). expert_ids: of a multiplication by experts,
    the ordinal of the node whose output holds the ids of the experts chosen (int32, perhaps a strided view). is_border:
    a pass stops before it, whatever it reads. is_on_gpu: computed there; `reads` are what is in the machine's memory.
    """

    name: bytes
    op: str
    reads: tuple[WeightRead, ...]
    is_computed: bool
    expert_ids: int | None = None
    is_border: bool = False
    is_on_gpu: bool = False


GraphMap = tuple[Node, ...]


def choice_of_outputs(graph: GraphMap) -> int:
    """Return the last node before which all tokens are computed, and after which those whose logits are wanted.

    That is the last lookup of rows in something computed, but for the weights of chosen experts.
    """
    chosen = (i for i, node in enumerate(graph) if node.op == "GET_ROWS" and not node.reads and b"moe" not in node.name)
    return max(chosen, default=len(graph))
