"""Reads ONNX files, runs them once for the shapes of their tensors, and cuts them in two. Needs the package `onnx`.

A network is cut before onnxruntime optimises it, so each half keeps the nodes of the file as they are.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError, ModelFileError, ModelFileMissing, NotSupported, not_opened, reason_of
from edge_run.base.extras import TRAIN, need
from edge_run.partition.cuts import Network, Operation, find_cuts, multiply_adds, operations_between, peak_bytes
from edge_run.runtime.split.images import no_regular_file
from edge_run.runtime.split.onnx_session import MOST_NETWORK_BYTES, MOST_VALUES, arbitrary, first_line, traced

_NUMBERS = "biuf"  # kinds of NumPy types: truth values, integers, numbers


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ONNX model and what a run of it showed.

    proto: an `onnx.ModelProto`.
    network: its graph as names and sizes.
    shapes: of each tensor that depends on the input, with a batch of one.
    types: their NumPy types.
    constants: the shapes of the other tensors: of weights, and of what is made of them.
    has_free_batch: the file leaves the first dimension of its input open.
    """

    path: Path
    proto: Any
    network: Network
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, np.dtype[Any]]
    constants: Mapping[str, tuple[int, ...]]
    has_free_batch: bool

    @property
    def input_name(self) -> str:
        """The name of its only input."""
        return self.network.inputs[0]

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """The size of each tensor that depends on the input."""
        return {name: int(np.prod(shape)) * self.types[name].itemsize for name, shape in self.shapes.items()}

    @property
    def cuts(self) -> list[str]:
        """The tensors of numbers at which it can be cut in two, in order, the input first."""
        return [name for name in find_cuts(self.network) if name in self.types and self.types[name].kind in _NUMBERS]

    @property
    def multiply_adds(self) -> int:
        """Those of all of it."""
        return multiply_adds(self.network, operations_between(self.network, None, None))

    def peak_bytes(self, start: str | None = None, end: str | None = None) -> int:
        """Return the most bytes of tensors at once from tensor `start` (None: the input) to `end` (None: outputs)."""
        ends = self.network.outputs if end is None else (end,)
        return peak_bytes(self.network, operations_between(self.network, start, end), ends, self.sizes_bytes)

    def sample(self, seed: int = 0) -> NDArray[Any]:
        """Return an arbitrary input with a batch of one, the same for the same seed."""
        return arbitrary(self.shapes[self.input_name], self.types[self.input_name], seed)


def read_onnx(path: Path) -> OnnxModel:
    """Return the model in the ONNX file `path`, its shapes found by running it once on arbitrary numbers.

    Raises ModelFileError where the file is missing or broken, NotSupported where it has not one input of known size or
    takes too much memory or time, and TierReadError where the folder for temporary files is full.
    """
    onnx = need("onnx", TRAIN)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without end
            raise no_regular_file(path, "a network")
        _check_size(path, status.st_size)
        proto = onnx.load(str(path), load_external_data=False)
        _load_beside(proto, path)
        onnx.checker.check_model(proto)
    except (NotSupported, ModelFileError):
        raise
    except OSError as error:
        why = reason_of(error)
        raise not_opened(error, f"{path}: cannot be read ({why}); check the path and its permissions") from error
    except Exception as error:  # protobuf and the checker have no common ancestor
        raise ModelFileError(f"{path}: is no ONNX file that can be read ({first_line(error)})") from error
    return describe(proto, path)


def _load_beside(proto: Any, path: Path) -> None:
    """Read the weights that `proto` has in files beside `path`, in which few bytes may ask for any number of them."""
    beside = need("onnx.external_data_helper", TRAIN)
    size_bytes = path.stat().st_size
    for tensor in filter(beside.uses_external_data, beside._get_all_tensors(proto)):
        place = beside.ExternalDataInfo(tensor)
        if not (path.parent / place.location).is_file():
            raise ModelFileMissing(f"{path}: its weights in {place.location} are not there; put that file beside it")
        n_bytes = (path.parent / place.location).stat().st_size if place.length is None else place.length
        size_bytes += max(n_bytes, 0)
        _check_size(path, size_bytes)
    beside.load_external_data_for_model(proto, str(path.parent))


