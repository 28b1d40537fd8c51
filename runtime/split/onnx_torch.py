"""An ONNX graph as a differentiable PyTorch function: what training needs, for the operators of common vision networks.

There is one description of a network, the ONNX graph; training runs it here and writes what it learned back into the
graph's weights, so that no exporter takes part. `Round` passes gradients straight through (Bengio et al., 2013).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import EdgeRunError, NotSupported
from edge_run.base.extras import TRAIN, need
from edge_run.runtime.split.onnx_session import first_line, largest_difference

_Attributes = Mapping[str, Any]
MOST_DIFFERENCE = 0.01  # of PyTorch's answers from onnxruntime's, as a share of the largest
_SLICE_END = 1 << 31
_FACTS = {"BatchNormalization": (3, 4), "Resize": (1, 2)}  # inputs that do not learn: mean and variance, and sizes


class TorchGraph:
    """The nodes of an ONNX graph, run by PyTorch.

    weights: its initializers; floats of rank 1 or more learn, but for what a node takes as a fact.
    """

    def __init__(self, graph: Any, name: str) -> None:
        """Take an `onnx.GraphProto`. Raises NotSupported, naming the operator, where one is not among those known."""
        onnx, torch = need("onnx", TRAIN), need("torch", TRAIN)
        self.inputs = [one.name for one in graph.input]
        self.outputs = [one.name for one in graph.output]
        self.weights = {one.name: torch.tensor(onnx.numpy_helper.to_array(one)) for one in graph.initializer}
        self._facts = {node.input[index] for node in graph.node for index in _facts(node)}
        self._steps: list[tuple[Any, list[str], list[str], _Attributes]] = []
        operators = _operators()
        unknown = sorted({node.op_type for node in graph.node} - operators.keys())
        if unknown:
            raise NotSupported(f"{name}: training does not know the operators {', '.join(unknown)}")
        for node in graph.node:
            attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
            if node.op_type == "Constant":
                attributes = {"value": torch.tensor(_constant(attributes, name))}
            self._steps.append((operators[node.op_type], list(node.input), list(node.output), attributes))

    def parameters(self) -> list[Any]:
        """Return the weights that learn, from now on with gradients."""
        weights = [one for name, one in self.weights.items() if name not in self._facts]
        learning = [one for one in weights if one.is_floating_point() and one.dim() > 0]
        for one in learning:
            one.requires_grad_(True)
        return learning

    def __call__(self, *values: Any) -> list[Any]:
        """Return the outputs for these inputs; the first dimension is a batch."""
        known = dict(zip(self.inputs, values, strict=True)) | self.weights
        for operator, inputs, outputs, attributes in self._steps:
            made = operator([known[name] if name else None for name in inputs], attributes)
            known.update(zip(outputs, made if isinstance(made, tuple | list) else (made,), strict=False))
        return [known[name] for name in self.outputs]

    def write_into(self, graph: Any) -> None:
        """Replace the initializers of `graph` that have this graph's names by its weights."""
        numpy_helper = need("onnx", TRAIN).numpy_helper
        for one in graph.initializer:
            if one.name in self.weights:
                value = self.weights[one.name].detach().cpu().contiguous().numpy()
                one.CopyFrom(numpy_helper.from_array(value, one.name))


def _facts(node: Any) -> list[int]:
    """Return which inputs of a node do not learn."""
    return [index for index in _FACTS.get(node.op_type, ()) if index < len(node.input)]


def _constant(attributes: _Attributes, name: str) -> NDArray[Any]:
    """Return what a Constant node makes; its only attribute says of which kind that is."""
    for kind, value in attributes.items():
        if kind == "value":
            return np.array(need("onnx", TRAIN).numpy_helper.to_array(value))
        if kind in ("value_float", "value_floats"):
            return np.array(value, dtype=np.float32)
        if kind in ("value_int", "value_ints"):
            return np.array(value, dtype=np.int64)
    raise NotSupported(f"{name}: training does not know a Constant of {', '.join(attributes) or 'nothing'}")


def check_same(graphs: Sequence[TorchGraph], value: NDArray[Any], wanted: list[NDArray[Any]], name: str) -> None:
    """Raise NotSupported where graphs in turn do not make of `value` what onnxruntime does, `wanted`, each of them."""
    torch = need("torch", TRAIN)
    made = [torch.from_numpy(value)]
    try:
        for graph in graphs:
            made = graph(*made)
    except EdgeRunError:
        raise
    except Exception as error:  # PyTorch's errors have no common ancestor
        raise NotSupported(f"{name}: PyTorch cannot compute it ({first_line(error)})") from error
    for one, right in zip(made, wanted, strict=True):
        most = MOST_DIFFERENCE * float(np.abs(right).max(initial=0))
        if not largest_difference([one.detach().numpy()], [right]) <= most:
            raise NotSupported(f"{name}: PyTorch does not compute it as onnxruntime does, so it cannot be trained")


