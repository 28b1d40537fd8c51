"""Where a training leaves what it learned: in place of nothing, and never lost for want of room at its end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from edge_run.base.errors import ConfigError, TierReadError
from edge_run.runtime.split import onnx_file
from edge_run.runtime.split import train as split_train
from edge_run.runtime.split.bundle import read_bundle
from edge_run.runtime.split.result_folder import ResultRoom
from edge_run.runtime.split.train import TrainTask, train_split
from split_training import config
from vision_models import CUT, make_images, residual_network

# PyTorch takes more than a second to load: not where others only collect these tests.
pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: `make torch`"),
    pytest.mark.usefixtures("traced_here"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images") / "all", per_class=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return residual_network(tmp_path_factory.mktemp("model"))


def test_a_disk_without_room_is_found_before_the_training(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    monkeypatch.setattr(split_train, "train", lambda *_: pytest.fail("there is no room for what it learns"))
    with pytest.raises(TierReadError, match=r"are needed, the disk has 1 MiB free; .*another folder with --out"):
        train_split(TrainTask(model, images, CUT, tmp_path / "new" / "out"), config())
    assert not (tmp_path / "new").exists()


def test_a_training_takes_the_place_of_nothing(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network in the current folder has the name of a file that is written, and so has an earlier training."""
    mine = Path(shutil.copy(model, tmp_path / "model.onnx"))
    before = mine.read_bytes()
    monkeypatch.chdir(tmp_path)
    for out in (Path(), tmp_path):
        with pytest.raises(ConfigError, match=r"holds model\.onnx; choose a new or an empty folder"):
            train_split(TrainTask(mine, images, CUT, out), config())
    assert mine.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_what_was_learned_is_kept_where_it_cannot_be_written(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    monkeypatch.setattr(split_train, "train", lambda *_: (out.mkdir(), (out / "another's").touch()))
    with pytest.raises(
        TierReadError, match=r"cannot be written \(Directory not empty\); what was learned is in"
    ) as found:
        train_split(TrainTask(model, images, CUT, out), config())
    (kept,) = (tmp_path / "cache" / "edge-run").iterdir()
    assert str(kept) in str(found.value)
    assert sorted(path.name for path in kept.iterdir()) == ["code.json", "head.onnx", "model.onnx", "tail.onnx"]
    assert read_bundle(kept).checked("head.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out"]


def test_what_was_learned_is_reported_also_where_nothing_more_can_be_written(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder for temporary files may be full by then; the figures are those of the head all the same."""
    write, head = ResultRoom.write, tmp_path / "out" / "head.onnx"

    def full(*_: object) -> None:
        raise TierReadError("network.onnx: cannot be written (No space left on device)")

    with monkeypatch.context() as patch:

        def write_then_full(*given: Any) -> None:
            write(*given)
            patch.setattr(onnx_file, "traced", full)

        patch.setattr(ResultRoom, "write", write_then_full)
        task = TrainTask(model, images, CUT, head.parent, empty=("class3",), most_missed=0.05)
        report = train_split(task, config())
    assert report.head_multiply_adds == onnx_file.describe(onnx.load(str(head)), head).multiply_adds
    assert report.head_bytes == head.stat().st_size


def test_command(model: Path, images: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "edge_run", "split", "train", str(model), "--data", str(images), "--cut", CUT,
        "--out", str(tmp_path / "out"), "--rates", "40,80", "--halvings", "2", "--feature-epochs", "0",
        "--answer-epochs", "0", "-t", "1",
    ]  # fmt: skip
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert [rate["target_bytes"] for rate in json.loads(done.stdout)["rates"]] == [40, 80]
    done = subprocess.run([*command, "--rates", "x"], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
