"""Small ONNX networks that see, images for them, and a split of one that nobody trained: all made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from edge_run.partition.latent_codec import fit_rate
from edge_run.runtime.split import bundle as split_bundle
from edge_run.runtime.split.bottleneck import BottleneckShape, find_transform, make_decoder, make_encoder
from edge_run.runtime.split.networks import LATENT, Parts, chain, preprocessing, read_network
from edge_run.runtime.split.onnx_session import open_session, run_session

SIZE, CLASSES = 16, 4
CUT = "stem"
SHAPE = BottleneckShape(halvings=2, latent_channels=24, encoder_width=8, decoder_width=8)


def weight(name: str, *shape: int, scale: float = 0.3, seed: int = 0) -> Any:
    """Return an initializer of arbitrary numbers."""
    generator = np.random.default_rng([seed, *name.encode()])
    return numpy_helper.from_array((generator.normal(size=shape) * scale).astype(np.float32), name)


def save(
    folder: Path, name: str, nodes: list[Any], weights: list[Any], outputs: dict[str, list[Any]], opset: int = 13
) -> Path:
    """Write a network from `input` (N, 3, 16, 16) to these outputs; return its file."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key, shape in outputs.items()],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = folder / f"{name}.onnx"
    onnx.save(model, str(path))
    return path


def convolution(value: str, name: str, **attributes: Any) -> Any:
    return helper.make_node("Conv", [value, f"{name}.w"], [name], kernel_shape=[3, 3], pads=[1] * 4, **attributes)


def residual_network(folder: Path) -> Path:
    """A stem, a residual block and a classifier: cuts are input, stem, sum, out, mean, flat."""
    nodes = [
        convolution("input", "stem"),
        convolution("stem", "inner"),
        helper.make_node("Relu", ["inner"], ["bent"]),
        helper.make_node("Add", ["bent", "stem"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["out"]),
        helper.make_node("GlobalAveragePool", ["out"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "g.w", "g.b"], ["logits"], transB=1),
    ]
    weights = [
        weight("stem.w", 8, 3, 3, 3),
        weight("inner.w", 8, 8, 3, 3),
        weight("g.w", CLASSES, 8, scale=2.0),
        weight("g.b", CLASSES),
    ]
    return save(folder, "residual", nodes, weights, {"logits": ["N", CLASSES]})


def branching_network(folder: Path) -> Path:
    """An If whose branches read a tensor from outside, and two outputs: only what comes before both can be cut."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, ["stem"], [f"{name}.r"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}.r", TensorProto.FLOAT, None)],
        )
        for name, kind in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [
        convolution("input", "stem"),
        helper.make_node("ReduceMean", ["stem"], ["level"], keepdims=0),
        helper.make_node("Greater", ["level", "zero"], ["is_bright"]),
        helper.make_node("If", ["is_bright"], ["chosen"], **branches),
        helper.make_node("Relu", ["chosen"], ["clean"]),
        helper.make_node("Sigmoid", ["clean"], ["first"]),
        helper.make_node("Tanh", ["clean"], ["second"]),
    ]
    weights = [weight("stem.w", 8, 3, 3, 3), numpy_helper.from_array(np.float32(0), "zero")]
    shape = ["N", 8, SIZE, SIZE]
    return save(folder, "branching", nodes, weights, {"first": shape, "second": shape})


def make_images(folder: Path, per_class: int) -> Path:
    """Write JPEG files in a folder for each class: a coloured blob on noise, another colour for each class."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for number in range(CLASSES):
        (folder / f"class{number}").mkdir(parents=True)
        for index in range(per_class):
            pixels = generator.normal(90, 12, (SIZE, SIZE, 3))
            centre = generator.uniform(4, 12, 2)
            blob = np.exp(-((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2) / 12)
            pixels[..., number % 3] += 150 * blob * (1 if number < 3 else -1)
            image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            image.save(folder / f"class{number}" / f"{index:03}.jpg", quality=95)
    return folder


def make_pixels(count: int, seed: int = 0) -> Any:
    """Return images as the networks take them (count, 3, 16, 16)."""
    smooth = np.random.default_rng(seed).integers(0, 256, (count, 3, SIZE // 4, SIZE // 4))
    return smooth.repeat(4, 2).repeat(4, 3).astype(np.uint8)


def make_bundle(folder: Path) -> Path:
    """Write a split of the residual network whose bottleneck is the transform alone; return its head.onnx."""
    model = read_network(residual_network(folder))
    pixels = preprocessing(model, [0.5], [0.25])
    parts = Parts(model, CUT)
    front = [pixels, parts.front]
    many = make_pixels(200)
    at_cut = run_session(open_session(chain(model, *front).SerializeToString(), "front"), many)[0]
    transform = find_transform(SHAPE, CUT, parts.cut_shape, [at_cut])
    encoder = make_encoder(SHAPE, CUT, parts.cut_shape, LATENT, transform)
    decoder = make_decoder(SHAPE, LATENT, CUT, parts.cut_shape, transform)
    files = {
        split_bundle.HEAD_FILE: chain(model, *front, encoder).SerializeToString(),
        split_bundle.TAIL_FILE: chain(model, decoder, parts.rest).SerializeToString(),
        split_bundle.MODEL_FILE: chain(model, pixels, model.proto.graph).SerializeToString(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    latents = run_session(open_session(files[split_bundle.HEAD_FILE], "head"), many)[0]
    latent = latents.shape[1:]
    rates = []
    for step in (2.0, 0.5, 0.05):
        rate = fit_rate(latents.reshape(len(many), latent[0], -1), [1 / step] * latent[0])
        rates.append(split_bundle.StoredRate(100, rate, 10, 1000, 120, 10, 5, 5))
    code = split_bundle.StoredCode(
        split_bundle.FORMAT,
        *(split_bundle.digest(files[f"{name}.onnx"]) for name in ("model", "head", "tail")),
        CUT, (3, SIZE, SIZE), latent, ("logits",), tuple(rates), (),
    )  # fmt: skip
    (folder / split_bundle.CODE_FILE).write_bytes(split_bundle.code_json(code))
    return folder / split_bundle.HEAD_FILE
