"""A mesh of real processes: a real mosquitto, workers that can be killed and frozen, and a coordinator here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_run.base.mesh import is_worker
from edge_run.devices.mesh import MeshConfig, open_mesh
from edge_run.devices.mesh_cluster import Cluster, new_cluster, write_cluster
from edge_run.devices.mesh_node import MeshNode
from edge_run.partition.mesh_plan import MeshPlan, Station, UnitWork
from mosquitto import Mosquitto

WORKER = Path(__file__).with_name("mesh_worker.py")
START_S = 30.0


def round_robin(works: Sequence[UnitWork], stations: Sequence[Station], hops: object) -> MeshPlan:
    """Return a plan in which each device has every n-th unit, the others before this one; for `plan_ring` in tests."""
    names = [station.node for station in stations]
    order = names[1:] + names[:1]
    owners = (names[0], *(order[i % len(order)] for i in range(len(works) - 2)), names[0])
    return MeshPlan(owners, 1, 0.15 / len(names), {})


class WorkerProcess:
    """One worker."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.process, self.log = name, process, log
        self.node, self.pid = "", process.pid

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"worker {self.name} ended: {self.log.read_text()[-2000:]}"
        said = json.loads(line)
        self.node, self.pid = said["node"], said["pid"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.thaw()
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class MeshOfProcesses:
    """A broker, workers, and this process's own place in the mesh."""

    def __init__(self, folder: Path, models: Path, address: str = "127.0.0.1") -> None:
        self._folder, self._models = folder, models
        self.broker = Mosquitto(folder, address=address)
        self.broker.start()
        self.cluster: Cluster = new_cluster(self.broker.url)
        self.workers: dict[str, WorkerProcess] = {}
        self._meshes: list[MeshNode] = []

    def prepare_folder(self, folder: Path) -> Path:
        """Make `folder` that of a member."""
        folder.mkdir(exist_ok=True, mode=0o700)
        write_cluster(folder, self.cluster)
        return folder

    def spawn(
        self,
        name: str,
        memory: str = "4GiB",
        wrap: Sequence[str] = (),
        chunk_bytes: int = 16384,
        cache: str | None = None,
        listen: str = "127.0.0.1",
        fetch: str | None = None,
    ) -> WorkerProcess:
        """Start a worker; `wait_ready` says when it serves. fetch: it has no model, and so much room for layers."""
        folder = self.prepare_folder(self._folder / name)
        log = self._folder / f"{name}.log"
        command = [
            *wrap, sys.executable, str(WORKER), str(folder), "--name", name,
            *(["--fetch", fetch] if fetch else ["--models", str(self._models)]),
            "--memory", memory, "--chunk-bytes", str(chunk_bytes), "--listen", listen,
            *(["--cache", cache or str(folder / "cache")] if cache or fetch else []),
        ]  # fmt: skip
        with log.open("a") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"},
            )
        self.workers[name] = WorkerProcess(name, process, log)
        return self.workers[name]

    def join(self, name: str = "here") -> MeshNode:
        """Return this process's own place."""
        folder = self.prepare_folder(self._folder / name)
        mesh = open_mesh(MeshConfig(folder=folder, name=name))
        self._meshes.append(mesh)
        return mesh

    def wait_for(self, mesh: MeshNode, count: int) -> None:
        """Wait until `mesh` sees `count` workers."""
        until = time.monotonic() + START_S
        while sum(is_worker(member) for member in mesh.members()) < count:
            assert time.monotonic() < until, [dataclasses.asdict(m) for m in mesh.members()]
            mesh.wait(timeout_s=0.05)

    def close(self) -> None:
        for mesh in self._meshes:
            mesh.close()
        for worker in self.workers.values():
            worker.end()
        self.broker.stop()


@contextlib.contextmanager
def mesh_of(folder: Path, models: Path, workers: Sequence[str]) -> Iterator[MeshOfProcesses]:
    """Start a broker and workers, and end them all."""
    mesh = MeshOfProcesses(folder, models)
    try:
        for name in workers:
            mesh.spawn(name)
        for worker in mesh.workers.values():
            worker.wait_ready()
        yield mesh
    finally:
        mesh.close()
