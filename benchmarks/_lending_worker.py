"""A chat in one process, for `lending.py`: what is held and read while the context fills. Prints JSON."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.base.units import parse_size
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine


def main() -> None:
    """Open, place tokens, read a prompt, make tokens; what is settled is what the last half of them took.

    Tokens that are placed take their cells, and nothing is computed for them: the text is as long as with them. Where
    the context has no room for all, prompt and answer are shorter in proportion.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--placed", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    started = time.monotonic()
    config = ModelConfig(
        memory=parse_size(arguments.memory),
        context_tokens=arguments.context,
        backend="edge-run",
        threads=arguments.threads,
    )
    engine = Engine.open(arguments.model, config)
    opened_s, plan, decoder = time.monotonic() - started, engine.plan, engine.decoder
    share = min(1.0, plan.context_tokens / (arguments.placed + arguments.prompt + arguments.tokens))
    first, n_tokens = arguments.placed + int(arguments.prompt * share), int(arguments.tokens * share)
    tokens = np.random.default_rng(0).integers(5, engine.model.vocabulary - 5, first + n_tokens).tolist()
    width = engine.shape.micro_batch_tokens
    for start in range(0, arguments.placed, width):
        decoder.place(tokens[start : min(start + width, arguments.placed)], start, lambda node: None)
    started = time.monotonic()
    decoder.decode([BatchToken(tokens[i], i, 0, i + 1 == first) for i in range(arguments.placed, first)])
    prompt_s, read, times_s, cpu_s = time.monotonic() - started, [], [], []
    for i in range(first, len(tokens)):
        before, started, started_cpu = engine.read_totals.bytes_read, time.monotonic(), time.process_time()
        decoder.decode([BatchToken(tokens[i], i, 0, True)])
        read.append(engine.read_totals.bytes_read - before)
        times_s.append(time.monotonic() - started)
        cpu_s.append(time.process_time() - started_cpu)
    settled, settled_cpu = read[len(read) // 2 :], cpu_s[len(cpu_s) // 2 :]
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
                "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
                "opened_s": opened_s,
                "prompt_s": prompt_s,
                "cpu_s_per_token": sum(settled_cpu) / max(1, len(settled_cpu)),
                "token_s": float(np.median(times_s)) if times_s else 0.0,
                "worst_token_s": max(times_s[1:], default=0.0),
            }
        )
    )
    engine.close()


if __name__ == "__main__":
    main()
