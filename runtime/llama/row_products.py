"""Products of a matrix with some of its rows in memory: what a node of llama.cpp's graph would compute, in slices.

The rows of a product do not depend on each other. So a small graph of ours multiplies views of the weight by the node's
input into views of the node's result, on a CPU backend with as many threads as llama.cpp's: the bits are the same.
"""

from __future__ import annotations

from edge_run.base.errors import KernelError
from edge_run.runtime.llama import _ggml as ggml

_TENSORS, _NODES = 3, 4


class RowProducts:
    """Computes slices of `MUL_MAT` nodes. Not thread-safe."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._backend: int | None = None

    def multiply(self, address: int, rows: range) -> None:
        """Compute the `rows` of the result of the node at `address`, whose input is computed.

        Raises KernelError where ggml cannot.
        """
        node = ggml.tensor_at(address)
        weight, given = ggml.tensor_at(node.src[0]), ggml.tensor_at(node.src[1])
        functions, context = ggml.functions(), ggml.describing_context(_TENSORS, _NODES)
        try:
            part_address = functions.ggml_new_tensor_2d(context, weight.type, weight.ne[0], len(rows))
            part = ggml.tensor_at(part_address)
            part.data = weight.data + rows.start * weight.nb[1]
            part.buffer, part.extra = weight.buffer, weight.extra
            # A leaf over the same data: llama.cpp's own tensor would bring all of its graph along.
            input_address = functions.ggml_new_tensor_2d(context, given.type, given.ne[0], given.ne[1])
            like = ggml.tensor_at(input_address)
            like.data, like.ne[:], like.nb[:] = given.data, given.ne[:], given.nb[:]
            result_address = functions.ggml_mul_mat(context, part_address, input_address)
            result = ggml.tensor_at(result_address)
            result.data, result.nb[:] = node.data + rows.start * node.nb[0], node.nb[:]
            result.op_params[:] = node.op_params[:]
            self._compute(context, result_address)
        finally:
            functions.ggml_free(context)

    def close(self) -> None:
        """Free the backend. Idempotent."""
        if self._backend:
            ggml.functions().ggml_backend_free(self._backend)
            self._backend = None

    def _compute(self, context: int, result: int) -> None:
        functions = ggml.functions()
        if not self._backend:
            self._backend = ggml.cpu_backend(self._threads)
        graph = functions.ggml_new_graph_custom(context, _NODES, False)
        functions.ggml_build_forward_expand(graph, result)
        status = functions.ggml_backend_graph_compute(self._backend, graph)
        if status != 0:
            raise KernelError(f"ggml failed to multiply by a slice of a matrix ({status}); please report this model")
