"""ONNX graphs that PyTorch computes: the same answers as onnxruntime's, or a refusal that names the reason."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edge_run.base.errors import NotSupported
from edge_run.runtime.split.onnx_session import open_session, run_session
from edge_run.runtime.split.onnx_torch import TorchGraph
from vision_models import CLASSES, convolution, residual_network, save, weight

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: `make torch`")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return residual_network(tmp_path_factory.mktemp("model"))


def wide_network(folder: Path) -> Path:
    """Many of the operators that training knows, in one network."""
    make = helper.make_node
    nodes = [
        convolution("input", "a", group=1, strides=[1, 1]),
        make("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"]),
        make("Clip", ["n", "low", "high"], ["c"]),
        make("MaxPool", ["c"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        make("Pad", ["p", "pads"], ["padded"]),
        make("Slice", ["padded", "starts", "ends", "axes", "steps"], ["cropped"]),
        make("Conv", ["cropped", "d.w"], ["d"], kernel_shape=[3, 3], pads=[0, 1, 2, 1], group=8),
        make("HardSigmoid", ["d"], ["w"]),
        make("Mul", ["d", "w"], ["q"]),
        make("Split", ["q", "halves"], ["left", "right"], axis=1),
        make("Sigmoid", ["left"], ["ls"]),
        make("LeakyRelu", ["right"], ["rs"]),
        make("Concat", ["rs", "ls"], ["joined"], axis=1),
        make("Resize", ["joined", "", "scales"], ["big"], mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric"),
        make("AveragePool", ["big"], ["mean"], kernel_shape=[2, 2], strides=[2, 2]),
        make("Transpose", ["mean"], ["turned"], perm=[0, 2, 3, 1]),
        make("Shape", ["turned"], ["shape"]),
        make("Gather", ["shape", "zero"], ["batch"]),
        make("Unsqueeze", ["batch", "axis"], ["batch1"]),
        make("Concat", ["batch1", "minus"], ["wanted"], axis=0),
        make("Reshape", ["turned", "wanted"], ["flat"]),
        make("MatMul", ["flat", "g.w"], ["logits"]),
        make("Softmax", ["logits"], ["probabilities"], axis=1),
    ]  # fmt: skip

    def numbers(name: str, *values: int) -> object:
        return numpy_helper.from_array(np.array(values, dtype=np.int64), name)

    weights = [
        weight("a.w", 8, 3, 3, 3), weight("s", 8), weight("b", 8), weight("m", 8), weight("d.w", 8, 1, 3, 3),
        numpy_helper.from_array(np.full(8, 0.7, dtype=np.float32), "v"), weight("g.w", 648, CLASSES),
        numpy_helper.from_array(np.float32(-0.5), "low"), numpy_helper.from_array(np.float32(0.6), "high"),
        numpy_helper.from_array(np.array([1, 1, 2, 2], dtype=np.float32), "scales"),
        numbers("pads", 0, 0, 1, 0, 0, 0, 0, 2), numbers("starts", 0, -9), numbers("ends", 2**31, 2**63 - 1),
        numbers("axes", 2, 3), numbers("steps", 1, 1), numbers("halves", 3, 5), numbers("axis", 0),
        numpy_helper.from_array(np.int64(0), "zero"), numbers("minus", 648),
    ]  # fmt: skip
    return save(folder, "wide", nodes, weights, {"probabilities": ["N", CLASSES]})


def shuffling_network(folder: Path) -> Path:
    """Channels that become pixels, in each of ONNX's orders; what says none means the first."""
    make = helper.make_node
    nodes = [
        convolution("input", "a"),
        make("DepthToSpace", ["a"], ["b"], blocksize=2),
        make("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        make("Concat", ["c", "c"], ["d"], axis=1),
        make("DepthToSpace", ["d"], ["e"], blocksize=2, mode="CRD"),
        make("DepthToSpace", ["a"], ["f"], blocksize=2, mode="DCR"),
        make("Concat", ["e", "f"], ["joined"], axis=1),
        make("Conv", ["joined", "g.w"], ["g"], kernel_shape=[32, 32]),
        make("Flatten", ["g"], ["logits"]),
    ]
    weights = [weight("a.w", 8, 3, 3, 3), weight("g.w", CLASSES, 3, 32, 32)]
    return save(folder, "shuffling", nodes, weights, {"logits": ["N", CLASSES]})


def constant_network(folder: Path) -> Path:
    """Constants in each form that a node for them has."""
    make = helper.make_node
    nodes = [
        make("Constant", [], ["low"], value_float=-0.5),
        make("Constant", [], ["high"], value=numpy_helper.from_array(np.float32(0.5))),
        make("Constant", [], ["shape"], value_ints=[0, 3, 256]),
        make("Constant", [], ["third"], value_int=2),
        make("Constant", [], ["levels"], value_floats=[number / 256 for number in range(256)]),
        make("Clip", ["input", "low", "high"], ["clipped"]),
        make("Reshape", ["clipped", "shape"], ["rows"]),
        make("Gather", ["rows", "third"], ["row"], axis=1),
        make("Mul", ["row", "levels"], ["product"]),
        make("MatMul", ["product", "g.w"], ["logits"]),
    ]
    return save(folder, "constant", nodes, [weight("g.w", 256, CLASSES)], {"logits": ["N", CLASSES]})


def test_torch_computes_what_onnxruntime_computes(tmp_path: Path) -> None:
    import torch

    for make in (residual_network, wide_network, shuffling_network, constant_network):
        path = make(tmp_path)
        batch = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
        wanted = run_session(open_session(str(path), path.name, 1), batch)
        with torch.no_grad():
            found = TorchGraph(onnx.load(str(path)).graph, path.name)(torch.tensor(batch))
        assert np.allclose(found[0].numpy(), wanted[0], atol=1e-5), path.name


def test_what_was_learned_goes_back_into_the_graph(model: Path) -> None:
    import torch

    proto = onnx.load(str(model))
    graph = TorchGraph(proto.graph, "model")
    batch = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
    for one in graph.parameters():
        one.data += 0.05
    with torch.no_grad():
        wanted = graph(torch.tensor(batch))[0].numpy()
    graph.write_into(proto.graph)
    assert np.allclose(run_session(open_session(proto.SerializeToString(), "model", 1), batch)[0], wanted, atol=1e-4)


def test_a_constant_that_is_no_number_is_named() -> None:
    nodes = [helper.make_node("Constant", [], ["end"], value_string="x")]
    with pytest.raises(NotSupported, match="odd: training does not know a Constant of value_string"):
        TorchGraph(helper.make_graph(nodes, "odd", [], []), "odd")