def _operators() -> dict[str, Callable[[Sequence[Any], _Attributes], Any]]:
    torch = need("torch", TRAIN)
    functions = torch.nn.functional
    return {
        "Conv": _convolve,
        "BatchNormalization": lambda x, a: functions.batch_norm(
            x[0], x[3], x[4], x[1], x[2], training=False, eps=a.get("epsilon", 1e-5)
        ),
        "Gemm": _gemm,
        "MatMul": lambda x, a: x[0] @ x[1],
        "Add": lambda x, a: x[0] + x[1],
        "Sub": lambda x, a: x[0] - x[1],
        "Mul": lambda x, a: x[0] * x[1],
        "Div": _divide,
        "Relu": lambda x, a: functions.relu(x[0]),
        "LeakyRelu": lambda x, a: functions.leaky_relu(x[0], a.get("alpha", 0.01)),
        "PRelu": lambda x, a: torch.where(x[0] > 0, x[0], x[0] * x[1]),
        "Clip": _clip,
        "Sigmoid": lambda x, a: torch.sigmoid(x[0]),
        "HardSigmoid": lambda x, a: (x[0] * a.get("alpha", 0.2) + a.get("beta", 0.5)).clamp(0, 1),
        "HardSwish": lambda x, a: functions.hardswish(x[0]),
        "Tanh": lambda x, a: torch.tanh(x[0]),
        "Exp": lambda x, a: torch.exp(x[0]),
        "Softmax": lambda x, a: torch.softmax(x[0], a.get("axis", -1)),
        "MaxPool": _pool(functions.max_pool2d, is_mean=False),
        "AveragePool": _pool(functions.avg_pool2d, is_mean=True),
        "GlobalAveragePool": lambda x, a: x[0].mean(tuple(range(2, x[0].dim())), keepdim=True),
        "ReduceMean": _reduce_mean,
        "Flatten": lambda x, a: x[0].flatten(a.get("axis", 1)),
        "Reshape": _reshape,
        "Transpose": lambda x, a: x[0].permute(a["perm"]),
        "Concat": lambda x, a: torch.cat(list(x), a["axis"]),
        "Split": _split,
        "Slice": _slice,
        "Pad": _pad,
        "Squeeze": _squeeze,
        "Unsqueeze": _unsqueeze,
        "Shape": lambda x, a: torch.tensor(x[0].shape),
        "Gather": _gather,
        "Cast": lambda x, a: x[0].to(_torch_type(a["to"])),
        "DepthToSpace": _depth_to_space,
        "Resize": _resize,
        "Round": lambda x, a: x[0] + (x[0].round() - x[0]).detach(),
        "Identity": lambda x, a: x[0],
        "Dropout": lambda x, a: x[0],
        "Constant": lambda x, a: a["value"],
    }


def _numbers(value: Any) -> list[int]:
    return [int(one) for one in value]


def _argument(values: Sequence[Any], index: int, attributes: _Attributes, name: str) -> list[int] | None:
    """Return what newer operator sets pass as an input, older ones as an attribute."""
    if len(values) > index and values[index] is not None:
        return _numbers(values[index].reshape(-1))
    return _numbers(attributes[name]) if name in attributes else None


def _same_padding(attributes: _Attributes, rank: int) -> list[int]:
    """Return `pads` (all beginnings, all ends). Raises NotSupported for padding that depends on the size."""
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotSupported("training: auto_pad is not known; export the model with explicit pads")
    return _numbers(attributes.get("pads", [0] * 2 * rank))


def _padded(value: Any, pads: Sequence[int], fill: float) -> Any:
    rank = len(pads) // 2
    order = [side for axis in reversed(range(rank)) for side in (pads[axis], pads[axis + rank])]
    return need("torch", TRAIN).nn.functional.pad(value, order, value=fill) if any(order) else value


def _convolve(values: Sequence[Any], attributes: _Attributes) -> Any:
    functions = need("torch", TRAIN).nn.functional
    weight = values[1]
    rank = weight.dim() - 2
    pads = _same_padding(attributes, rank)
    convolve = functions.conv1d if rank == 1 else functions.conv2d
    settings = {
        "bias": values[2] if len(values) > 2 else None,
        "stride": _numbers(attributes.get("strides", [1] * rank)),
        "dilation": _numbers(attributes.get("dilations", [1] * rank)),
        "groups": attributes.get("group", 1),
    }
    if pads[:rank] == pads[rank:]:
        return convolve(values[0], weight, padding=pads[:rank], **settings)
    return convolve(_padded(values[0], pads, 0.0), weight, **settings)


def _gemm(values: Sequence[Any], attributes: _Attributes) -> Any:
    first = values[0].T if attributes.get("transA") else values[0]
    second = values[1].T if attributes.get("transB") else values[1]
    made = attributes.get("alpha", 1.0) * (first @ second)
    return made + attributes.get("beta", 1.0) * values[2] if len(values) > 2 else made


