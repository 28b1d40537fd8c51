"""Devices that lack the model: they fetch the bytes of their layers, verified, and tokens are those of one device.

In one process, over a mesh made of queues; with real processes in test_mesh_fetch_processes.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.units import GIB
from edge_run.runtime import mesh_spread
from edge_run.runtime.engine import Engine
from edge_run.runtime.mesh_engine import MeshEngine
from edge_run.runtime.session import Session
from edge_run.runtime.worker import Worker
from fake_mesh import Hub
from in_child import in_child
from mesh_processes import round_robin
from tiny_models import make_model

OPTIONS = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
PROMPT = np.random.default_rng(1).integers(1, 380, 40).tolist()
CHUNK_BYTES = 16384


def greedy(engine: Engine, tokens: int = 8) -> list[int]:
    session = Session(engine.front)
    logits, _ = session.feed(PROMPT)
    said = []
    for _ in range(tokens):
        said.append(int(logits.argmax()))
        logits = session.step(said[-1])
    return said


def alone(path: Path) -> list[int]:
    engine = Engine(path, ModelConfig(memory="4GiB", **OPTIONS))
    try:
        return greedy(engine)
    finally:
        engine.close()


class Devices:
    """A coordinator `a` with the model, and workers with or without it, each with a cache of its own."""

    def __init__(self, path: Path, folder: Path) -> None:
        mesh_spread.plan_mesh = round_robin
        self.path, self.folder = path, folder
        self.hub = Hub()
        self.workers: dict[str, Worker] = {}
        self.said: list[str] = []

    def join(self, name: str, fetch_bytes: int = GIB, models: tuple[Path, ...] = ()) -> Worker:
        config = ModelConfig(memory="4GiB", threads=1, check_file=False, cache_folder=self.folder / name)
        worker = Worker(self.hub.join(name), models, config, CHUNK_BYTES, fetch_bytes)
        worker.start()
        self.workers[name] = worker
        return worker

    def leave(self, name: str) -> None:
        self.hub.kill(name)
        self.workers.pop(name).close()

    @contextlib.contextmanager
    def engine(self) -> Iterator[MeshEngine]:
        config = ModelConfig(memory="4GiB", cache_folder=self.folder / "a", **OPTIONS)
        engine = MeshEngine(self.path, config, self.hub.join("a"), say=self.said.append, chunk_bytes=CHUNK_BYTES)
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


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.gguf"))


@pytest.mark.parametrize("name", ["granite", "qwen3moe"])
@in_child
def test_a_device_without_the_model_fetches_what_it_computes(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    wanted = alone(path)
    with devices(path, folder) as found:
        found.join("b")
        found.join("c", models=(path,))
        with found.engine() as engine:
            assert greedy(engine) == wanted
            assert engine.mesh_use is not None
            assert {node.node for node in engine.mesh_use.nodes} == {"a", "b", "c"}, (engine.mesh_use, found.said)
        assert any(line.startswith("name of b fetches 0 B of ") for line in found.said), found.said
        print(found.said, disk_bytes(folder / "b"), path.stat().st_size)
