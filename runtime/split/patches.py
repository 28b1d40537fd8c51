"""`edge-run split patch`: an ONNX network whose first layers run patch by patch, so that their peak memory falls.

The result is an ONNX network as any other: for each patch there are nodes of its own, which share the weights, and the
patches of the last layer are put together. onnxruntime runs them patch after patch, since each waits for its own slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.errors import NotSupported
from edge_run.base.extras import TRAIN, need
from edge_run.base.split import PatchReport
from edge_run.base.units import format_size
from edge_run.devices.host.target_file import check_target, written
from edge_run.partition.cuts import operations_between
from edge_run.partition.patches import InputSpan, Window, plan_spans, plan_tiles
from edge_run.runtime.split.networks import chain, preprocessing, read_network
from edge_run.runtime.split.onnx_file import OnnxModel, describe, extract, finish, value_info
from edge_run.runtime.split.onnx_session import largest_difference, open_session, run_session

TILES = (2, 3, 4, 5, 6, 8)
MOST_EXTRA_SHARE = 0.25  # of the network's multiply-adds, computed again in halos, where nobody names the tiles
TOLERANCE = 1e-5  # of the largest number in an answer, or of 1
_WINDOWED = ("Conv", "MaxPool", "AveragePool")
_POINTWISE = (
    "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "BatchNormalization", "Identity",
    "Cast", "Add", "Sub", "Mul", "Div",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Layer:
    """A node of the prefix, and how it moves along height and width."""

    node: Any
    windows: tuple[Window, Window]


def patch_network(
    path: Path,
    out: Path,
    tiles: int | None = None,
    pixels: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    is_overwritten: bool = False,
) -> PatchReport:
    """Write the ONNX network `path` with its first layers in patches to `out`, and return what that gives.

    tiles: along height and along width; None finds them. How many layers are in patches is found in any case. pixels:
    mean and deviation: the new network takes bytes, and normalises patch by patch. is_overwritten: an `out` that exists
    is replaced.

    Raises ConfigError, ModelFileError, NotSupported, TierReadError.
    """
    model = read_network(path)
    out = check_target(out, [path], "the network itself", is_overwritten)
    if pixels is not None:
        whole = chain(model, preprocessing(model, *pixels), extract(model, None, None).graph)
        model = describe(whole, path)
    layers = _find_prefix(model)
    if len(layers) < 2 or all(one.node.op_type not in _WINDOWED for one in layers):
        raise NotSupported(f"{path}: does not begin with a chain of convolutions and poolings: nothing to patch")
    proto, last, chosen = _search(model, layers, (tiles,) if tiles else TILES)
    sample = model.sample()
    wanted = run_session(open_session(model.proto.SerializeToString(), str(path)), sample)
    found = run_session(open_session(proto.SerializeToString(), str(out)), sample)
    difference = largest_difference(found, wanted)
    for one, other in zip(found, wanted, strict=True):
        largest = max(float(np.abs(other).max(initial=0)), 1.0)
        if not (apart := largest_difference([one], [other])) <= TOLERANCE * largest:
            raise NotSupported(
                f"{path}: in patches it differs by {apart:.1e} in answers of up to {largest:.3g}, more than "
                f"{TOLERANCE:.0e} of that; not written"
            )
    report = _report(model, describe(proto, out), (last, chosen, difference), str(out))
    data = proto.SerializeToString()
    with written(out, len(data), format_size(len(data)), path, is_replacing=is_overwritten) as file:
        file.write(data)
    return report


def _search(model: OnnxModel, layers: Sequence[_Layer], tiles: Sequence[int]) -> tuple[Any, str, int]:
    """Return the network with the lowest expected peak, its last layer in patches, and the tiles along an axis."""
    sizes = model.sizes_bytes
    found: list[tuple[float, float, int, int]] = []
    for count in sorted(
        {_with_pointwise(layers, n) for n, one in enumerate(layers, 1) if one.node.op_type in _WINDOWED}
    ):
        name = str(layers[count - 1].node.output[0])
        rest = model.peak_bytes(start=name)
        for number in tiles:
            peak, adds = _expect(model, layers[:count], number, sizes)
            if len(tiles) == 1 or adds <= model.multiply_adds * MOST_EXTRA_SHARE:
                found.append((max(peak, rest), peak, count, number))
    if not found:
        raise NotSupported(f"{model.path}: patches would compute {MOST_EXTRA_SHARE:.0%} again; --tiles allows it")
    _, _, count, number = min(found)
    return _assemble(model, layers[:count], number), str(layers[count - 1].node.output[0]), number


def _expect(model: OnnxModel, layers: Sequence[_Layer], tiles: int, sizes: Mapping[str, int]) -> tuple[float, float]:
    """Return the peak bytes of layers in tiles x tiles patches, and the multiply-adds that halos cost.

    sizes: of tensors, in bytes.
    """
    last = str(layers[-1].node.output[0])
    adds = {str(one.outputs[0]): one.multiply_adds for one in model.network.operations}
    halves = [
        [plan_spans([one.windows[axis] for one in layers], *part) for part in plan_tiles(size, tiles)]
        for axis, size in enumerate(model.shapes[last][2:])
    ]
    most, extra = 0.0, 0.0
    names = [model.input_name, *(str(one.node.output[0]) for one in layers)]
    for down in halves[0]:
        for across in halves[1]:
            shares = [
                (rows.end - rows.start)
                * (columns.end - columns.start)
                / (model.shapes[name][2] * model.shapes[name][3])
                for rows, columns, name in zip(down, across, names, strict=False)
            ] + [1 / (len(halves[0]) * len(halves[1]))]
            held = [share * sizes[name] for share, name in zip(shares, names, strict=True)]
            most = max(most, *(one + other for one, other in pairwise(held)))
            extra += sum(share * adds.get(name, 0) for share, name in zip(shares[1:], names[1:], strict=True))
    whole = sum(adds.get(name, 0) for name in names[1:])
    ends = sizes[last]
    return max(sizes[model.input_name] + ends + most, 3 * ends), extra - whole


def _with_pointwise(layers: Sequence[_Layer], count: int) -> int:
    while count < len(layers) and layers[count].node.op_type not in _WINDOWED:
        count += 1
    return count


def _find_prefix(model: OnnxModel) -> list[_Layer]:
    """Return the chain of layers from the input on that can run in patches."""
    layers: list[_Layer] = []
    name = model.input_name
    nodes = model.proto.graph.node
    while len(model.shapes[name]) == 4:
        readers = [node for node in nodes if name in node.input]
        if len(readers) != 1 or name in model.network.outputs:
            break
        node = readers[0]
        if len(node.output) != 1 or [one for one in node.input if one in model.shapes] != [name]:
            break
        windows = _windows(model, node, name)
        if windows is None:
            break
        layers.append(_Layer(node, windows))
        name = node.output[0]
    return layers


def _windows(model: OnnxModel, node: Any, name: str) -> tuple[Window, Window] | None:
    """Return how a node moves along height and width; None where it cannot run in patches."""
    sizes, made = model.shapes[name][2:], model.shapes[node.output[0]]
    if node.op_type in _POINTWISE:
        flat = all(_is_flat(model.constants.get(one)) for one in node.input if one and one != name)
        same = made == model.shapes[name] and (flat or node.op_type == "BatchNormalization")
        return (Window(1, 1, 1, (0, 0), sizes[0]), Window(1, 1, 1, (0, 0), sizes[1])) if same else None
    helper = need("onnx", TRAIN).helper
    settings = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    if node.op_type not in _WINDOWED or settings.get("ceil_mode") or settings.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    kernel = settings.get("kernel_shape") or model.constants.get(node.input[1], ())[2:]
    if len(kernel) != 2 or (settings.get("count_include_pad") and any(settings.get("pads", ()))):
        return None  # padding that counts would have to be told from the edge of a patch
    pads, strides = settings.get("pads", [0] * 4), settings.get("strides", [1, 1])
    dilations = settings.get("dilations", [1, 1])
    made_windows = [
        Window(kernel[axis], strides[axis], dilations[axis], (pads[axis], pads[axis + 2]), sizes[axis])
        for axis in (0, 1)
    ]
    fits = tuple(one.output_size for one in made_windows) == made[2:]
    return (made_windows[0], made_windows[1]) if fits else None


def _is_flat(shape: tuple[int, ...] | None) -> bool:
    """Return whether a constant of this shape is the same all over an image; None is one of which nothing is known."""
    return shape is not None and all(size == 1 for size in shape[-2:])


def _assemble(model: OnnxModel, layers: Sequence[_Layer], tiles: int) -> Any:
    onnx = need("onnx", TRAIN)
    last = str(layers[-1].node.output[0])
    height, width = model.shapes[last][2:]
    nodes: list[Any] = []
    weights: dict[str, Any] = {}
    rows: list[str] = []
    for row in plan_tiles(height, tiles):
        spans = plan_spans([one.windows[0] for one in layers], *row)
        parts = []
        for column in plan_tiles(width, tiles):
            across = plan_spans([one.windows[1] for one in layers], *column)
            parts.append(_patch(model, layers, (spans, across), nodes, weights))
        rows.append(_join(nodes, parts, 3, f"edge_run.row{row[0]}"))
    nodes.append(onnx.helper.make_node("Concat", rows, [last], axis=2))
    rest = extract(model, last, None).graph
    own, front = _constants(model, layers)
    made_here = {name for node in own for name in node.output}
    others = [node for node in rest.node if made_here.isdisjoint(node.output)]
    kept = {one.name: one for one in rest.initializer}
    kept.update({one.name: one for one in model.proto.graph.initializer if one.name in front})
    made = onnx.helper.make_graph(
        [*own, *nodes, *others], "patched", [value_info(model, model.input_name)], list(rest.output),
        [*kept.values(), *weights.values()],
    )  # fmt: skip
    return finish(model, made)


def _constants(model: OnnxModel, layers: Sequence[_Layer]) -> tuple[list[Any], set[str]]:
    """Return the nodes that make constants which layers read, and the names of all constants that take part."""
    read = {name for one in layers for name in one.node.input if name not in model.shapes}
    makers = sorted({index for name in read for index in operations_between(model.network, None, name)})
    read.update(name for index in makers for name in model.network.operations[index].inputs)
    return [model.proto.graph.node[index] for index in makers], read


def _patch(
    model: OnnxModel,
    layers: Sequence[_Layer],
    spans: tuple[Sequence[InputSpan], Sequence[InputSpan]],
    nodes: list[Any],
    weights: dict[str, Any],
) -> str:
    """Add the nodes of one patch; return the tensor that it makes."""
    onnx = need("onnx", TRAIN)
    down, across = spans[0][0], spans[1][0]
    prefix = f"edge_run.patch{len(nodes)}"
    limits = ("starts", (down.start, across.start)), ("ends", (down.end, across.end))
    names = []
    for name, values in (*limits, ("axes", (2, 3))):
        key = "edge_run.axes" if name == "axes" else f"{prefix}.{name}"
        weights[key] = onnx.helper.make_tensor(key, onnx.TensorProto.INT64, [2], values)
        names.append(key)
    value, before = f"{prefix}.slice", model.input_name
    nodes.append(onnx.helper.make_node("Slice", [before, *names], [value]))
    for number, layer in enumerate(layers):
        node = onnx.NodeProto()
        node.CopyFrom(layer.node)
        node.input[list(node.input).index(before)] = value
        before, value = str(layer.node.output[0]), f"{prefix}.{number}"
        node.output[0], node.name = value, value
        if layer.node.op_type in _WINDOWED:
            pads = [spans[axis][number].pads[side] for side in (0, 1) for axis in (0, 1)]
            kept = [one for one in node.attribute if one.name not in ("pads", "auto_pad")]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("pads", pads)])
        nodes.append(node)
    return value


def _join(nodes: list[Any], parts: list[str], axis: int, name: str) -> str:
    if len(parts) == 1:
        return parts[0]
    nodes.append(need("onnx", TRAIN).helper.make_node("Concat", parts, [name], axis=axis))
    return name


def _report(model: OnnxModel, made: OnnxModel, chosen: tuple[str, int, float], out: str) -> PatchReport:
    last, tiles, difference = chosen
    return PatchReport(
        model=out,
        last=last,
        patches=math.prod(len(plan_tiles(size, tiles)) for size in model.shapes[last][2:]),
        prefix_peak_bytes=model.peak_bytes(end=last),
        patched_prefix_peak_bytes=made.peak_bytes(end=last),
        whole_peak_bytes=model.peak_bytes(),
        patched_peak_bytes=made.peak_bytes(),
        extra_share=made.multiply_adds / model.multiply_adds - 1 if model.multiply_adds else 0.0,
        difference=difference,
    )
