"""Random faults under answers, on a mesh of real processes: each answer must be that of one device, and come.

    python mesh_faults.py MODEL.gguf ... --seeds 7 8 9 [--tokens 60]

Each device has a network of its own, where this may make some (root), so that links can be cut and slowed down; else
no such fault is drawn. In some schedules the device that makes the text is lost: then those that computed for it must
be free at once, for a second answer by this process. In every fourth one a worker's program is the broker too.
Prints two lines of JSON for each schedule: its seed, and then what was done when, whether the tokens were right, and
how long things took.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import namespaces
from edge_run.base.config import ModelConfig
from edge_run.base.mesh import MeshOptions
from edge_run.devices.mesh.node import LocalNode
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import coordinator as mesh_coordinator
from edge_run.runtime.mesh import device_group
from edge_run.runtime.mesh.engine import open_mesh_engine
from mesh_processes import LEAST_DEADLINE_S, CoordinatorProcess, MeshOfProcesses, mesh_of, round_robin
from mesh_schedules import COORDINATOR, HERE, ON_LINKS, SERVER, WORKERS, Fault, Schedule, draw_schedule
from namespaces import Network
from program import MESH, fork_from_here

OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
SILENCE_S = 60.0  # of a run, after which it hangs
LIMIT_S = 150  # of a schedule, after which all stacks are printed, and this ends
PROMPT = [(7 * i * i + 3) % 380 + 1 for i in range(70)]


def greedy(engine: Engine, tokens: int, at: Callable[[int], None] = lambda i: None) -> tuple[list[int], float]:
    """Return the tokens, and what the longest step took."""
    session = Session(engine.front)
    logits, _ = session.feed(PROMPT)
    said, longest = [], 0.0
    for i in range(tokens):
        at(i)
        said.append(int(logits.argmax()))
        started = time.monotonic()
        logits = session.step(said[-1])
        longest = max(longest, time.monotonic() - started)
    return said, longest


class Table:
    """A mesh on which schedules are run one after the other."""

    def __init__(self, mesh: MeshOfProcesses, net: Network | None, folder: Path, serves: str) -> None:
        self._mesh, self._net, self._folder, self._serves = mesh, net, folder, serves
        self._healing: dict[Fault, Callable[[], None]] = {}
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()
        self._frozen: set[str] = set()
        self._draw = random.Random()

    def run(self, path: Path, schedule: Schedule, wanted: list[int]) -> dict[str, Any]:
        """Run one schedule."""
        self._draw = random.Random(schedule.seed)
        with contextlib.closing(self._mesh.join("here")) as here:
            self._mesh.wait_for(here, len(WORKERS))
            if schedule.end is None or not schedule.is_there:
                here.close()
            started = time.monotonic()
            coordinator = self._mesh.coordinate(COORDINATOR, path, len(wanted), len(WORKERS))
            try:
                found = self._follow(coordinator, schedule, here, path, wanted)
                wall_s = time.monotonic() - started
            finally:
                coordinator.end()
                self.heal()
        return {**found, "wall_s": round(wall_s, 3)}

    def heal(self) -> None:
        """Make everything as it was."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        self._timers.clear()
        for fault in list(self._healing):
            self._heal(fault)
        for name in sorted(self._frozen):
            self._mesh.workers[name].thaw()
        self._frozen.clear()
        if not self._serves and not self._mesh.broker.is_running:
            self._mesh.broker.start()
        for name, worker in self._mesh.workers.items():
            if worker.process.poll() is not None:
                self._mesh.spawn(name)
        for worker in self._mesh.workers.values():
            worker.wait_ready()

    def _follow(
        self, coordinator: CoordinatorProcess, schedule: Schedule, here: LocalNode, path: Path, wanted: list[int]
    ) -> dict[str, Any]:
        """Hear what the run says, and do what is planned when."""
        planned, told = list(schedule.faults), []
        while (word := coordinator.say(SILENCE_S)) is not None:
            if "say" in word:
                told.append(word["say"])
            elif "said" in word:
                use = {key: word[key] for key in ("recoveries", "nodes")}
                return {"identical": word["said"] == wanted, **use, "longest_token_s": round(word["longest_s"], 3)}
            elif "token" in word:
                while planned and planned[0].token <= word["token"]:
                    self._strike(planned.pop(0), coordinator)
                if schedule.end and schedule.end.token == word["token"]:
                    time.sleep(self._draw.uniform(0, 0.04))
                    return self._end(coordinator, schedule, here, path, wanted)
        if coordinator.process.poll() is None:
            raise Hung(f"nothing was said for {SILENCE_S:g} s; before: {told[-5:]}")
        raise AssertionError(f"the run ended: {coordinator.why()}")

    def _strike(self, fault: Fault, coordinator: CoordinatorProcess) -> None:
        """Do one fault."""
        worker = self._mesh.workers.get(fault.whom)
        if fault.whom == COORDINATOR and fault.what == "freeze and thaw":
            coordinator.process.send_signal(signal.SIGSTOP)
            self._healing[fault] = lambda: coordinator.process.send_signal(signal.SIGCONT)
            assert fault.heals_s is not None
            self._later(fault.heals_s, lambda: self._heal(fault))
            return
        time.sleep(self._draw.uniform(0, 0.03))
        if fault.what == "broker down":
            self._mesh.broker.stop()
        elif fault.what == "broker restart":
            self._mesh.broker.stop()
            self._mesh.broker.start()
        elif fault.what in ON_LINKS:
            self._strike_link(fault)
        elif fault.what == "kill":
            assert worker is not None
            worker.kill()
        elif fault.what == "restart":
            assert worker is not None
            worker.kill()
            self._mesh.spawn(fault.whom)
        else:
            assert worker is not None
            worker.freeze()
            self._frozen.add(fault.whom)
            if fault.what == "freeze and thaw":
                self._later(fault.heals_s or 1.0, worker.thaw)

    def _strike_link(self, fault: Fault) -> None:
        net, whom, other = self._net, fault.whom, fault.other
        assert net is not None
        if fault.what == "unplug":
            net.unplug(whom)
            self._healing[fault] = lambda: net.plug(whom)
        elif fault.what == "slow":
            net.shape(whom, fault.rate)
            self._healing[fault] = lambda: net.hasten(whom)
        else:
            ways = [(whom, other), (other, whom)][: 1 if fault.what == "cut one way" else 2]
            for way in ways:
                net.cut(*way)
            self._healing[fault] = lambda: [net.mend(*way) for way in ways] and None
        if fault.heals_s is not None:
            self._later(fault.heals_s, lambda: self._heal(fault))

    def _heal(self, fault: Fault) -> None:
        with self._lock:
            heal = self._healing.pop(fault, None)
        if heal is not None:
            heal()

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        self._timers.append(threading.Timer(after_s, do))
        self._timers[-1].start()

    def _end(
        self, coordinator: CoordinatorProcess, schedule: Schedule, here: LocalNode, path: Path, wanted: list[int]
    ) -> dict[str, Any]:
        """Take who makes the text away, and make another one here with those who computed for him."""
        end, net = schedule.end, self._net
        assert end is not None
        ended_s = time.monotonic()
        if end.what == "unplug":
            assert net is not None
            net.unplug(COORDINATOR)
            self._healing[end] = lambda: net.plug(COORDINATOR)
        else:
            coordinator.process.send_signal(signal.SIGKILL if end.what == "kill" else signal.SIGSTOP)
            self._healing[end] = lambda: coordinator.process.send_signal(signal.SIGCONT)
        if schedule.takes_broker:
            self._mesh.workers[SERVER].kill() if self._serves else self._mesh.broker.stop()
            self._frozen -= {self._serves}
        is_broker_there = self._is_broker_there
        free_s = 0.0 if is_broker_there else self._wait_free(ended_s)
        since_s = ended_s if is_broker_there else self._bring_broker_back()
        if not schedule.is_there:
            here = self._mesh.join("here")
        with contextlib.closing(here):
            here.lead(timeout_s=30)
            lead_s = time.monotonic() - since_s
            free_s = free_s or self._wait_free(ended_s)
            found = self._take_over(here, path, wanted, lambda: self._heal(end))
        told = [] if end.what == "kill" else self._hear_the_end(coordinator, wanted)
        successor = "a member" if schedule.is_there else "new"
        return {**found, "free_s": round(free_s, 3), "lead_s": round(lead_s, 3), "successor": successor, "told": told}

    @property
    def _is_broker_there(self) -> bool:
        if not self._serves:
            return self._mesh.broker.is_running
        is_on = self._serves not in self._frozen and self._mesh.workers[self._serves].process.poll() is None
        return is_on and not self._in_the_way()

    def _in_the_way(self) -> list[Fault]:
        """Return the faults that keep this process from the broker on a worker."""
        faults = [fault for fault in list(self._healing) if self._serves and self._serves in (fault.whom, fault.other)]
        return [
            fault
            for fault in faults
            if fault.what == "unplug" or (fault.what != "slow" and HERE in (fault.whom, fault.other))
        ]

    def _bring_broker_back(self) -> float:
        """Start the broker again; return when it was there."""
        for fault in self._in_the_way():
            self._heal(fault)
        if not self._serves:
            self._mesh.broker.start()
        elif self._serves in self._frozen:
            self._mesh.workers[self._serves].thaw()
            self._frozen.discard(self._serves)
        elif self._mesh.workers[self._serves].process.poll() is not None:
            self._mesh.spawn(self._serves).wait_ready()
        return time.monotonic()

    def _wait_free(self, since_s: float) -> float:
        """Wait until nobody who can holds a share any more; return after how long that was."""
        longest_s = 0.0
        for name, worker in self._mesh.workers.items():
            if name in self._frozen or worker.process.poll() is not None:
                continue
            while True:
                path = self._folder / name / "held"
                lines = path.read_text().split("\n")[:-1] if path.exists() else []  # it may be there before its line
                at, is_held = lines[-1].split() if lines else ("0", "0")
                if is_held == "0":
                    longest_s = max(longest_s, float(at) - since_s)
                    break
                if time.monotonic() > since_s + SILENCE_S:
                    raise Hung(f"{name} still holds what nobody needs")
                time.sleep(0.02)
        return longest_s

    def _take_over(self, here: LocalNode, path: Path, wanted: list[int], wake: Callable[[], None]) -> dict[str, Any]:
        """Make the answer here, with all who can be asked; in the middle of it the former coordinator comes back."""
        touched = {one for fault in self._healing for one in (fault.whom, fault.other)} | self._frozen
        sure = [one for name, one in self._mesh.workers.items() if name not in touched and one.process.poll() is None]
        for worker in sure:
            worker.wait_ready()
        self._mesh.wait_for(here, len(sure))
        engine = open_mesh_engine(
            path, ModelConfig(memory="4GiB", **OPTIONS, chunk_bytes=16384), here, MeshOptions(say=lambda text: None)
        )
        try:
            said, longest_s = greedy(engine, len(wanted), lambda i: wake() if i == len(wanted) // 3 else None)
            use = engine.mesh_use
        finally:
            engine.close()
        assert use is not None
        nodes = {node.node for node in use.nodes}
        return {
            "identical": said == wanted,
            "recoveries": use.recoveries,
            "nodes": len(nodes),
            "longest_token_s": round(longest_s, 3),
            "are_all_used": all(worker.node in nodes for worker in sure),
        }

    def _hear_the_end(self, coordinator: CoordinatorProcess, wanted: list[int]) -> list[str]:
        """Hear what the former coordinator says of being that no more; its answer must be right too."""
        told: list[str] = []
        while (word := coordinator.say(SILENCE_S)) is not None:
            if "say" in word:
                told.append(word["say"])
            if "said" in word:
                assert word["said"] == wanted, "the former coordinator's answer is another one"
            if "ended" in word:
                return told
        raise Hung(f"the former coordinator does not end; it told {told}, and {coordinator.why()}")


class Hung(Exception):
    """Something did not come."""


@contextlib.contextmanager
def networks() -> Iterator[Network | None]:
    """Give each device a network of its own, where this may make some."""
    if namespaces.why_not():
        yield None
        return
    with namespaces.network([COORDINATOR, *WORKERS]) as net:
        yield net


def run_all(paths: Sequence[Path], seeds: Sequence[int], tokens: int, logs: Path | None) -> None:
    """Run schedules, on one mesh for each kind of broker and until something goes wrong on it; print what came."""
    schedules = [draw_schedule(seed, tokens, not namespaces.why_not()) for seed in seeds]
    schedules.sort(key=lambda schedule: schedule.serves)
    wanted: dict[Path, list[int]] = {}
    while schedules:
        with contextlib.ExitStack() as stack:
            serves = schedules[0].serves
            folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            net = stack.enter_context(networks())
            mesh = stack.enter_context(mesh_of(folder, paths[0].parent, WORKERS, net, serves))
            table, is_well = Table(mesh, net, folder, serves), True
            while is_well and schedules and schedules[0].serves == serves:
                schedule = schedules.pop(0)
                path = paths[schedule.seed % len(paths)]
                if path not in wanted:
                    alone = Engine.open(path, ModelConfig(memory="4GiB", **OPTIONS))
                    wanted[path], _ = greedy(alone, tokens)
                    alone.close()
                print(json.dumps({"seed": schedule.seed}), flush=True)  # who hangs so that all ends is known by that
                row, is_well = outcome(table, path, schedule, wanted[path])
                print(json.dumps(row), flush=True)


def outcome(table: Table, path: Path, schedule: Schedule, wanted: list[int]) -> tuple[dict[str, Any], bool]:
    """Run one schedule; return what came of it, and whether its mesh can be used for others."""
    row = {
        "seed": schedule.seed,
        "model": path.stem.split("-")[0],
        "broker": "of a worker" if schedule.serves else "mosquitto",
        "faults": str(schedule),
    }
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        return {**row, "outcome": "answered", **table.run(path, schedule, wanted)}, True
    except Hung as error:
        return {**row, "outcome": f"hung: {error}"}, False
    except Exception as error:
        return {**row, "outcome": f"lost: {type(error).__name__}: {error}"}, False
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Run schedules, and print what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--logs", type=Path, help="where the devices' folders and logs are to stay")
    arguments = parser.parse_args()
    fork_from_here(MESH)
    mesh_coordinator.plan_ring = round_robin
    device_group.LEAST_DEADLINE_S = LEAST_DEADLINE_S
    run_all(arguments.models, arguments.seeds, arguments.tokens, arguments.logs)


if __name__ == "__main__":
    sys.exit(main())