def _divide(values: Sequence[Any], attributes: _Attributes) -> Any:
    if values[0].is_floating_point():
        return values[0] / values[1]
    return need("torch", TRAIN).div(values[0], values[1], rounding_mode="trunc")


def _clip(values: Sequence[Any], attributes: _Attributes) -> Any:
    low = values[1] if len(values) > 1 else attributes.get("min")
    high = values[2] if len(values) > 2 else attributes.get("max")
    return values[0].clamp(None if low is None else float(low), None if high is None else float(high))


def _pool(function: Any, *, is_mean: bool) -> Callable[[Sequence[Any], _Attributes], Any]:
    def pool(values: Sequence[Any], attributes: _Attributes) -> Any:
        kernel = _numbers(attributes["kernel_shape"])
        pads = _same_padding(attributes, len(kernel))
        if is_mean and any(pads) and not attributes.get("count_include_pad"):
            raise NotSupported("training: AveragePool with pads that do not count is not known")
        value = _padded(values[0], pads, 0.0 if is_mean else float("-inf"))
        strides = _numbers(attributes.get("strides", [1] * len(kernel)))
        return function(value, kernel, strides, ceil_mode=bool(attributes.get("ceil_mode", 0)))

    return pool


def _reduce_mean(values: Sequence[Any], attributes: _Attributes) -> Any:
    axes = _argument(values, 1, attributes, "axes") or list(range(values[0].dim()))
    return values[0].mean(axes, keepdim=bool(attributes.get("keepdims", 1)))


def _reshape(values: Sequence[Any], attributes: _Attributes) -> Any:
    wanted = _numbers(values[1])
    return values[0].reshape([values[0].shape[axis] if size == 0 else size for axis, size in enumerate(wanted)])


def _split(values: Sequence[Any], attributes: _Attributes) -> Any:
    axis = attributes.get("axis", 0)
    sizes = _argument(values, 1, attributes, "split")
    if sizes is None:
        raise NotSupported("training: Split without sizes is not known")
    return values[0].split(sizes, axis)


def _slice(values: Sequence[Any], attributes: _Attributes) -> Any:
    starts, ends, axes, steps = (
        _argument(values, index, attributes, name) for index, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    assert starts is not None, "a Slice has starts"
    assert ends is not None, "a Slice has ends"
    index = [slice(None)] * values[0].dim()
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = steps[position] if steps else 1
        index[axes[position] if axes else position] = slice(start, None if abs(end) >= _SLICE_END - 1 else end, step)
    return values[0][tuple(index)]


def _pad(values: Sequence[Any], attributes: _Attributes) -> Any:
    if attributes.get("mode", b"constant") != b"constant":
        raise NotSupported("training: Pad other than with a constant is not known")
    pads = _argument(values, 1, attributes, "pads")
    assert pads is not None, "a Pad has pads"
    fill = values[2] if len(values) > 2 else attributes.get("value", 0.0)
    return _padded(values[0], pads, 0.0 if fill is None else float(fill))


def _squeeze(values: Sequence[Any], attributes: _Attributes) -> Any:
    axes = _argument(values, 1, attributes, "axes")
    return values[0].squeeze() if axes is None else values[0].squeeze(tuple(axes))


def _unsqueeze(values: Sequence[Any], attributes: _Attributes) -> Any:
    made = values[0]
    for axis in sorted(_argument(values, 1, attributes, "axes") or []):
        made = made.unsqueeze(axis)
    return made


def _gather(values: Sequence[Any], attributes: _Attributes) -> Any:
    axis = attributes.get("axis", 0)
    made = values[0].index_select(axis, values[1].reshape(-1).long())
    return made.reshape([*values[0].shape[:axis], *values[1].shape, *values[0].shape[axis + 1 :]])


def _depth_to_space(values: Sequence[Any], attributes: _Attributes) -> Any:
    value, size = values[0], attributes["blocksize"]
    if attributes.get("mode", b"DCR") == b"DCR":  # the channels of a block lie apart: PyTorch wants them together
        value = value.unflatten(1, (size * size, -1)).transpose(1, 2).flatten(1, 2)
    return need("torch", TRAIN).nn.functional.pixel_shuffle(value, size)


def _resize(values: Sequence[Any], attributes: _Attributes) -> Any:
    functions = need("torch", TRAIN).nn.functional
    if attributes.get("mode", b"nearest") != b"nearest" or len(values) < 3 or values[2] is None or not len(values[2]):
        raise NotSupported("training: Resize other than to the nearest neighbour, by scales, is not known")
    return functions.interpolate(values[0], scale_factor=[float(one) for one in values[2][2:]], mode="nearest")


def _torch_type(code: int) -> Any:
    helper, torch = need("onnx", TRAIN).helper, need("torch", TRAIN)
    return torch.from_numpy(np.zeros(1, dtype=helper.tensor_dtype_to_np_dtype(code))).dtype