def _check_size(path: Path, size_bytes: int) -> None:
    if size_bytes > MOST_NETWORK_BYTES:
        raise NotSupported(
            f"{path}: has {size_bytes:,} bytes or more with the weights beside it; an ONNX file can be cut up to "
            f"{MOST_NETWORK_BYTES:,}"
        )


def describe(proto: Any, path: Path) -> OnnxModel:
    """Return `proto`, an `onnx.ModelProto`, with its graph and shapes; messages name `path`. Raises as above."""
    graph = proto.graph
    weights = {one.name for one in graph.initializer} | {one.values.name for one in graph.sparse_initializer}
    inputs = [one for one in graph.input if one.name not in weights]
    if len(inputs) != 1:
        names = ", ".join(one.name for one in inputs) or "none"
        raise NotSupported(f"{path}: has {len(inputs)} inputs ({names}); networks with one input can be cut")
    (shape, has_free_batch), dtype = _input_shape(inputs[0], path), _input_type(inputs[0], path)
    outputs = tuple(one.name for one in graph.output)
    bare = [Operation(one.op_type, _reads(one), tuple(one.output)) for one in graph.node]
    network = Network((inputs[0].name,), outputs, tuple(bare))
    values = {**traced(_traced(proto), shape, dtype, str(path)), inputs[0].name: (shape, dtype)}
    known = weights | {name for name, (_, kind) in values.items() if kind.kind in _NUMBERS}
    odd = [name for name in outputs if name not in known]
    if odd:
        raise NotSupported(
            f"{path}: answers with {odd[0]}, which is no tensor of numbers; export it without that (scikit-learn's: "
            "with zipmap=False)"
        )
    moving = {inputs[0].name} | {name for index in network.moving() for name in bare[index].outputs}
    shapes = {name: size for name, (size, _) in values.items() if name in moving}
    types = {name: kind for name, (_, kind) in values.items() if name in moving}
    constants = {one.name: tuple(one.dims) for one in graph.initializer}
    constants.update((name, size) for name, (size, _) in values.items() if name not in moving)
    counted = tuple(
        Operation(one.kind, one.inputs, one.outputs, _multiply_adds(one, {**constants, **shapes})) for one in bare
    )
    return OnnxModel(path, proto, Network(network.inputs, outputs, counted), shapes, types, constants, has_free_batch)


def extract(model: OnnxModel, start: str | None, end: str | None) -> Any:
    """Return the part of `model` from tensor `start` to tensor `end` as an `onnx.ModelProto`.

    None is the model's input, or its outputs. The nodes are those of the file, untouched.
    """
    onnx = need("onnx", TRAIN)
    graph = model.proto.graph
    nodes = [graph.node[index] for index in operations_between(model.network, start, end)]
    read = {name for node in nodes for name in _reads(node)}
    inputs = [value_info(model, name) for name in (model.network.inputs if start is None else (start,))]
    ends = list(graph.output) if end is None else [value_info(model, end)]
    part = onnx.helper.make_graph(
        nodes, graph.name or "part", inputs, ends, [one for one in graph.initializer if one.name in read]
    )
    part.sparse_initializer.extend(one for one in graph.sparse_initializer if one.values.name in read)
    return finish(model, part)


def finish(model: OnnxModel, graph: Any) -> Any:
    """Return `graph` as a model with the operator sets and functions of `model`."""
    onnx = need("onnx", TRAIN)
    made = onnx.helper.make_model(graph, opset_imports=model.proto.opset_import, producer_name="edge-run")
    made.ir_version = max(model.proto.ir_version, 4)  # before 4, weights had to be listed as inputs
    made.functions.extend(model.proto.functions)
    return made


