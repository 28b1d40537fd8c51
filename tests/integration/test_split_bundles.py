"""Bundles of strangers, whose digests are right and whose networks are not those that `code.json` speaks of."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import ModelFileError, SplitModel
from edge_run.runtime.split import model as split_model
from edge_run.runtime.split.bench import bench_split
from edge_run.runtime.split.bundle import (
    CODE_FILE,
    HEAD_FILE,
    MODEL_FILE,
    TAIL_FILE,
    StoredCode,
    code_json,
    digest,
    read_bundle,
)
from edge_run.runtime.split.server import SplitServer
from vision_models import make_images, make_pixels

MISFIT = r"\.onnx: does not fit code\.json beside it, "


@pytest.fixture
def folder(head: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(head.parent, tmp_path / "bundle"))


def change(folder: Path, **fields: Any) -> StoredCode:
    """Have `code.json` say something else; return what it said."""
    code = read_bundle(folder).code
    (folder / CODE_FILE).write_bytes(code_json(dataclasses.replace(code, **fields)))
    return code


def open_model(folder: Path) -> None:
    SplitModel(folder / HEAD_FILE, threads=1).close()


def open_server(folder: Path) -> None:
    SplitServer([folder / TAIL_FILE], 1)


@pytest.mark.parametrize("opening", [open_model, open_server])
def test_latents_of_another_size(folder: Path, opening: Callable[[Path], None]) -> None:
    channels, height, width = read_bundle(folder).code.latent
    change(folder, latent=(channels, height, 3 * width))
    why = "makes float32 of 1 x" if opening is open_model else r"takes tensor\(float\) of N x"
    needed = rf"{why} .*, needed is .* of 1 x {channels} x {height} x {3 * width}; train again"
    with pytest.raises(ModelFileError, match=MISFIT + needed) as caught:
        opening(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opening", [open_model, open_server])
def test_another_number_of_answers(folder: Path, opening: Callable[[Path], None]) -> None:
    change(folder, outputs=("logits", "more"))
    with pytest.raises(ModelFileError, match=MISFIT + r"makes float32 of 1 x \d+, needed is numbers in 2 tensors"):
        opening(folder)


def test_images_of_another_size(folder: Path) -> None:
    change(folder, input=(1, 16, 16))
    with pytest.raises(ModelFileError, match=MISFIT + r"takes tensor\(uint8\) of N x 3 x .*needed is .* of 1 x 1 x 16"):
        open_model(folder)


def test_networks_that_changed_places(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / MODEL_FILE, folder / HEAD_FILE)
    change(folder, head=digest((folder / HEAD_FILE).read_bytes()))
    images = make_images(tmp_path / "images", per_class=1)
    for opening in (open_model, lambda one: bench_split(one / HEAD_FILE, images, threads=1)):
        with pytest.raises(ModelFileError, match="head" + MISFIT + "makes float32 of"):
            opening(folder)


def test_a_network_that_makes_something_else_of_a_later_frame(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SplitModel(folder / HEAD_FILE, threads=1) as model:
        monkeypatch.setattr(split_model, "run_session", lambda *_: [np.zeros((1, 3), np.float32)] * 2)
        with pytest.raises(ModelFileError, match="model" + MISFIT + "makes float32 of 1 x 3, float32 of 1 x 3"):
            model.run(make_pixels(1)[0])


def test_a_network_that_finds_nothing_in_a_frame(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SplitModel(folder / HEAD_FILE, threads=1) as model:
        monkeypatch.setattr(split_model, "run_session", lambda *_: [np.zeros((0, 4), np.float32)])
        frame = model.run(make_pixels(1)[0])
    assert [one.shape for one in frame.outputs.values()] == [(0, 4)]
    assert frame.report.answer == -1
