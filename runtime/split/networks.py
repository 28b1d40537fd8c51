"""The graphs of a split: what the device runs, what the server runs, and the uncut network, all with pixels as input.

Each is a chain of ONNX graphs that meet in a tensor of one name. Pixels are bytes (batch, channels, height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.extras import TRAIN, need
from edge_run.runtime.split.images import ImageSize
from edge_run.runtime.split.onnx_file import OnnxModel, describe, extract, find_tensor, finish, read_onnx
from edge_run.runtime.split.onnx_session import first_line

PIXELS, LATENT, INTEREST = "edge_run.pixels", "edge_run.latent", "edge_run.interest"
MEANS, DEVIATIONS = (-1000.0, 1000.0), (1e-4, 1e4)  # of pixels on the scale of 0 to 1, and ample for any other
OPSET = 13  # older files are converted: what is added here is written for this one


def read_network(path: Path) -> OnnxModel:
    """Return the ONNX network `path`, converted to an operator set of 13 or later. Raises like `read_onnx`."""
    model = read_onnx(path)
    version = max((one.version for one in model.proto.opset_import if one.domain in ("", "ai.onnx")), default=1)
    if version >= OPSET:
        return model
    converter = need("onnx.version_converter", TRAIN)
    try:
        converted = converter.convert_version(model.proto, OPSET)
    except Exception as error:  # of many kinds
        raise NotSupported(
            f"{path}: operator set {version} cannot be converted to {OPSET} ({first_line(error)}); export it anew"
        ) from error
    return describe(converted, path)


def preprocessing(model: OnnxModel, mean: Sequence[float], deviation: Sequence[float]) -> Any:
    """Return the graph from pixels to the network's input: (pixels / 255 - mean) / deviation, for each channel."""
    onnx = need("onnx", TRAIN)
    size = ImageSize.of(model.shapes[model.input_name], str(model.path))
    if model.types[model.input_name] != np.float32:
        raise NotSupported(f"{model.path}: takes {model.types[model.input_name]}; training needs single precision")
    for flag, values, (least, most) in (("--mean", mean, MEANS), ("--std", deviation, DEVIATIONS)):
        if len(values) not in (1, size.channels) or not all(least <= one <= most for one in values):
            raise ConfigError(
                f"{flag} {','.join(map(str, values))}: must be 1 or {size.channels} numbers of {least:g} to {most:g}"
            )
    centre, spread = (255.0 * np.full(size.channels, values, dtype=np.float64) for values in (mean, deviation))
    make = onnx.helper.make_node
    nodes = [
        make("Cast", [PIXELS], ["edge_run.float"], to=onnx.TensorProto.FLOAT),
        make("Sub", ["edge_run.float", "edge_run.mean"], ["edge_run.centred"]),
        make("Mul", ["edge_run.centred", "edge_run.scale"], [model.input_name]),
    ]
    pixels = onnx.helper.make_tensor_value_info(PIXELS, onnx.TensorProto.UINT8, ["N", *size.shape])
    end = onnx.helper.make_tensor_value_info(model.input_name, onnx.TensorProto.FLOAT, ["N", *size.shape])
    weights = [
        onnx.numpy_helper.from_array(array.astype(np.float32).reshape(1, size.channels, 1, 1), f"edge_run.{name}")
        for name, array in (("mean", centre), ("scale", 1 / spread))
    ]
    return onnx.helper.make_graph(nodes, "preprocessing", [pixels], [end], weights)


def chain(model: OnnxModel, *graphs: Any) -> Any:
    """Return graphs, each of which begins with the tensor that the one before ends with, as one `onnx.ModelProto`."""
    onnx = need("onnx", TRAIN)
    made = onnx.helper.make_graph(
        [node for graph in graphs for node in graph.node],
        "split",
        list(graphs[0].input),
        list(graphs[-1].output),
        [one for graph in graphs for one in graph.initializer],
    )
    return finish(model, made)


def with_pooled(encoder: Any, hidden: str) -> Any:
    """Return the graph `encoder` without its last node, and with the means of what that reads, `hidden`, as output."""
    onnx = need("onnx", TRAIN)
    pooled = onnx.GraphProto()
    pooled.CopyFrom(encoder)
    del pooled.node[-1]
    pooled.node.append(onnx.helper.make_node("GlobalAveragePool", [hidden], ["edge_run.pooled"]))
    pooled.node.append(onnx.helper.make_node("Flatten", ["edge_run.pooled"], ["edge_run.features"]))
    del pooled.output[:]
    pooled.output.append(onnx.ValueInfoProto(name="edge_run.features"))
    return pooled


class Parts:
    """The two halves of a network around a bottleneck at tensor `cut`."""

    def __init__(self, model: OnnxModel, cut: str) -> None:
        """Cut the network. Raises ConfigError where the name is no cut."""
        self.model, self.cut = model, find_tensor(model, cut)
        self.front = extract(model, None, self.cut).graph if self.cut != model.input_name else None
        self.rest = extract(model, self.cut, None).graph

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape of the tensor at the cut, with a batch of one."""
        return self.model.shapes[self.cut]
