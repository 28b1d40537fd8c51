"""`split inspect`: cuts of real ONNX files, made and compared."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_run.base.errors import ConfigError, ModelFileError, ModelFileMissing, NotSupported, TierReadError
from edge_run.base.files.drafts import remove_drafts
from edge_run.base.process_ids import process_scope
from edge_run.partition.cuts import find_cuts
from edge_run.runtime.processes.cell import Overrun
from edge_run.runtime.split import networks, onnx_session
from edge_run.runtime.split.inspection import inspect_cuts
from edge_run.runtime.split.onnx_file import describe, extract, find_tensor, read_onnx
from edge_run.runtime.split.onnx_session import is_identical, open_session, run_session
from program import run_program
from vision_models import branching_network, convolution, residual_network, save, weight


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program("split", *arguments)


def test_cuts_of_a_residual_network(tmp_path: Path) -> None:
    report = inspect_cuts(residual_network(tmp_path), threads=1)
    assert [cut.tensor for cut in report.cuts] == ["input", "stem", "sum", "out", "mean", "flat"]
    assert all(cut.is_exact and cut.difference < 1e-5 for cut in report.cuts)
    stem = report.cuts[1]
    assert (stem.shape, stem.wire_bytes) == ((1, 8, 16, 16), 4 * 8 * 16 * 16)
    assert stem.head_multiply_adds == 3 * 9 * 8 * 16 * 16
    assert report.multiply_adds == (3 * 9 + 8 * 9) * 8 * 16 * 16 + 8 * 4
    assert stem.head_peak_bytes == 4 * (3 + 8) * 16 * 16
    assert report.whole_peak_bytes == 4 * (8 + 8 + 8) * 16 * 16


def test_bodies_of_an_if_stay_whole(tmp_path: Path) -> None:
    report = inspect_cuts(branching_network(tmp_path), threads=1)
    assert [cut.tensor for cut in report.cuts] == ["input", "stem", "chosen", "clean"]
    assert all(cut.is_exact for cut in report.cuts)


@pytest.mark.parametrize("build", [residual_network, branching_network])
def test_halves_compute_what_the_whole_computes_for_any_input(tmp_path: Path, build: object) -> None:
    model = read_onnx(build(tmp_path))  # type: ignore[operator]
    whole = open_session(model.proto.SerializeToString(), "whole", 1, is_optimised=False)
    for cut in find_cuts(model.network)[1:]:
        halves = [
            open_session(extract(model, *ends).SerializeToString(), "half", 1, is_optimised=False)
            for ends in ((None, cut), (cut, None))
        ]
        for seed in range(3):
            sample = (model.sample(seed) - 0.5) * 4
            middle = run_session(halves[0], sample)
            assert is_identical(run_session(halves[1], middle[0]), run_session(whole, sample)), cut


def hostile(folder: Path, *nodes: onnx.NodeProto, side: int = 4) -> Path:
    shape = [1, 1, side, side]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input", "out")]
    graph = helper.make_graph([helper.make_node("Relu", ["input"], ["out"]), *nodes], "hostile", ends[:1], ends[1:])
    path = folder / "hostile.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_file_of_a_stranger_takes_neither_memory_nor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of children of other tests, too
    with pytest.raises(NotSupported, match="values"):
        read_onnx(hostile(tmp_path, side=40_000))
    size = helper.make_tensor("", TensorProto.INT64, [1], [1 << 33])  # 32 GiB
    many = [
        helper.make_node("Constant", [], ["size"], value=size),
        helper.make_node("ConstantOfShape", ["size"], ["many"]),
    ]
    monkeypatch.setattr(onnx_session, "available_bytes", lambda: 1 << 30)
    with pytest.raises(NotSupported, match="memory"):
        read_onnx(hostile(tmp_path, *many))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(2 << 20, before_kib + 1)
    monkeypatch.setattr(onnx_session, "LONGEST_S", 0.01)
    with pytest.raises(NotSupported, match="takes longer than"):
        read_onnx(hostile(tmp_path))


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = residual_network(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TierReadError, match=tempfile.gettempdir()):
        read_onnx(path)


def test_weights_listed_as_inputs_are_none(tmp_path: Path) -> None:
    path = residual_network(tmp_path)
    proto = onnx.load(str(path))
    proto.graph.input.extend(
        helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in proto.graph.initializer
    )
    proto.ir_version = 3
    onnx.save(proto, str(path))
    cuts = inspect_cuts(path, threads=1).cuts
    assert [cut.tensor for cut in cuts] == ["input", "stem", "sum", "out", "mean", "flat"]
    assert all(cut.is_exact for cut in cuts)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match=r"missing\.onnx: cannot be read"):
        read_onnx(tmp_path / "missing.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "zeros.onnx").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(ModelFileError, match=rf"{name}\.onnx: is no regular file, a network is one"):
            read_onnx(tmp_path / f"{name}.onnx")
    path = residual_network(tmp_path)
    data = path.read_bytes()
    for number, broken in enumerate((b"", b"no model", data[: len(data) // 2], bytes(200))):
        file = tmp_path / f"{number}.onnx"
        file.write_bytes(broken)
        with pytest.raises((ModelFileError, NotSupported), match=f"{number}.onnx"):
            read_onnx(file)
    two = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["c"])],
        "two",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "ab"],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1, 2])],
    )
    onnx.save(helper.make_model(two, ir_version=8, opset_imports=[helper.make_opsetid("", 13)]), str(path))
    with pytest.raises(NotSupported, match=r"has 2 inputs \(a, b\)"):
        read_onnx(path)


def test_open_sizes_are_refused(tmp_path: Path) -> None:
    path = save(
        tmp_path, "open", [convolution("input", "stem")], [weight("stem.w", 8, 3, 3, 3)], {"stem": ["N", 8, 16, 16]}
    )
    proto = onnx.load(str(path))
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(proto, str(path))
    with pytest.raises(NotSupported, match="open dimensions"):
        read_onnx(path)


@pytest.mark.parametrize(("code", "name"), [(0, "UNDEFINED"), (8, "STRING"), (16, "BFLOAT16"), (99, "99")])
def test_what_is_no_number_here_is_no_input(tmp_path: Path, code: int, name: str) -> None:
    proto = onnx.load(str(residual_network(tmp_path)))
    proto.graph.input[0].type.tensor_type.elem_type = code
    with pytest.raises(NotSupported, match=f"input input is of type {name}, which numbers here cannot be"):
        describe(proto, tmp_path / "x.onnx")


def test_what_is_wrong_with_a_converted_network_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(proto: onnx.ModelProto, path: Path) -> None:
        raise TierReadError(f"{path}: no room", errno=errno.ENOSPC)

    ends = {"out": ["N", 3, 16, 16]}
    path = save(tmp_path, "old", [helper.make_node("Relu", ["input"], ["out"])], [], ends, opset=11)
    monkeypatch.setattr(networks, "describe", full)
    with pytest.raises(TierReadError, match="no room"):
        networks.read_network(path)


def test_a_tensor_that_is_no_cut_is_refused_with_near_names(tmp_path: Path) -> None:
    model = read_onnx(residual_network(tmp_path))
    with pytest.raises(ConfigError, match="inner: is no single-tensor cut"):
        find_tensor(model, "inner")
    with pytest.raises(ConfigError, match=r"no such tensor.*stem"):
        find_tensor(model, "stemm")


def with_outputs(path: Path, *nodes: Any, outputs: list[Any]) -> Path:
    """Return the network at `path` with more nodes, and other outputs."""
    model = onnx.load(str(path))
    model.graph.node.extend(nodes)
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    onnx.save(model, str(path))
    return path


def test_what_is_no_tensor_of_numbers_is_no_answer_and_no_cut(tmp_path: Path) -> None:
    listed = helper.make_node("SequenceConstruct", ["logits"], ["listed"])
    as_list = helper.make_tensor_sequence_value_info("listed", TensorProto.FLOAT, None)
    with pytest.raises(NotSupported, match=r"answers with listed, which is no tensor of numbers; export it without"):
        read_onnx(with_outputs(residual_network(tmp_path), listed, outputs=[as_list]))
    back = helper.make_node("SequenceAt", ["listed", "first"], ["again"])
    first = helper.make_node("Constant", [], ["first"], value_int=0)
    numbers = helper.make_tensor_value_info("again", TensorProto.FLOAT, ["N", 4])
    report = inspect_cuts(with_outputs(residual_network(tmp_path), listed, first, back, outputs=[numbers]), threads=1)
    assert [cut.tensor for cut in report.cuts] == ["input", "stem", "sum", "out", "mean", "flat", "logits"]


def test_weights_beside_the_file_count(tmp_path: Path) -> None:
    path = residual_network(tmp_path)
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    assert read_onnx(path).network.outputs == ("logits",)
    os.truncate(tmp_path / "w.bin", 1 << 40)
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = {"length": str(1 << 39), "offset": "0"}.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        NotSupported, match=r"has 549,755,814,\d+ bytes or more with the weights beside it; an ONNX file"
    ):
        read_onnx(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10
    (tmp_path / "w.bin").unlink()
    for _ in range(2):
        with pytest.raises(ModelFileMissing, match=r"its weights in w\.bin are not there; put that file beside it"):
            read_onnx(path)
        save_whole(path)


def save_whole(path: Path) -> Path:
    """Let the weights beside `path` say no lengths, so that they are the whole file."""
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        kept = [(one.key, one.value) for one in tensor.external_data if one.key == "location"]
        del tensor.external_data[:]
        tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in kept)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([np.nan], [1.0], np.inf),
        ([1.0], [np.nan], np.inf),
        ([np.inf], [1.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0),
        ([1, 5], [1, 2], 3.0),
        ([], [], 0.0),
        ([1.0], [[1.0]], np.inf),
    ],
)
def test_numbers_that_are_none_differ_from_all_others(one: list[float], other: list[float], apart: float) -> None:
    assert onnx_session.largest_difference([np.array(one)], [np.array(other)]) == apart


def test_command(tmp_path: Path) -> None:
    path = residual_network(tmp_path)
    done = command("inspect", str(path), "--json", "-t", "1")
    assert done.returncode == 0, done.stderr
    assert [cut["tensor"] for cut in json.loads(done.stdout)["cuts"]][1] == "stem"
    done = command("inspect", str(path))
    assert "exact" in done.stdout
    done = command("inspect", str(tmp_path / "none.onnx"))
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert np.all([word not in done.stderr for word in ("Traceback", "mistake")])


def test_a_signal_while_a_network_is_traced_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder, left = residual_network(tmp_path), tmp_path / "temporary", [Path()]
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def end(cell: object, job: str, limit_s: float, **asked: Any) -> bytes:
        assert Path(asked["path"]).is_file()
        assert Path(asked["path"]).parent.stat().st_mode & 0o777 == 0o700
        remove_drafts()  # as SIGTERM does, which then ends the process
        left[:] = folder.iterdir()
        raise Overrun("is ended")

    monkeypatch.setattr(onnx_session.Cell, "ask", end)
    with pytest.raises(NotSupported, match="is ended"):
        read_onnx(path)
    assert left == []


def test_what_a_killed_process_left_of_a_trace_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = residual_network(tmp_path), tmp_path / "temporary"
    left = folder / f".edge-run.{os.getpid()}-{process_scope()}-01234567.part"
    left.mkdir(parents=True)
    (left / "network.onnx").touch()
    for one in (left / "network.onnx", left):
        os.utime(one, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    read_onnx(path)
    assert not list(folder.iterdir())
