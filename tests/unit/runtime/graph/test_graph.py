"""The graph map: which weights a node of a real ggml graph reads, and whether as a whole or by row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import KernelError
from edge_run.runtime.graph.nodes import Node, WeightRead
from edge_run.runtime.graph.observer import Observer, chosen_experts, looked_up_rows
from edge_run.runtime.llama import _ggml

F32, I32 = 0, 26
ROWS, WIDTH = 50, 64


class Ggml:
    """A ggml context whose weights, inputs and nodes the test makes; weights and the rest in a buffer each."""

    def __init__(self) -> None:
        self.functions = _ggml.functions()
        self.base = _ggml._library("ggml-base")
        pointer = ctypes.c_void_p
        for name, n_pointers in (
            ("ggml_get_rows", 3),
            ("ggml_mul_mat", 3),
            ("ggml_mul_mat_id", 4),
            ("ggml_add", 3),
            ("ggml_transpose", 2),
        ):
            function = getattr(self.base, name)
            function.restype, function.argtypes = pointer, [pointer] * n_pointers
        self.base.ggml_new_tensor_3d.restype = pointer
        self.base.ggml_new_tensor_3d.argtypes = [pointer, ctypes.c_int, *[ctypes.c_int64] * 3]
        self.base.ggml_view_2d.restype = pointer
        self.base.ggml_view_2d.argtypes = [pointer, pointer, *[ctypes.c_int64] * 2, *[ctypes.c_size_t] * 2]
        self.base.ggml_backend_buffer_set_usage.argtypes = [pointer, ctypes.c_int]
        self.backend = self.functions.ggml_backend_init_by_type(0, None)
        self.contexts = [self.functions.ggml_init(_ggml._InitParams(1 << 20, None, True)) for _ in range(3)]
        self.weights, self.inputs, self.nodes = self.contexts
        self.buffers: list[int] = []

    def tensor(self, context: int, name: str, kind: int, *shape: int) -> int:
        sizes = (*shape, 1, 1)[:3]
        tensor: int = self.base.ggml_new_tensor_3d(context, kind, *sizes)
        self.functions.ggml_set_name(tensor, name.encode())
        return tensor

    def allocate(self) -> None:
        for context in (self.weights, self.inputs):
            buffer = self.functions.ggml_backend_alloc_ctx_tensors(context, self.backend)
            self.buffers.append(buffer)
        self.base.ggml_backend_buffer_set_usage(self.buffers[0], _ggml.USAGE_WEIGHTS)

    def node(self, name: str, function: str, *arguments: Any) -> int:
        node: int = getattr(self.base, function)(self.nodes, *arguments)
        self.functions.ggml_set_name(node, name.encode())
        return node

    def close(self) -> None:
        for buffer in self.buffers:
            self.functions.ggml_backend_buffer_free(buffer)
        for context in self.contexts:
            self.functions.ggml_free(context)
        self.functions.ggml_backend_free(self.backend)


@pytest.fixture
def ggml() -> Iterator[Ggml]:
    made = Ggml()
    made.table = made.tensor(made.weights, "token_embd.weight", F32, WIDTH, ROWS)  # type: ignore[attr-defined]
    made.bias = made.tensor(made.weights, "bias", F32, WIDTH)  # type: ignore[attr-defined]
    made.experts = made.tensor(made.weights, "experts", F32, WIDTH, 8, 4)  # type: ignore[attr-defined]
    made.ids = made.tensor(made.inputs, "inp_tokens", I32, 6)  # type: ignore[attr-defined]
    made.state = made.tensor(made.inputs, "inp_embd", F32, WIDTH, 6)  # type: ignore[attr-defined]
    made.chosen = made.tensor(made.inputs, "chosen", I32, 2, 6)  # type: ignore[attr-defined]
    made.allocate()
    yield made
    made.close()


def observe(*nodes: int) -> list[Node]:
    observer, seen = Observer(), list[Node]()
    for node in nodes:
        seen.append(observer.observe(node, seen))
    return seen


def whole(name: str, tensor: int) -> WeightRead:
    return WeightRead(name, _ggml.tensor_at(tensor).data, _ggml.functions().ggml_nbytes(tensor))


@pytest.mark.parametrize("name", ["ggml_nbytes", "ggml_backend_buffer_get_usage", "ggml_backend_buffer_is_host"])
def test_what_each_node_is_asked_lets_no_reader_run_meanwhile(name: str) -> None:
    """It could be long before it gave Python's lock back."""
    holds_lock = ctypes.PyDLL(None).PyLong_FromLong._flags_
    assert getattr(_ggml.functions(), name)._flags_ == holds_lock


