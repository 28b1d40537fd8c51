"""A chat in one process, for `lending.py`: what is held and read while the context fills. Prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.base.units import parse_size
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine


def main() -> None:
    """Open, read a prompt, make tokens; `settled` is what the last of them took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    started = time.monotonic()
    config = ModelConfig(memory=parse_size(arguments.memory), context_tokens=arguments.context, backend="edge-run")
    engine = Engine.open(arguments.model, config)
    opened_s, plan, decoder = time.monotonic() - started, engine.plan, engine.decoder
    tokens = np.random.default_rng(0).integers(5, engine.model.vocabulary - 5, arguments.prompt + arguments.tokens)
    batch = [BatchToken(int(t), i, 0, i + 1 == arguments.prompt) for i, t in enumerate(tokens[: arguments.prompt])]
    started = time.monotonic()
    decoder.decode(batch)
    prompt_s, read, times_s = time.monotonic() - started, [], []
    for i in range(arguments.prompt, len(tokens)):
        before, started = engine.read_totals.bytes_read, time.monotonic()
        decoder.decode([BatchToken(int(tokens[i]), i, 0, True)])
        read.append(engine.read_totals.bytes_read - before)
        times_s.append(time.monotonic() - started)
    settled = read[len(read) // 2 :]
    memory = process_memory()
    print(
        json.dumps(
            {
                "budget_bytes": plan.budget_bytes,
                "micro_batch_tokens": engine.shape.micro_batch_tokens,
                "context_tokens": plan.context_tokens,
                "mode": "by expert" if plan.expert_bytes else plan.mode,
                "held_bytes": plan.pinned_bytes + plan.expert_bytes + plan.lent_bytes,
                "held_at_the_end_bytes": plan.by_context[-1].weights_bytes if plan.by_context else plan.pinned_bytes,
                "planned_bytes_per_token": plan.streamed_bytes_per_pass,
                "bytes_per_token": sum(settled) / max(1, len(settled)),
                "model_bytes": plan.model_bytes,
                "peak_bytes": memory.peak_bytes,
                "swapped_bytes": memory.swapped_bytes,
                "opened_s": opened_s,
                "prompt_s": prompt_s,
                "token_s": float(np.median(times_s)) if times_s else 0.0,
                "worst_token_s": max(times_s[1:], default=0.0),
            }
        )
    )
    engine.close()


if __name__ == "__main__":
    main()
