"""One run of edge-run or of llama.cpp's mmap in a process of its own, for `peers.py`, as its peers run. Prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from _usage import read_bytes

from edge_run.base.config import ModelConfig
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="edge-run")
    parser.add_argument("--memory")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=4)
    arguments = parser.parse_args()
    config = ModelConfig(memory=arguments.memory, backend=arguments.backend, threads=2, context_tokens=512)
    engine = Engine.open(arguments.model, config)
    session, started = Session(engine.front), time.monotonic()
    logits, _ = session.feed(arguments.prompt)
    first_s, first_bytes, tokens = time.monotonic(), read_bytes(), [int(logits.argmax())]
    while len(tokens) < arguments.tokens:
        tokens.append(int(session.step(tokens[-1]).argmax()))
    n_later = arguments.tokens - 1
    figures = {
        "load_s": engine.load_s,
        "first_token_s": first_s - started,
        "token_s": (time.monotonic() - first_s) / n_later,
        "bytes_per_token": (read_bytes() - first_bytes) / n_later,
        "tokens": tokens,
    }
    engine.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
