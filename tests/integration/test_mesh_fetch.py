"""Devices that lack the model: they fetch the bytes of their layers, verified, and tokens are those of one device.

In one process, over a mesh made of queues; with real processes in test_mesh_fetch_processes.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

import mesh_runs
from edge_run.base.config import ModelConfig
from edge_run.base.mesh import MeshOptions
from edge_run.base.units import GIB, MIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from edge_run.runtime.worker.worker import Worker
from fake_mesh import Hub
from in_child import in_child
from mesh_processes import round_robin
from tiny_models import make_model, split_model

OPTIONS = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
PROMPT = np.random.default_rng(1).integers(1, 380, 40).tolist()
CHUNK_BYTES = 16384
greedy = partial(mesh_runs.greedy, tokens=8, prompt=PROMPT)


def alone(path: Path) -> list[int]:
    engine = Engine.open(path, ModelConfig(memory="4GiB", **OPTIONS))
    try:
        return greedy(engine)
    finally:
        engine.close()


class Devices:
    """A coordinator `a` with the model, and workers with or without it, each with a cache of its own."""

    def __init__(self, path: Path, folder: Path) -> None:
        coordinator.plan_ring = round_robin
        self.path, self.folder = path, folder
        self.hub = Hub()
        self.workers: dict[str, Worker] = {}
        self.said: list[str] = []

    def join(self, name: str, fetch_bytes: int = GIB, models: tuple[Path, ...] = ()) -> Worker:
        config = ModelConfig(
            memory="4GiB", threads=1, check_file=False, cache_folder=self.folder / name, chunk_bytes=CHUNK_BYTES
        )
        worker = Worker(self.hub.join(name), models, config, fetch_bytes)
        worker.start()
        self.workers[name] = worker
        return worker

    def leave(self, name: str) -> None:
        self.hub.kill(name)
        self.workers.pop(name).close()

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        config = ModelConfig(memory="4GiB", cache_folder=self.folder / "a", chunk_bytes=CHUNK_BYTES, **OPTIONS)
        engine = open_mesh_engine(self.path, config, self.hub.join("a"), MeshOptions(say=self.said.append))
        try:
            yield engine
        finally:
            engine.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


@contextlib.contextmanager
def devices(path: Path, folder: Path) -> Iterator[Devices]:
    found = Devices(path, folder)
    try:
        yield found
    finally:
        found.close()


def nodes(engine: Engine) -> set[str]:
    assert engine.mesh_use is not None
    return {node.node for node in engine.mesh_use.nodes}


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.gguf"))


@in_child
def test_devices_without_the_model_fetch_what_they_compute(folder: Path, tmp_path: Path) -> None:
    shards = split_model(make_model("qwen3moe", folder), 3, tmp_path)
    path, size_bytes = shards[0], sum(shard.stat().st_size for shard in shards)
    wanted = alone(path)
    with devices(path, tmp_path) as found:
        found.join("b")
        found.join("c", models=(path,))
        with found.engine() as engine:
            assert greedy(engine) == wanted
            assert nodes(engine) == {"a", "b", "c"}
        assert any(line.startswith("name of b fetches 0 B of ") for line in found.said), found.said
        first = disk_bytes(tmp_path / "b")
        assert 0 < first < size_bytes

        found.said.clear()
        with found.engine() as engine:  # it is there now
            assert greedy(engine) == wanted
            assert nodes(engine) == {"a", "b", "c"}
            assert not any("fetches" in line for line in found.said), found.said
            found.leave("c")  # other layers for b, which fetches them
            engine.front.rewind(0, 0)
            assert greedy(engine) == wanted
            assert nodes(engine) == {"a", "b"}
        assert disk_bytes(tmp_path / "b") > first

        found.hub.link_bytes_per_s = 10.0  # it would take an hour
        found.join("d")
        with found.engine() as engine:
            assert greedy(engine) == wanted
            assert nodes(engine) == {"a", "b"}
        assert disk_bytes(tmp_path / "d") < size_bytes // 2


@in_child
def test_bytes_that_are_wrong_and_devices_without_room_are_not_taken(folder: Path, tmp_path: Path) -> None:
    path = make_model("granite", folder)
    wanted = alone(path)
    check_wrong_bytes(path, tmp_path / "wrong", wanted)
    check_no_room(path, tmp_path / "full", wanted, make_model("gemma2", folder))


def check_wrong_bytes(path: Path, folder: Path, wanted: list[int]) -> None:
    with devices(path, folder) as found:
        found.join("b")
        found.join("c", models=(path,))
        found.hub.liars = {"c"}
        with found.engine() as engine:
            assert greedy(engine) == wanted
            assert nodes(engine) == {"a", "b"}, found.said
            assert engine.mesh_use is not None
            assert "other bytes" in engine.mesh_use.left_out["c"]
        found.hub.liars = {"a"}  # b has what it needs; d can get nothing from anybody
        found.join("d")
        with found.engine() as engine:
            assert greedy(engine) == wanted
            assert engine.mesh_use is not None
            assert "not those of its hash" in engine.mesh_use.left_out["d"], engine.mesh_use
            assert nodes(engine) == {"a", "b", "c"}


def fill_disk(folder: Path) -> None:
    """Let no byte more be written into files below `folder`."""
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    os.pwrite = pwrite


def check_no_room(path: Path, folder: Path, wanted: list[int], other: Path) -> None:
    with devices(path, folder) as found:
        found.join("b", fetch_bytes=MIB // 2)
        found.join("c", fetch_bytes=0, models=(other,))
        found.join("d")
        (folder / "d").mkdir(parents=True)
        (folder / "d" / "fetched").write_bytes(b"no folder")
        found.join("e")
        fill_disk(folder / "e")
        with found.engine() as engine:
            assert greedy(engine) == wanted
            assert engine.mesh_use is not None
            assert "--fetch 512 KiB: too small" in engine.mesh_use.left_out["b"], engine.mesh_use.left_out
            assert "with --fetch SIZE" in engine.mesh_use.left_out["c"]
            assert "cannot keep fetched weights" in engine.mesh_use.left_out["d"]
            assert "No space left" in engine.mesh_use.left_out["e"]
            assert nodes(engine) == {"a"}
