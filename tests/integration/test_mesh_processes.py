"""A mesh of real processes, over a real mosquitto: the program as a user starts it, and faults under an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mesh_faults
import mesh_replan
import namespaces
from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled
from edge_run.base.units import MIB
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import coordinator as mesh_coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from in_child import in_child, run_script
from mesh_processes import mesh_of
from mesh_runs import greedy
from mesh_schedules import SERVER, draw_schedule
from mosquitto import PROGRAM, mosquitto
from program import MESH, Program, begin, ending, fork_from_here, run_program
from tiny_models import make_model
from waiting import until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="mosquitto is not installed")

SEEDS, TOKENS = [(24, 68, 118), (9, 16, 44), (23, 103)], 60


@pytest.mark.parametrize(
    ("has_network", "more"),
    [(True, {"freeze and thaw", "broker down", "unplug", "cut one way", "slow"}), (False, {"kill"})],
)
def test_the_seeds_stand_for_these_faults(has_network: bool, more: set[str]) -> None:
    schedules = [draw_schedule(seed, TOKENS, has_network) for seeds in SEEDS for seed in seeds]
    assert {f.what for one in schedules for f in one.faults} == {"restart", "freeze", "broker restart", *more}
    assert {one.end.what for one in schedules if one.end} == {"kill", "freeze"}
    assert {one.serves for one in schedules if one.takes_broker} == {"", SERVER}


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_faults_change_no_token(seeds: Sequence[int], folder: Path) -> None:
    """Restarts, freezes, a broker that is away; cuts; coordinators frozen, and killed, with the broker's device too."""
    paths = [str(make_model(name, folder)) for name in ("granite", "qwen3moe", "mamba", "llama")]
    done = run_script(mesh_faults.__file__, *paths, "--tokens", str(TOKENS), "--seeds", *map(str, seeds))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    found = [row for row in rows if "outcome" in row]
    assert len(found) == len(seeds)
    for row in found:
        assert row["outcome"] == "answered", row
        assert row["identical"], row
        assert row["longest_token_s"] < 25, row  # less than the least deadline of a pass
        if "free_s" in row:
            assert row["free_s"] < 40, row  # an orphan would be let go after 60 s
            assert row["lead_s"] < 25, row  # who only waits until a leader is silent for too long waits 32 s
            assert row["are_all_used"], row


def environment_of(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}


def edge_run(home: Path, *arguments: str) -> dict[str, Any]:
    done = run_program(*arguments, environment=environment_of(home))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def kill_in_mid_answer(home: Path, model: str, worker: int) -> None:
    """Kill -9 a coordinator that answers; its worker must be free again in seconds."""
    idle_bytes = resident_bytes(worker)
    asked = ["-p", "Once upon a time", "-n", "220", "--temp", "0", "-c", "256", "-t", "1", "--memory", "230MiB"]
    for _ in range(5):  # it may not hear of the worker in time, and answer alone
        coordinator = begin(
            Program([model, *asked, "--mesh"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of(home),
        )
        assert coordinator.stdout is not None
        assert coordinator.stderr is not None
        if said := next((line for line in coordinator.stderr if b"computes" in line), b""):  # others may come before it
            break
        coordinator.kill()
        coordinator.communicate()
    assert coordinator.stdout.read(40), "it answers"
    assert coordinator.poll() is None
    held_bytes = resident_bytes(worker)
    assert held_bytes > idle_bytes + 30_000_000, f"the worker holds its layers: {said!r}"
    coordinator.kill()
    coordinator.communicate()
    until(lambda: resident_bytes(worker) <= held_bytes - 30_000_000, 45)  # an orphan would be let go after 60 s


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, str, str]]:
    """Yield the addresses of this machine and another one, and the network namespace that is the other one.

    Where there can be none, it is this machine too.
    """
    if namespaces.why_not():
        yield "127.0.0.1", "127.0.0.1", ""
        return
    with namespaces.network(["there"]) as net:
        yield net.here, net.addresses["there"], net.space("there")


