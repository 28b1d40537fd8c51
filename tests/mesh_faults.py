"""Random faults under an answer, on a mesh of real processes: the answer must be that of one device, and come.

    python mesh_faults.py MODEL.gguf --seed 7 [--tokens 60]

Prints one JSON line: what was done when, whether the tokens were right, and how long the longest token took.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.runtime import mesh_spread
from edge_run.runtime.engine import Engine
from edge_run.runtime.mesh_engine import MeshEngine
from edge_run.runtime.session import Session
from mesh_processes import MeshOfProcesses, mesh_of, round_robin

OPTIONS = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
FAULTS = ("kill", "freeze", "freeze and thaw", "restart", "broker down", "broker restart")
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


def strike(mesh: MeshOfProcesses, fault: str, victim: str) -> None:
    """Do one fault."""
    worker = mesh.workers[victim]
    if fault == "kill":
        worker.kill()
    elif fault == "freeze":
        worker.freeze()
    elif fault == "freeze and thaw":
        worker.freeze()
        threading.Timer(1.0, worker.thaw).start()
    elif fault == "restart":
        worker.kill()
        mesh.spawn(victim)
    elif fault == "broker down":
        mesh.broker.stop()
    else:
        mesh.broker.stop()
        mesh.broker.start()


def schedule(seed: int, tokens: int, workers: str) -> list[tuple[int, str, str]]:
    """Return (token, fault, worker) of one to three faults."""
    draw = random.Random(seed)
    alive, planned = list(workers), []
    for token in sorted(draw.sample(range(1, tokens - 2), draw.randint(1, 3))):
        fault = draw.choice(FAULTS)
        victim = draw.choice(alive)
        if fault in ("kill", "freeze", "restart", "freeze and thaw"):
            if len(alive) == 1:
                continue
            alive.remove(victim)
        planned.append((token, fault, victim))
    return planned


def run(path: Path, seed: int, tokens: int) -> dict[str, Any]:
    """Run one schedule."""
    mesh_spread.plan_ring = round_robin
    alone = Engine(path, ModelConfig(memory="4GiB", **OPTIONS))
    wanted, _ = greedy(alone, tokens)
    alone.close()
    planned = schedule(seed, tokens, "bcd")
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder, mesh_of(Path(folder), path, list("bcd")) as mesh:
        here = mesh.join()
        mesh.wait_for(here, 3)
        config = ModelConfig(memory="4GiB", **OPTIONS)
        engine = MeshEngine(path, config, here, say=said.append, chunk_bytes=16384)

        def at(i: int) -> None:
            time.sleep(0.02)
            for token, fault, victim in planned:
                if token == i:
                    strike(mesh, fault, victim)

        started = time.monotonic()
        try:
            found, longest = greedy(engine, tokens, at)
            use = engine.mesh_use
        finally:
            engine.close()
        assert use is not None
        return {
            "seed": seed,
            "faults": "; ".join(f"{token}: {fault} {victim}" for token, fault, victim in planned),
            "identical": found == wanted,
            "recoveries": use.recoveries,
            "nodes": len(use.nodes),
            "longest_token_s": round(longest, 3),
            "wall_s": round(time.monotonic() - started, 3),
        }


def main() -> None:
    """Run one schedule, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=60)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.model, arguments.seed, arguments.tokens)))


if __name__ == "__main__":
    sys.exit(main())