def value_info(model: OnnxModel, name: str) -> Any:
    """Return the type of a tensor as ONNX writes it; its batch is open where that of the model is."""
    helper = need("onnx", TRAIN).helper
    shape: list[int | str] = list(model.shapes[name])
    if model.has_free_batch and shape:
        shape[0] = "N"
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(model.types[name]), shape)


def _input_shape(value: Any, path: Path) -> tuple[tuple[int, ...], bool]:
    dims = list(value.type.tensor_type.shape.dim)
    if not value.type.HasField("tensor_type") or not dims:
        raise NotSupported(f"{path}: input {value.name} is no tensor of known rank; only those can be cut")
    sizes = [one.dim_value if one.HasField("dim_value") else 0 for one in dims]
    if any(size <= 0 for size in sizes[1:]):
        written = " x ".join(str(one.dim_value or one.dim_param or "?") for one in dims)
        raise NotSupported(
            f"{path}: input {value.name} has open dimensions ({written}); only the first, the batch, may be open: "
            "export the model with a fixed size"
        )
    if (n_values := math.prod(sizes[1:])) > MOST_VALUES:
        raise NotSupported(
            f"{path}: input {value.name} has {n_values:,} values, {MOST_VALUES:,} are the most that can be cut"
        )
    if sizes[0] > 1:
        raise NotSupported(f"{path}: input {value.name} has a batch of {sizes[0]}; export it with 1 or an open one")
    return (1, *sizes[1:]), sizes[0] <= 0


def _input_type(value: Any, path: Path) -> np.dtype[Any]:
    onnx, code = need("onnx", TRAIN), value.type.tensor_type.elem_type
    names = {number: name for name, number in onnx.TensorProto.DataType.items()}
    if code in names and code != onnx.TensorProto.UNDEFINED:
        found = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
        if found.kind in _NUMBERS:
            return found
    raise NotSupported(
        f"{path}: input {value.name} is of type {names.get(code, code)}, which numbers here cannot be; export it for "
        "single precision"
    )


def _traced(proto: Any) -> bytes:
    """Return the model with what every node makes as an output."""
    onnx = need("onnx", TRAIN)
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    del made.graph.output[:]
    names = [name for node in proto.graph.node for name in node.output if name]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return bytes(made.SerializeToString())


def _reads(node: Any) -> tuple[str, ...]:
    """Return what a node reads, with what the graphs in its attributes read from outside themselves."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            names += _reads_outside(body)
    return tuple(dict.fromkeys(names))


def _reads_outside(body: Any) -> Iterable[str]:
    inside = {one.name for one in (*body.input, *body.initializer)} | {name for one in body.node for name in one.output}
    read = [name for node in body.node for name in _reads(node)] + [one.name for one in body.output]
    return [name for name in read if name not in inside]


def _multiply_adds(operation: Operation, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the multiply-adds of a convolution or a matrix product; of anything else 0."""
    if operation.kind not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return 0
    factors = (*operation.inputs, operation.inputs[0])[:2]  # a matrix may be multiplied by itself
    made, first, second = (shapes.get(name, ()) for name in (operation.outputs[0], *factors))
    if operation.kind == "Conv":
        return int(np.prod(made)) * int(np.prod(second[1:]))
    if operation.kind == "ConvTranspose":
        return int(np.prod(first)) * int(np.prod(second[1:]))
    return int(np.prod(made)) * (first[-1] if operation.kind == "MatMul" and first else int(np.prod(first[1:])))


def find_tensor(model: OnnxModel, name: str) -> str:
    """Return `name` where `model` can be cut there. Raises ConfigError, with the nearest names, where it cannot."""
    import difflib

    cuts = model.cuts
    if name in cuts:
        return name
    near = ", ".join(difflib.get_close_matches(name, cuts, 4, 0.3) or cuts[:4])
    what = "is no single-tensor cut of it" if name in model.shapes else "there is no such tensor in it"
    raise ConfigError(
        f"{model.path}: {name}: {what}; there are {len(cuts)} cuts, as {near}: see `edge-run split inspect`",
    )