def test_the_program_spreads_a_model_and_says_what_it_did(grown: Path, tmp_path: Path) -> None:
    """120 MB of weights; each device has room for a part of them, so that the plan needs both; one fetches its part."""
    files = ["--models", str(tmp_path), "--fetch", "1GiB"]
    homes = [tmp_path / name for name in ("here", "there")]
    for home in homes:
        home.mkdir()
    with contextlib.ExitStack() as stack:
        here, there, other = stack.enter_context(two_machines())
        broker = stack.enter_context(mosquitto(tmp_path, address=here))
        made = edge_run(homes[0], "mesh", "init", "--broker", broker.url, "--listen", here, "--json", "--show-line")
        asked = [str(grown), "-p", "Once upon a time", "-n", "12", "--temp", "0", "-c", "256", "-t", "1", "--json"]
        wanted = edge_run(homes[0], *asked)
        words = ["mesh", "join", made["join_line"], "--listen", there, *files, "--memory", "400MiB"]
        worker = begin(
            Program(words, netns=other),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment_of(homes[1]),
        )
        stack.enter_context(ending(worker))
        stack.callback(worker.wait, 60)
        stack.callback(worker.send_signal, signal.SIGTERM)
        for _ in range(10):  # runs let the worker in; it may not be there yet
            found = edge_run(homes[0], *asked, "--mesh", "--memory", "230MiB")
            if found["mesh"]:
                break
        assert found["token_ids"] == wanted["token_ids"]
        assert wanted["mesh"] is None
        assert len(found["mesh"]["nodes"]) == 2, found["mesh"]
        assert sorted(b for node in found["mesh"]["nodes"] for b in node["blocks"]) == list(range(12))
        assert found["memory"]["peak_bytes"] <= found["memory"]["budget_bytes"]
        assert found["mesh"]["sent_bytes"] > 0
        fetched = sum(file.stat().st_blocks * 512 for file in homes[1].rglob("fetched/*/*.gguf"))
        assert fetched > 10 * MIB
        kill_in_mid_answer(homes[0], str(grown), worker.pid)
        left = found["mesh"]["nodes"][1]["node"]
        members = lambda: edge_run(homes[0], "mesh", "status", "--json")["members"]  # noqa: E731
        until(lambda: [member["node"] for member in members()] == [left])
        for _ in range(5):  # a run may not hear of the worker in time
            again = edge_run(homes[0], *asked, "--mesh", "--memory", "230MiB")
            if again["mesh"]:
                break
        assert again["token_ids"] == wanted["token_ids"]
        assert len(again["mesh"]["nodes"]) == 2
        assert again["mesh"]["recoveries"] == 0


@in_child
def test_a_stop_reaches_a_worker_in_the_middle_of_a_long_prompt(grown: Path, tmp_path: Path) -> None:
    """The worker computes all layers, of the whole prompt in one pass: it does not come to a border for seconds."""

    fork_from_here(MESH)

    def all_there(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: object) -> MeshPlan:
        here, there = (spec.node for spec in specs)
        return MeshPlan((here, *[there] * (len(works) - 2), here), 1, 0.05, {})

    mesh_coordinator.plan_ring = all_there
    prompt = [(7 * i * i + 3) % 380 + 1 for i in range(300)]
    config = ModelConfig(memory="4GiB", context_tokens=1024, threads=1, check_file=False)
    with mesh_of(tmp_path, grown, ["b"]) as mesh:
        here = mesh.join()
        mesh.wait_for(here, 1)
        engine = open_mesh_engine(grown, dataclasses.replace(config, chunk_bytes=16384), here)
        worker = mesh.workers["b"].node
        moments: dict[str, Any] = {}

        def place() -> str:
            return str(here.order(worker, {"order": "status"}, timeout_s=30)["place"])

        def stop() -> None:
            while not place().startswith("computing"):
                time.sleep(0.01)
            time.sleep(0.1)
            moments["place"], moments["stopped"] = place(), time.monotonic()
            engine.interrupt.cancel()

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(Cancelled):
            Session(engine.front).feed(prompt)
        stopper.join()
        while place() != "idle":
            time.sleep(0.01)
        idle_s = time.monotonic() - moments["stopped"]
        assert moments["place"].startswith("computing"), "else this shows nothing"
        started_s = time.monotonic()
        found = greedy(engine, 4, prompt=prompt)
        assert idle_s < (time.monotonic() - started_s) / 2
        use = engine.mesh_use
        assert use is not None
        assert use.recoveries == 0
        engine.close()
    alone = Engine.open(grown, config)
    assert greedy(alone, 4, prompt=prompt) == found
    alone.close()


def test_a_worker_that_becomes_slow_loses_its_layers_in_the_middle_of_an_answer(folder: Path) -> None:
    done = run_script(mesh_replan.__file__, str(make_model("llama", folder)))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["identical"], found
    assert found["new_plans"] >= 1, found
    assert found["from"] != found["to"], found
    assert not found["left_out"], found
