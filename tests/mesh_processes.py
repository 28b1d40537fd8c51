"""A mesh of real processes: a real mosquitto, workers that can be killed and frozen, and a coordinator here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_run.base.mesh import is_worker
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from mesh_lists import Members
from mosquitto import Mosquitto, free_port
from namespaces import Network
from program import Program, begin, next_line

WORKER = Path(__file__).with_name("mesh_worker.py")
COORDINATOR = Path(__file__).with_name("mesh_coordinator.py")
START_S = 100.0
CONNECT_S = 60.0  # to the broker, by a thread that others go before
LEAST_DEADLINE_S = 30.0  # of a pass under faults: more than finding one out takes on a busy machine
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}


def round_robin(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: object) -> MeshPlan:
    """Return a plan in which each device has every n-th unit, the others before this one; for `plan_ring` in tests."""
    names = [spec.node for spec in specs]
    order = names[1:] + names[:1]
    owners = (names[0], *(order[i % len(order)] for i in range(len(works) - 2)), names[0])
    return MeshPlan(owners, 1, 0.15 / len(names), {})


class WorkerProcess:
    """One worker."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.process, self.log = name, process, log
        self.node, self.pid = "", process.pid

    def wait_ready(self) -> None:
        if self.node:
            return
        line = next_line(self.process)
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

    def become_slow(self) -> None:
        """Have it take much longer for what it computes; see mesh_worker.py."""
        os.kill(self.process.pid, signal.SIGUSR1)

    def leave(self) -> None:
        """Have it leave the mesh and end; `end` waits for that."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.thaw()
            assert self.process.stdin is not None
            self.process.stdin.close()

    def end(self) -> None:
        self.leave()
        if self.process.poll() is None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class CoordinatorProcess:
    """A run in a process of its own: what it says of each token, and of what it met."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log, self._rest = process, log, b""

    def say(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what it says next, None where that does not come in time, or it was killed."""
        assert self.process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def why(self) -> str:
        """Return what it said last before it ended."""
        return self._log.read_text()[-3000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class MeshOfProcesses:
    """A broker, workers, and this process's own place in the mesh."""

    def __init__(
        self, folder: Path, models: Path, address: str = "127.0.0.1", net: Network | None = None, serves: str = ""
    ) -> None:
        """net: workers run in namespaces of it that have their names. serves: the worker that is the broker too."""
        self._folder, self._models, self._net, self._address, self._serves = folder, models, net, address, serves
        self.broker = Mosquitto(folder, address=address)
        place = f"{self.address_of(serves)}:{free_port()}"
        if not serves:
            self.broker.start()
        self._members = Members(f"mqtt://{place}", place) if serves else Members(self.broker.url)
        self.workers: dict[str, WorkerProcess] = {}
        self._meshes: list[LocalNode] = []

    def address_of(self, name: str) -> str:
        """Return where a device is."""
        return self._net.addresses.get(name, self._address) if self._net else self._address

    def prepare_folder(self, folder: Path) -> Path:
        """Make `folder` that of a member."""
        return self._members.move_into(folder, is_founder=folder.name == self._serves)

    def spawn(
        self,
        name: str,
        memory: str = "4GiB",
        wrap: Sequence[str] = (),
        chunk_bytes: int = 16384,
        cache: str | None = None,
        listen: str = "",
        fetch: str | None = None,
        script: Path = WORKER,
    ) -> WorkerProcess:
        """Start a worker; `wait_ready` says when it serves.

        wrap: what its command is put behind. fetch: it has no model, and so much room for layers.
        """
        folder = self.prepare_folder(self._folder / name)
        (folder / "held").unlink(missing_ok=True)  # of an earlier incarnation
        log = self._folder / f"{name}.log"
        words = [
            str(folder), "--name", name,
            *(["--fetch", fetch] if fetch else ["--models", str(self._models)]),
            "--memory", memory, "--chunk-bytes", str(chunk_bytes), "--listen", listen or self.address_of(name),
            *(["--cache", cache or str(folder / "cache")] if cache or fetch else []),
        ]  # fmt: skip
        with log.open("a") as out:
            place = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": out, "text": True}
            if wrap:
                command = [*wrap, sys.executable, str(script), *words]
                process = subprocess.Popen(command, env=ENVIRONMENT, **place)
            else:
                process = begin(Program(words, str(script), netns=self._space_of(name)), env=ENVIRONMENT, **place)
        self.workers[name] = WorkerProcess(name, process, log)
        return self.workers[name]

    def _space_of(self, name: str) -> str:
        """Return the network namespace that is a device; an empty one is this process's own."""
        return self._net.space(name) if self._net and name in self._net.addresses else ""

    def coordinate(self, name: str, model: Path, tokens: int, workers: int) -> CoordinatorProcess:
        """Start a run of `model` in a process of its own, which begins when it sees so many workers."""
        words = [
            str(self.prepare_folder(self._folder / name)), str(model), "--tokens", str(tokens),
            "--workers", str(workers), "--listen", self.address_of(name),
        ]  # fmt: skip
        program, log = Program(words, str(COORDINATOR), netns=self._space_of(name)), self._folder / f"{name}.log"
        with log.open("a") as out:
            process = begin(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out, env=ENVIRONMENT)
        return CoordinatorProcess(process, log)

    def join(self, name: str = "here") -> LocalNode:
        """Return this process's own place."""
        folder = self.prepare_folder(self._folder / name)
        mesh = open_mesh(MeshConfig(folder=folder, name=name, listen=(self._address,), connect_s=CONNECT_S))
        self._meshes.append(mesh)
        return mesh

    def wait_for(self, mesh: LocalNode, count: int) -> None:
        """Wait until `mesh` sees `count` workers."""
        until = time.monotonic() + START_S
        while sum(is_worker(member) for member in mesh.members()) < count:
            assert time.monotonic() < until, [dataclasses.asdict(m) for m in mesh.members()]
            mesh.wait(timeout_s=0.05)

    def close(self) -> None:
        for mesh in self._meshes:
            mesh.close()
        for worker in self.workers.values():
            worker.leave()
        for worker in self.workers.values():
            worker.end()
        self.broker.stop()


@contextlib.contextmanager
def mesh_of(
    folder: Path, models: Path, workers: Sequence[str], net: Network | None = None, serves: str = ""
) -> Iterator[MeshOfProcesses]:
    """Start a broker and workers, and end them all. net, serves: as of `MeshOfProcesses`."""
    mesh = MeshOfProcesses(folder, models, net.here if net else "127.0.0.1", net, serves)
    try:
        for name in workers:
            mesh.spawn(name)
        for worker in mesh.workers.values():
            worker.wait_ready()
        yield mesh
    finally:
        mesh.close()
