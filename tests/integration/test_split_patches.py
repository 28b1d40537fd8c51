"""Networks in patches: exact at every seam and edge, and in less memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge_run.base.errors import ConfigError, NotSupported
from edge_run.partition.patches import Window, plan_spans, plan_tiles
from edge_run.runtime.split import patches as split_patches
from edge_run.runtime.split.onnx_file import describe, read_onnx
from edge_run.runtime.split.onnx_session import open_session, run_session
from edge_run.runtime.split.patches import patch_network
from program import run_program
from vision_models import residual_network, weight

pytestmark = pytest.mark.usefixtures("traced_here")
windows = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2))


@given(st.lists(windows, min_size=1, max_size=4), st.integers(20, 40), st.integers(1, 6))
def test_spans_give_what_the_whole_gives(shapes: list[tuple[int, ...]], size: int, tiles: int) -> None:
    """In one dimension, with sums for convolutions: patches put together are the whole."""
    layers: list[Window] = []
    for kernel, stride, dilation, before, after in shapes:
        reach = dilation * (kernel - 1)
        layer = Window(kernel, stride, dilation, (min(before, reach), min(after, reach)), size)
        if layer.output_size < 1:
            return
        layers.append(layer)
        size = layer.output_size

    def slide(values: np.ndarray, layer: Window, pads: tuple[int, int]) -> np.ndarray:
        padded = np.pad(values, pads)
        reach = layer.dilation * (layer.kernel - 1)
        starts = range(0, len(padded) - reach, layer.stride)
        return np.array(
            [sum((i + 1) * padded[s + i * layer.dilation] for i in range(layer.kernel)) + 1 for s in starts]
        )

    image = np.random.default_rng(0).integers(1, 9, layers[0].size)
    whole = image
    for layer in layers:
        whole = slide(whole, layer, layer.pads)
    parts = []
    for start, end in plan_tiles(size, tiles):
        spans = plan_spans(layers, start, end)
        part = image[spans[0].start : spans[0].end]
        for layer, span in zip(layers, spans, strict=True):
            part = slide(part, layer, span.pads)
        parts.append(part[: end - start])
    assert np.array_equal(np.concatenate(parts), whole)


def chain_network(folder: Path, size: int = 64) -> Path:
    """Convolutions with strides, dilation, groups and uneven padding, a pooling, and a small end."""
    make = helper.make_node
    nodes = [
        make("Conv", ["input", "a"], ["1"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        make("Relu", ["1"], ["2"]),
        make("Conv", ["2", "b"], ["3"], kernel_shape=[3, 3], pads=[1, 0, 2, 1], group=8),
        make("Clip", ["3", "low", "high"], ["4"]),
        make("MaxPool", ["4"], ["5"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        make("Conv", ["5", "c"], ["6"], kernel_shape=[3, 3], pads=[2, 2, 2, 2], dilations=[2, 2], strides=[2, 2]),
        make("GlobalAveragePool", ["6"], ["7"]),
        make("Flatten", ["7"], ["end"]),
    ]
    weights = [
        weight("a", 8, 3, 3, 3), weight("b", 8, 1, 3, 3), weight("c", 4, 8, 3, 3),
        helper.make_tensor("low", TensorProto.FLOAT, [], [-1.0]),
        helper.make_tensor("high", TensorProto.FLOAT, [], [2.0]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "chain", [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("end", TensorProto.FLOAT, [1, 4])], weights,
    )  # fmt: skip
    path = folder / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


@pytest.mark.parametrize("last", ["2", "4", "5", "6"])
@pytest.mark.parametrize("tiles", [2, 3, 7])
def test_patches_are_exact(tmp_path: Path, last: str, tiles: int) -> None:
    model = read_onnx(chain_network(tmp_path, 61))
    layers = split_patches._find_prefix(model)
    count = [layer.node.output[0] for layer in layers].index(last) + 1
    made = split_patches._assemble(model, layers[:count], tiles)
    patched = open_session(made.SerializeToString(), "patched", 1)
    whole = open_session(model.proto.SerializeToString(), "whole", 1)
    for seed in range(3):
        sample = (model.sample(seed) - 0.5) * 6
        assert np.allclose(run_session(patched, sample)[0], run_session(whole, sample)[0], atol=1e-5)


def test_the_best_patches_are_found(tmp_path: Path) -> None:
    path, out = chain_network(tmp_path), tmp_path / "out.onnx"
    report = patch_network(path, out)
    assert report.patched_prefix_peak_bytes < report.prefix_peak_bytes
    assert report.patched_peak_bytes < report.whole_peak_bytes
    assert report.difference <= 1e-5
    assert 0 < report.extra_share <= 0.25
    assert describe(onnx.load(str(out)), out).network.inputs == ("input",)


def test_a_network_of_bytes_takes_less(tmp_path: Path) -> None:
    path, out = chain_network(tmp_path), tmp_path / "out.onnx"
    plain = patch_network(path, out, tiles=4)
    pixels = patch_network(path, out, tiles=4, pixels=((0.4,), (0.2, 0.3, 0.2)), is_overwritten=True)
    assert pixels.patched_peak_bytes < plain.patched_peak_bytes
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 64, 64)).astype(np.uint8)
    deviation = np.array([0.2, 0.3, 0.2]).reshape(1, 3, 1, 1)
    wanted = run_session(open_session(str(path), "plain", 1), ((image / 255 - 0.4) / deviation).astype(np.float32))
    assert np.allclose(run_session(open_session(str(out), "out", 1), image)[0], wanted[0], atol=1e-4)


def with_other_constants(path: Path) -> Path:
    """The same network as other exporters write it: sizes left out, and constants that nodes make."""
    proto = onnx.load(str(path))
    nodes, weights = proto.graph.node, {one.name: numpy_helper.to_array(one) for one in proto.graph.initializer}
    for node in nodes[0], nodes[2]:
        node.attribute.remove(next(one for one in node.attribute if one.name == "kernel_shape"))
    bias = numpy_helper.from_array(weights["b"][:, 0, 0, 0].astype(np.float16), "bias")
    nodes[2].input.append("wide bias")
    nodes[5].input.append("shared")
    make = helper.make_node
    before = [
        make("Constant", [], ["a"], value=numpy_helper.from_array(weights["a"])),
        make("Constant", [], ["low"], value_float=-1.0),
        make("Cast", ["bias"], ["wide bias"], to=TensorProto.FLOAT),
        make("Constant", [], ["zeros"], value_floats=[0.1] * 4),
        make("Identity", ["zeros"], ["shared"]),
    ]
    graph = helper.make_graph(
        [*before, *nodes[:7], make("Flatten", ["7"], ["8"]), make("Add", ["8", "shared"], ["end"])],
        "other",
        proto.graph.input,
        proto.graph.output,
        [bias, *(one for one in proto.graph.initializer if one.name not in ("a", "low"))],
    )
    made = path.with_name("other.onnx")
    onnx.save(helper.make_model(graph, opset_imports=proto.opset_import, ir_version=8), str(made))
    return made


def test_constants_that_nodes_make_are_taken_along(tmp_path: Path) -> None:
    path, out = with_other_constants(chain_network(tmp_path)), tmp_path / "out.onnx"
    plain = patch_network(chain_network(tmp_path), tmp_path / "plain.onnx", tiles=3)
    report = patch_network(path, out, tiles=3)
    assert (report.last, report.extra_share) == (plain.last, plain.extra_share)
    onnx.checker.check_model(onnx.load(str(out)))
    sample = np.random.default_rng(0).normal(size=(1, 3, 64, 64)).astype(np.float32)
    found, wanted = (run_session(open_session(str(one), "network", 1), sample)[0] for one in (out, path))
    assert np.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("is_node", [False, True])
def test_a_constant_that_differs_over_the_image_ends_the_chain(tmp_path: Path, is_node: bool) -> None:
    proto = onnx.load(str(chain_network(tmp_path)))
    nodes, offsets = list(proto.graph.node), weight("offsets", 1, 8, 32, 32)
    nodes[1] = helper.make_node("Add", ["1", "offsets"], ["2"])
    if is_node:
        nodes.insert(0, helper.make_node("Constant", [], ["offsets"], value=offsets))
    else:
        proto.graph.initializer.append(offsets)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    onnx.save(proto, str(tmp_path / "uneven.onnx"))
    with pytest.raises(NotSupported, match="nothing to patch"):
        patch_network(tmp_path / "uneven.onnx", tmp_path / "out.onnx")


def poolings(path: Path, size: int) -> Path:
    """A network without multiplications."""
    make, image = helper.make_node, helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, size, size])
    settings = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [make("MaxPool", ["input"], ["1"], **settings), make("Relu", ["1"], ["2"])]
    nodes += [make("MaxPool", ["2"], ["3"], **settings), make("GlobalAveragePool", ["3"], ["end"])]
    end = helper.make_tensor_value_info("end", TensorProto.FLOAT, [1, 3, 1, 1])
    graph = helper.make_graph(nodes, "poolings", [image], [end])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


def test_a_network_without_multiplications(tmp_path: Path) -> None:
    assert patch_network(poolings(tmp_path / "poolings.onnx", 64), tmp_path / "out.onnx").extra_share == 0


def test_there_are_no_more_patches_than_places(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    report = patch_network(poolings(tmp_path / "poolings.onnx", 12), out, tiles=8)
    assert report.patches == sum(node.op_type == "Slice" for node in onnx.load(str(out)).graph.node) <= 36


def test_what_does_not_begin_with_a_chain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="nothing to patch"):
        patch_network(residual_network(tmp_path), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_nothing_but_a_file_is_replaced_and_not_the_network_itself(tmp_path: Path) -> None:
    path, pipe, link = chain_network(tmp_path), tmp_path / "pipe", tmp_path / "link"
    before = path.read_bytes()
    os.mkfifo(pipe)
    link.symlink_to(path)
    for out, reason in ((pipe, "is there, and is no file"), (path, "is the network itself"), (link, "is the network")):
        with pytest.raises(ConfigError, match=reason):
            patch_network(path, out)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert path.read_bytes() == before


def test_answers_are_compared_as_shares_of_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding does to a coordinate of 640 pixels is no error; the same to a probability is one."""
    path, apart = chain_network(tmp_path), np.float32(1e-4)
    answers = run_session(open_session(str(path), "model", 1), describe(onnx.load(str(path)), path).sample())
    for largest, is_written in ((640.0, True), (1.0, False)):
        wanted = [one / np.abs(one).max() * np.float32(largest) for one in answers]
        turns = iter((wanted, [one + apart for one in wanted]))
        monkeypatch.setattr(split_patches, "run_session", lambda *_, turns=turns: next(turns))
        out = tmp_path / f"{largest}.onnx"
        if is_written:
            assert patch_network(path, out, tiles=2).difference == pytest.approx(apart, rel=0.5)
        else:
            with pytest.raises(
                NotSupported, match=r"differs by 1\.0e-04 in answers of up to 1, more than 1e-05 of that"
            ):
                patch_network(path, out, tiles=2)
        assert out.exists() == is_written


