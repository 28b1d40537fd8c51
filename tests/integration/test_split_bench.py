"""`edge-run split bench`: curves of an untrained split, whose figures can be worked out another way."""

from __future__ import annotations

import json
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.split import SplitBench, WayTime
from edge_run.partition import latent_codec
from edge_run.runtime.split import bench
from edge_run.runtime.split.bench import bench_split
from edge_run.runtime.split.bundle import read_bundle
from edge_run.runtime.split.model import SplitModel
from edge_run.runtime.split.onnx_session import run_session
from program import run_program
from vision_models import CLASSES, make_images

pytestmark = pytest.mark.skipif(not find_spec("matplotlib"), reason="needs matplotlib: pip install 'edge-run[plot]'")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images") / "all", per_class=5)


@pytest.fixture(scope="module")
def result(head: Path, images: Path) -> SplitBench:
    return bench_split(head, images, threads=1)


def test_accuracy_is_what_a_device_alone_reaches(head: Path, images: Path, result: SplitBench) -> None:
    folders = sorted(path for path in images.iterdir())
    right = 0
    with SplitModel(head, threads=1) as model:
        for label, folder in enumerate(folders):
            right += sum(model.run(path).report.answer == label for path in folder.iterdir())
    assert result.images == 5 * CLASSES
    assert result.model_accuracy == pytest.approx(right / result.images)


def test_every_rate_and_codec_has_a_point_and_more_bytes_at_more_quality(head: Path, result: SplitBench) -> None:
    sizes = {
        kind: [p.mean_bytes for p in result.points if p.name.startswith(kind)] for kind in ("code", "jpeg", "webp")
    }
    assert len(sizes["code"]) == len(read_bundle(head).codec.rates)
    assert all(len(found) > 4 and found == sorted(found) for kind, found in sizes.items() if kind != "code")
    assert all(0 < point.mean_bytes <= point.largest_bytes and 0 <= point.accuracy <= 1 for point in result.points)
    assert result.worst_overhead_bytes < 8


def test_ways_are_those_of_a_running_split(result: SplitBench) -> None:
    assert [way.name for way in result.ways] == ["local", "image", "code 0", "code 1", "code 2"]
    local, image, *codes = result.ways
    assert (local.server_s, local.sent_bytes, image.device_s) == (0, 0, 0)
    assert image.sent_bytes == result.file_bytes
    assert [way.sent_bytes for way in codes] == [p.mean_bytes for p in result.points if p.name.startswith("code")]
    assert all(way.device_s > 0 for way in (local, *codes))
    assert all(way.server_s > 0 for way in (image, *codes))


def test_latency_is_computing_and_the_network() -> None:
    assert WayTime("code 0", 0.010, 0.004, 125.0).latency_s(12_500.0) == pytest.approx(0.024)


def test_no_code_is_larger_than_allowed(head: Path, images: Path, result: SplitBench) -> None:
    most_bytes = int(max(point.mean_bytes for point in result.points if point.name.startswith("code")))
    limited = bench_split(head, images, most_images=8, most_bytes=most_bytes, threads=1, baselines=False)
    assert limited.images == 8
    assert max(point.largest_bytes for point in limited.points) <= most_bytes


def test_few_images_and_tensors_are_held_however_many_there_are(
    head: Path, images: Path, result: SplitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is measured does not depend on how many are held at once."""
    sizes: list[int] = []

    def run(session: Any, value: np.ndarray) -> list[np.ndarray]:
        found = run_session(session, value)
        held.extend(weakref.ref(one) for one in (value, *found))
        sizes.append(sum(one.nbytes for ref in held if (one := ref()) is not None))
        return found

    held: list[weakref.ref[np.ndarray]] = []
    monkeypatch.setattr(bench, "run_session", run)
    monkeypatch.setattr(bench, "KEPT_BYTES", 0)
    most: dict[int, int] = {}
    for count in (8, 20):
        measured = bench_split(head, images, most_images=count, threads=1, baselines=False)
        most[count] = max(sizes)
        sizes.clear()
    assert most[20] <= most[8]
    assert measured.points == tuple(point for point in result.points if point.name.startswith("code"))
    assert measured.worst_overhead_bytes == result.worst_overhead_bytes


def test_command(head: Path, images: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    command = ["split", "bench", head, "--data", images, "-t", 1]
    done = run_program(*command, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert "at 0.1 Mbit/s" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = run_program(*command, "--json")
    assert [way["name"] for way in json.loads(done.stdout)["ways"]][:2] == ["local", "image"]


def test_refusals(head: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="has 2 folders, the network answers"):
        bench_split(head, make_two_classes(images, tmp_path / "two"), threads=1)
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "one.jpg").write_bytes(next(images.rglob("*.*")).read_bytes())
    with pytest.raises(ConfigError, match="images outside of folders"):
        bench_split(head, loose, threads=1)


def test_an_image_without_a_code_is_refused(head: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_codec, "MOST_PAYLOAD_BYTES", 1)
    with pytest.raises(NotSupported, match="at each rate"):
        bench_split(head, images, most_images=8, threads=1, baselines=False)


def make_two_classes(images: Path, target: Path) -> Path:
    for folder in sorted(images.iterdir())[:2]:
        (target / folder.name).mkdir(parents=True)
        for path in folder.iterdir():
            (target / folder.name / path.name).write_bytes(path.read_bytes())
    return target
