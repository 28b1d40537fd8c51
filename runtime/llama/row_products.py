"""What a node of llama.cpp's graph would compute, from the rows of its matrix that are in memory.

The rows of a product do not depend on each other. So a small graph of ours multiplies views of the weight by the node's
input into views of the node's result, on a CPU backend with as many threads as llama.cpp's: the bits are the same. A
lookup of rows may look elsewhere than in the matrix, whose memory the same rows come and go in.
"""

from __future__ import annotations

from typing import Any

from edge_run.base.errors import KernelError
from edge_run.runtime.llama import _ggml as ggml

_TENSORS, _NODES = 4, 4


class RowProducts:
    """Computes slices of `MUL_MAT` and `MUL_MAT_ID` nodes, and `GET_ROWS` nodes. Not thread-safe."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._backend: int | None = None

    def multiply(self, address: int, rows: range) -> None:
        """Compute the `rows` of the result of the node at `address`, whose inputs are computed.

        Where it multiplies by experts, these are the same rows of each. Raises KernelError where ggml cannot.
        """
        node = ggml.tensor_at(address)
        weight, given = ggml.tensor_at(node.src[0]), ggml.tensor_at(node.src[1])
        functions, context = ggml.functions(), ggml.describing_context(_TENSORS, _NODES)
        try:
            part_address = functions.ggml_new_tensor_3d(context, weight.type, weight.ne[0], len(rows), weight.ne[2])
            part = ggml.tensor_at(part_address)
            part.data, part.nb[:] = weight.data + rows.start * weight.nb[1], weight.nb[:]
            part.buffer, part.extra = weight.buffer, weight.extra
            inputs = part_address, _leaf(context, given)
            if node.src[2]:
                result = functions.ggml_mul_mat_id(context, *inputs, _leaf(context, ggml.tensor_at(node.src[2])))
            else:
                result = functions.ggml_mul_mat(context, *inputs)
            self._compute(context, result, node, rows.start * node.nb[0])
        finally:
            functions.ggml_free(context)

    def look_up(self, address: int, table: int) -> None:
        """Compute the node at `address`, which looks up rows of a matrix, from what lies at the address `table`.

        The ids must be known. Raises KernelError where ggml cannot.
        """
        node = ggml.tensor_at(address)
        functions, context = ggml.functions(), ggml.describing_context(_TENSORS, _NODES)
        try:
            matrix = _leaf(context, ggml.tensor_at(node.src[0]))
            ggml.tensor_at(matrix).data = table
            result = functions.ggml_get_rows(context, matrix, _leaf(context, ggml.tensor_at(node.src[1])))
            self._compute(context, result, node, 0)
        finally:
            functions.ggml_free(context)

    def close(self) -> None:
        """Free the backend. Idempotent."""
        if self._backend:
            ggml.functions().ggml_backend_free(self._backend)
            self._backend = None

    def _compute(self, context: int, result: int, node: Any, offset: int) -> None:
        """Compute the tensor at `result` as `node` would be, into its memory from byte `offset` on."""
        functions, tensor = ggml.functions(), ggml.tensor_at(result)
        tensor.data, tensor.nb[:], tensor.op_params[:] = node.data + offset, node.nb[:], node.op_params[:]
        if not self._backend:
            self._backend = ggml.cpu_backend(self._threads)
        graph = functions.ggml_new_graph_custom(context, _NODES, False)
        functions.ggml_build_forward_expand(graph, result)
        status = functions.ggml_backend_graph_compute(self._backend, graph)
        if status != 0:
            raise KernelError(f"ggml failed to compute with some rows of a matrix ({status}); please report this model")


def _leaf(context: int, tensor: Any) -> int:
    """Return a leaf over the data of `tensor`, which itself would bring all of llama.cpp's graph along."""
    address: int = ggml.functions().ggml_new_tensor_2d(context, tensor.type, tensor.ne[0], tensor.ne[1])
    leaf = ggml.tensor_at(address)
    leaf.data, leaf.ne[:], leaf.nb[:] = tensor.data, tensor.ne[:], tensor.nb[:]
    return address