def test_command(tmp_path: Path) -> None:
    path = chain_network(tmp_path)
    command = ["split", "patch", path, "--out"]
    done = run_program(*command, tmp_path / "o.onnx")
    assert done.returncode == 0, done.stderr
    assert "times less" in done.stdout
    again = run_program(*command, tmp_path / "o.onnx")
    assert again.returncode == 2
    assert "o.onnx: exists; choose another name, or replace it with --force" in again.stderr
    assert run_program(*command, tmp_path / "o.onnx", "--force").returncode == 0
    for arguments, code in (([str(path)], 2), ([str(tmp_path / "none" / "o.onnx")], 2), (["o.onnx", "--std", "1"], 2)):
        done = run_program(*command, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr


@pytest.mark.parametrize("tiles", [None, 2])
def test_what_normalises_pixels_alone_is_nothing_to_patch(tmp_path: Path, tiles: int | None) -> None:
    proto = onnx.load(str(chain_network(tmp_path)))
    nodes = [helper.make_node("Neg", ["input"], ["negative"]), *proto.graph.node]
    nodes[1].input[0] = "negative"
    graph = helper.make_graph(nodes, "odd", proto.graph.input, proto.graph.output, proto.graph.initializer)
    path = tmp_path / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=proto.opset_import, ir_version=8), str(path))
    with pytest.raises(NotSupported, match="nothing to patch"):
        patch_network(path, tmp_path / "out.onnx", tiles, ((0.4,), (0.2,)))
