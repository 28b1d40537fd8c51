"""One run for `load_repacked.py` in a process of its own: opens a model that fits, awaits its weights, prints JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--repack", default="on")
    parser.add_argument("--memory")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    config = ModelConfig(
        memory=arguments.memory,
        context_tokens=512,
        micro_batch_tokens=64,
        threads=arguments.threads,
        repack=arguments.repack,
        page_cache="off",
    )
    engine = Engine.open(arguments.model, config)
    logits = engine.decoder.decode([BatchToken(5, 0, 0, True)])
    reads = engine.read_totals
    figures = {
        "mode": engine.plan.mode,
        "repacked": engine.numerics.repacked,
        "bytes_read": reads.bytes_read,
        "ready_s": reads.busy_s,
        "reader_cpu_s": reads.cpu_s,
        "budget_bytes": engine.plan.budget_bytes,
        "needed_bytes": sum(item.size_bytes for item in engine.plan.items),
        "peak_bytes": process_memory().peak_bytes,
        "token": int(logits[-1].argmax()),
    }
    engine.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
