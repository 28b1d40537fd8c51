"""The coordinator of many answers over a mesh, for `mesh_many.py`: prints one JSON line.

    _mesh_many_worker.py FOLDER MODEL --workers 3 --sequences 8 [--tokens 24] [--turns] [--kill PID] [--cache DIR]

Each answer is greedy and has as many tokens as any other. With `--turns` devices take turns, each with its layers of
all answers, by the plan of a pipeline otherwise; without, the product plans. With `--kill` a device is lost half way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from _mesh_joining import joined
from _usage import peak_bytes

from edge_run.base.config import ModelConfig
from edge_run.base.sampling_config import SamplingConfig
from edge_run.partition.mesh_pipeline import plan_pipeline
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hops
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Meter
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import MeshOptions, open_mesh_engine

PROMPT, ROOM = 16, 64


def cpu_seconds(others: Sequence[int]) -> float:
    """Return the seconds that this process and others have computed."""
    times = []
    for process in others:
        try:
            times.append(psutil.Process(process).cpu_times())
        except psutil.NoSuchProcess:  # it was killed
            continue
    return time.process_time() + sum(one.user + one.system for one in times)


def in_turns(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops) -> MeshPlan:
    """Return the plan of a pipeline of all devices, with one pass in flight."""
    plan = plan_pipeline(works, specs, hops, 2 * len(specs))
    assert plan is not None
    return replace(plan, most_in_flight=1)


def open_engine(arguments: argparse.Namespace, config: ModelConfig) -> Engine:
    """Open the model, over the mesh where there are workers."""
    if not arguments.workers:
        return Engine.open(arguments.model, config)
    mesh = joined(arguments.folder, arguments.workers)
    if arguments.turns:
        coordinator.plan_ring = in_turns
        coordinator.plan_pipeline = lambda *_: None
    return open_mesh_engine(arguments.model, config, mesh, MeshOptions(say=lambda text: None))


def at_work(engine: Engine, pids: Sequence[int]) -> int:
    """Return which of the processes of workers w0, w1... computes layers; 0 of none."""
    use = engine.mesh_use
    names = [node.name for node in use.nodes if node.blocks] if use else []
    return next((pid for number, pid in enumerate(pids) if f"w{number}" in names), 0)


def answer_all(engine: Engine, arguments: argparse.Namespace) -> dict[str, object]:
    """Make all answers; return what they are, and what the time took in which all of them were being made."""
    n = arguments.sequences
    batch = Batch(engine, Meter(engine), n)
    answers = []
    for sequence in range(n):
        prompt = [(7 * i * i + 3 + sequence) % 200 + 1 for i in range(PROMPT)]
        room = engine.context_tokens
        answer = Continuation(
            engine.model, prompt, arguments.tokens, SamplingConfig(temperature=0, ignore_eos=True), room
        )
        batch.submit(answer, Turn())
        answers.append(answer)
    began_s, ended_s, before, made, victim = 0.0, 0.0, 0, 0, at_work(engine, arguments.kill)
    cpu_before_s = cpu_after_s = 0.0
    while not batch.is_idle:
        failed = [event.error for event in batch.advance() if event.error]
        assert not failed, failed
        said = sum(len(answer.tokens) for answer in answers)
        if not began_s and min(len(answer.tokens) for answer in answers) >= 2:
            began_s, before, cpu_before_s = time.monotonic(), said, cpu_seconds(arguments.watch)
        if not ended_s and max(len(answer.tokens) for answer in answers) == arguments.tokens:
            ended_s, cpu_after_s, made = time.monotonic(), cpu_seconds(arguments.watch), said - before
        if victim and 2 * said >= n * arguments.tokens:
            os.kill(victim, signal.SIGKILL)
            victim = 0
    batch.close()
    assert 0 < began_s < ended_s, "at no time all answers were being made: give them more --tokens"
    return {
        "tokens": [answer.tokens for answer in answers],
        "tokens_per_s": made / (ended_s - began_s),
        "tokens_per_cpu_s": made / (cpu_after_s - cpu_before_s),
    }


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--workers", type=int, default=0, help="0: without a mesh")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="w0, w1...: the first that computes is killed")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--watch", type=int, nargs="*", default=[], help="processes that compute too")
    arguments = parser.parse_args()
    n = arguments.sequences
    config = ModelConfig(
        memory=arguments.memory,
        context_tokens=n * (PROMPT + arguments.tokens + ROOM),
        micro_batch_tokens=max(32, n),
        sequences=n,
        threads=1,
        cache_folder=arguments.cache,
    )
    engine = open_engine(arguments, config)
    in_flight = getattr(engine.front, "most_in_flight", 1)
    found = answer_all(engine, arguments)
    use = engine.mesh_use
    figures = {
        **found,
        "most_in_flight": in_flight,
        "layers": {node.name: len(node.blocks) for node in use.nodes} if use else {},
        "peak_bytes": max(map(peak_bytes, (os.getpid(), *arguments.watch))),  # of those that are still there
        "recoveries": use.recoveries if use else 0,
        "sent_bytes": use.sent_bytes if use else 0,
    }
    print(json.dumps(figures), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