def test_a_multiplication_reads_its_weight_row_for_row(ggml: Any) -> None:
    (node,) = observe(ggml.node("out", "ggml_mul_mat", ggml.table, ggml.state))
    assert (node.name, node.op) == (b"out", "MUL_MAT")
    assert node.reads == (replace(whole("token_embd.weight", ggml.table), product_row_bytes=WIDTH * 4),)
    assert node.reads[0].length == ROWS * WIDTH * 4


def test_what_is_no_weight_is_not_read(ggml: Any) -> None:
    (node,) = observe(ggml.node("sum", "ggml_add", ggml.state, ggml.state))
    assert node.reads == ()


def test_a_lookup_of_tokens_reads_rows(ggml: Any) -> None:
    rows = ggml.node("embd", "ggml_get_rows", ggml.table, ggml.ids)
    (node,) = observe(rows)
    assert [read.row_bytes for read in node.reads] == [WIDTH * 4]
    ids = np.array([7, 3, 7, 49, 0, 3], np.int32)
    ctypes.memmove(_ggml.tensor_at(ggml.ids).data, ids.ctypes.data, ids.nbytes)
    assert looked_up_rows(rows) == [0, 3, 7, 49]


def test_a_lookup_by_ids_that_the_graph_computes_reads_the_whole(ggml: Any) -> None:
    """When the node is asked about, nobody knows those ids yet."""
    doubled = ggml.node("ids", "ggml_add", ggml.ids, ggml.ids)
    (_, node) = observe(doubled, ggml.node("embd", "ggml_get_rows", ggml.table, doubled))
    assert [read.row_bytes for read in node.reads] == [0]


def test_a_part_of_a_weight_is_read_where_it_lies(ggml: Any) -> None:
    row = WIDTH * 4
    part = ggml.node("part", "ggml_view_2d", ggml.table, WIDTH, 10, row, 20 * row)
    (node,) = observe(ggml.node("out", "ggml_mul_mat", part, ggml.state))
    start = _ggml.tensor_at(ggml.table).data + 20 * row
    assert node.reads == (WeightRead("token_embd.weight", start, 10 * row, product_row_bytes=row),)


def test_making_a_view_of_a_weight_reads_nothing(ggml: Any) -> None:
    (node,) = observe(ggml.node("turned", "ggml_transpose", ggml.table))
    assert (node.op, node.reads) == ("TRANSPOSE", ())


def test_two_weights_of_one_node_are_both_read(ggml: Any) -> None:
    (node,) = observe(ggml.node("sum", "ggml_add", ggml.table, ggml.bias))
    assert node.reads == (whole("token_embd.weight", ggml.table), whole("bias", ggml.bias))


def test_a_multiplication_by_experts_knows_who_chose_them(ggml: Any) -> None:
    rows = ggml.node("rows", "ggml_add", ggml.chosen, ggml.chosen)
    view = ggml.node("topk", "ggml_view_2d", rows, 2, 6, 8, 0)
    wide = ggml.base.ggml_new_tensor_3d(ggml.nodes, F32, WIDTH, 1, 6)
    nodes = observe(rows, ggml.node("out", "ggml_mul_mat_id", ggml.experts, wide, view))
    assert nodes[1].expert_ids == 0, "the node behind the view"
    assert nodes[1].reads == (whole("experts", ggml.experts),)
    (alone,) = observe(ggml.node("alone", "ggml_mul_mat_id", ggml.experts, wide, ggml.chosen))
    assert alone.expert_ids is None, "an input of the graph"


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_there_is_not_is_named(ggml: Any, wrong: int) -> None:
    wide = ggml.base.ggml_new_tensor_3d(ggml.nodes, F32, WIDTH, 1, 6)
    node = ggml.node("out", "ggml_mul_mat_id", ggml.experts, wide, ggml.chosen)

    def choose(expert: int) -> Any:
        ids = np.array([0, expert] * 6, np.int32)
        ctypes.memmove(_ggml.tensor_at(ggml.chosen).data, ids.ctypes.data, ids.nbytes)
        return chosen_experts(node, 4).tolist()

    assert choose(3) == [[0, 3]] * 6
    with pytest.raises(KernelError, match=f"chose expert {wrong} of 4;"):
        choose(wrong)


def test_ids_of_experts_may_be_a_part_of_longer_rows(ggml: Any) -> None:
    ids = np.array([3, 0, 9, 1, 2, 9], np.int32)
    ctypes.memmove(_ggml.tensor_at(ggml.ids).data, ids.ctypes.data, ids.nbytes)
    part = ggml.node("topk", "ggml_view_2d", ggml.ids, 2, 2, 12, 0)
    wide = ggml.base.ggml_new_tensor_3d(ggml.nodes, F32, WIDTH, 1, 2)
    node = ggml.node("out", "ggml_mul_mat_id", ggml.experts, wide, part)
    assert chosen_experts(node, 4).tolist() == [[3, 0], [1, 2]]
