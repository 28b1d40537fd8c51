"""What a node of llama.cpp's graph would compute, from the rows of its matrix that are in memory.

The rows of a product do not depend on each other. So a small graph of ours multiplies views of the weight by the node's
input into views of the node's result, on a CPU backend with as many threads as llama.cpp's: the bits are the same. A
lookup of rows may look elsewhere than in the matrix, whose memory the same rows come and go in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from edge_run.base.errors import KernelError
from edge_run.runtime.llama import _ggml as ggml

_TENSORS, _NODES = 4, 4


class _Product(NamedTuple):
    """The small graph of a product, whose rows are set anew for each slice.

    node: llama.cpp's node. context: holds the graph. graph: where it lies.
    part: the rows of the weight. result: their product.
    weight_address: where row 0 of the weight lies.
    """

    node: Any
    context: int
    graph: int
    part: Any
    result: Any
    weight_address: int


class RowProducts:
    """Computes slices of `MUL_MAT` and `MUL_MAT_ID` nodes, and `GET_ROWS` nodes. Not thread-safe."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._backend: int | None = None
        self._product: _Product | None = None
        self._next = 0, 0  # the node of that product, and the row after the last slice

    def multiply(self, address: int, rows: range) -> None:
        """Compute the `rows` of the result of the node at `address`, whose inputs are computed.

        Where it multiplies by experts, these are the same rows of each. The graph of a slice serves the one that
        follows it. Raises KernelError where ggml cannot.
        """
        product = self._product
        if product is None or not rows.start or self._next != (address, rows.start):
            product = self._describe(address)
        node, part, result = product.node, product.part, product.result
        part.ne[1] = result.ne[0] = len(rows)
        part.data = product.weight_address + rows.start * part.nb[1]
        result.data = node.data + rows.start * node.nb[0]
        self._next = address, rows.stop
        self._compute(product.graph)

    def _describe(self, address: int) -> _Product:
        """Return the graph of the product at `address`, in place of the last one."""
        self._forget()
        node = ggml.tensor_at(address)
        weight, given = ggml.tensor_at(node.src[0]), ggml.tensor_at(node.src[1])
        functions, context = ggml.functions(), ggml.describing_context(_TENSORS, _NODES)
        try:
            part_address = functions.ggml_new_tensor_3d(context, weight.type, *weight.ne[:3])
            part = ggml.tensor_at(part_address)
            part.nb[:], part.buffer, part.extra = weight.nb[:], weight.buffer, weight.extra
            inputs = part_address, _leaf(context, given)
            if node.src[2]:
                result = functions.ggml_mul_mat_id(context, *inputs, _leaf(context, ggml.tensor_at(node.src[2])))
            else:
                result = functions.ggml_mul_mat(context, *inputs)
            graph = _graph_of(context, result, node)
        except BaseException:
            functions.ggml_free(context)
            raise
        self._product = _Product(node, context, graph, part, ggml.tensor_at(result), weight.data)
        return self._product

    def _forget(self) -> None:
        product, self._product = self._product, None
        if product:
            ggml.functions().ggml_free(product.context)

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
            graph = _graph_of(context, result, node)
            ggml.tensor_at(result).data = node.data
            self._compute(graph)
        finally:
            functions.ggml_free(context)

    def close(self) -> None:
        """Free the backend. Idempotent."""
        self._forget()
        if self._backend:
            ggml.functions().ggml_backend_free(self._backend)
            self._backend = None

    def _compute(self, graph: int) -> None:
        if not self._backend:
            self._backend = ggml.cpu_backend(self._threads)
        status = ggml.functions().ggml_backend_graph_compute(self._backend, graph)
        if status != 0:
            raise KernelError(f"ggml failed to compute with some rows of a matrix ({status}); please report this model")


def _graph_of(context: int, result: int, node: Any) -> int:
    """Return a graph that computes the tensor at `result` as `node` would be, once it has an address."""
    functions, tensor = ggml.functions(), ggml.tensor_at(result)
    tensor.nb[:], tensor.op_params[:] = node.nb[:], node.op_params[:]
    graph: int = functions.ggml_new_graph_custom(context, _NODES, False)
    functions.ggml_build_forward_expand(graph, result)
    return graph


def _leaf(context: int, tensor: Any) -> int:
    """Return a leaf over the data of `tensor`, which itself would bring all of llama.cpp's graph along."""
    address: int = ggml.functions().ggml_new_tensor_2d(context, tensor.type, tensor.ne[0], tensor.ne[1])
    leaf = ggml.tensor_at(address)
    leaf.data, leaf.ne[:], leaf.nb[:] = tensor.data, tensor.ne[:], tensor.nb[:]
    return address
