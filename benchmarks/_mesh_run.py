"""The coordinator of a measured run over a mesh, in a process of its own: prints one JSON line.

    _mesh_run.py FOLDER MODEL --memory SIZE --workers 2 [--tokens 8] [--prompt 16] [--cache DIR] [--probe]

With --tokens 0 it makes as many as it is asked for: numbers on standard input, a line each, answered by the seconds of
each token, after a first line that says that it is ready. With --alone the model runs without a mesh, on an ordinary
engine. With --probe the device is measured, and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from _mesh_joining import joined

from edge_run import probe
from edge_run.base.config import ModelConfig
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh.engine import MeshOptions, open_mesh_engine


def asked(n_tokens: int, seconds: list[float]) -> Iterator[int]:
    """Yield how many tokens to make next; say what was added to `seconds` by each that was asked for."""
    if n_tokens:
        yield n_tokens
        return
    print("[]", flush=True)
    for line in sys.stdin:
        known = len(seconds)
        yield int(line)
        print(json.dumps(seconds[known:]), flush=True)


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="64GiB")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--probe", action="store_true")
    arguments = parser.parse_args()
    if arguments.probe:
        probe(model=arguments.model, config=ModelConfig(cache_folder=arguments.cache, threads=arguments.threads))
        print("{}")
        return
    config = ModelConfig(
        memory=arguments.memory,
        context_tokens=arguments.context,
        micro_batch_tokens=arguments.micro_batch,
        threads=arguments.threads,
        cache_folder=arguments.cache,
    )
    said: list[str] = []
    mesh = None
    if arguments.alone:
        engine = Engine.open(arguments.model, config)
    else:
        mesh = joined(arguments.folder, arguments.workers)
        engine = open_mesh_engine(arguments.model, config, mesh, MeshOptions(say=said.append))
    session = Session(engine.front)
    started = time.monotonic()
    logits, _ = session.feed([(7 * i * i + 3) % 200 + 1 for i in range(arguments.prompt)])
    prompt_s = time.monotonic() - started
    tokens: list[int] = []
    seconds: list[float] = []
    for count in asked(arguments.tokens, seconds):
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            started = time.monotonic()
            logits = session.step(tokens[-1])
            seconds.append(time.monotonic() - started)
    use = engine.mesh_use
    engine_plan = engine.plan
    figures = {
        "tokens": tokens,
        "seconds": seconds,
        "prompt_s": prompt_s,
        "peak_bytes": process_memory().peak_bytes,
        "streamed_bytes": engine_plan.streamed_bytes_per_pass,
        "kv_bytes": engine_plan.kv_bytes,
        "lent_bytes": engine_plan.lent_bytes,
        "predicted_token_s": use.predicted_token_s if use else 0.0,
        "hop_s": use.hop_s if use else 0.0,
        "rounds": use.rounds if use else 0,
        "recoveries": use.recoveries if use else 0,
        "left_out": use.left_out if use else {},
        "layers": {node.name: len(node.blocks) for node in use.nodes} if use else {},
        "streamed": {node.name: node.streamed_bytes for node in use.nodes} if use else {},
        "said": said,
        "pid": os.getpid(),
    }
    print(json.dumps(figures), flush=True)
    engine.close()
    if mesh:
        mesh.close()


if __name__ == "__main__":
    main()
