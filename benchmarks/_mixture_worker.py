"""One measured run of a mixture in a process of its own: reads a text, token after token, and prints JSON.

The text is held-out English, the same in every run: what is measured does not hang on what the model would say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from _box import SHARED

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.devices.memory import process_memory
from edge_run.runtime import _ggml as ggml
from edge_run.runtime.engine import Engine

TEXT = SHARED / "data" / "text" / "novels.txt"


def read_bytes() -> int:
    """Return what this process has read from storage so far."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="edge-run")
    parser.add_argument("--memory", default="1024GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=40)
    parser.add_argument("--skip", type=int, default=200_000, help="characters of the text before the prompt")
    arguments = parser.parse_args()
    config = ModelConfig(
        memory=None if arguments.backend == "llama.cpp" else arguments.memory,
        context_tokens=512,
        threads=arguments.threads,
        micro_batch_tokens=64,
        backend=arguments.backend,
    )
    engine = Engine(arguments.model, config)
    text = TEXT.read_text()[arguments.skip : arguments.skip + 20_000]
    tokens = ggml.tokenize(engine.model.vocab, text, False, False)[: arguments.prompt + arguments.decode]
    started = time.monotonic()
    prompt = tokens[: arguments.prompt]
    engine.decoder.decode([BatchToken(t, i, 0, i == len(prompt) - 1) for i, t in enumerate(prompt)])
    first_token_s = time.monotonic() - started
    before, totals, waited, times, chosen = read_bytes(), engine.read_totals, engine.wait_s, [], []
    for position in range(arguments.prompt, len(tokens)):
        started = time.monotonic()
        logits = engine.decoder.decode([BatchToken(tokens[position], position, 0, True)])
        times.append(time.monotonic() - started)
        chosen.append(int(logits[0].argmax()))
    reading = engine.read_totals.since(totals)
    print(
        json.dumps(
            {
                "mode": engine.plan.mode,
                "expert_bytes": engine.plan.expert_bytes,
                "first_token_s": first_token_s,
                "token_s": statistics.mean(times),
                "median_token_s": statistics.median(times),
                "bytes_per_token": (read_bytes() - before) / len(times),
                "wait_s_per_token": (engine.wait_s - waited) / len(times),
                "reader_cpu_s_per_gb": reading.cpu_s / max(1, reading.bytes_read) * 1e9,
                "peak_bytes": process_memory().peak_bytes,
                "swapped_bytes": process_memory().swapped_bytes,
                "chosen": chosen,
            }
        )
    )


if __name__ == "__main__":
    main()
