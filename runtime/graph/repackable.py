"""The weights of a model that may be repacked for kernels that compute several rows at once.

Nothing but multiplications may read such a weight: rows that are looked up, as those of a token table, must lie as they
are in the file. Weights of a kind, a type and a length of rows, are treated alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from edge_run.base.profile import weight_kind
from edge_run.runtime.graph.nodes import MATMULS, GraphMap
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.gguf_header import TensorInfo

if TYPE_CHECKING:
    from edge_run.runtime.llama.repacking import Described


def repackable(graph: GraphMap, gguf: GgufModel) -> dict[str, list[TensorInfo]]:
    """Return the weights of `gguf` that passes like `graph` only multiply by, as wholes, by kind."""
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    ops: dict[str, set[str]] = {}
    for node in graph:
        for read in node.reads:
            tensor = tensors.get(read.name)
            is_product = node.op == "MUL_MAT_ID" or bool(read.product_row_bytes)
            is_whole = tensor is not None and read.length == tensor.size_bytes
            ops.setdefault(read.name, set()).add(node.op if is_product and is_whole else "")
    found: dict[str, list[TensorInfo]] = {}
    for name, names in ops.items():
        if len(names) == 1 and names.issubset(MATMULS):
            found.setdefault(kind_of(tensors[name], by_expert="MUL_MAT_ID" in names), []).append(tensors[name])
    return found


def kind_of(tensor: TensorInfo, *, by_expert: bool) -> str:
    """Return the kind of a weight."""
    return weight_kind(TENSOR_TYPES[tensor.type_id].name, tensor.shape[0], by_expert=by_expert)


def is_by_expert(kind: str) -> bool:
    """Return whether weights of `kind` are experts."""
    return kind.endswith("/experts")


def tensors_of(gguf: GgufModel, names: Collection[str]) -> list[TensorInfo]:
    """Return the tensors of `gguf` that are called so."""
    wanted = set(names)
    return [tensor for tensor in gguf.tensors if tensor.name in wanted]


def described(dense: Iterable[TensorInfo]) -> set[Described]:
    """Return what kernels are chosen by, for weights that every token is multiplied by."""
    return {(tensor.type_id, tensor.shape, False) for tensor in dense}
