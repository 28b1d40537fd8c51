"""Answers in shared passes, in one process, for `many.py`. Prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from edge_run import Generation, Model
from edge_run.base.units import parse_size
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.forecasting.abreast import ANSWER_TOKENS

MOST_CHOSEN = 64  # for which there is context


def main() -> None:
    """Open a model for so many answers at once, make them, and say how fast."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=16, help="0: as many as the planner chooses")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kv-type", default="f16")
    arguments = parser.parse_args()
    cells = arguments.prompt + arguments.tokens + 16
    context = arguments.parallel * cells if arguments.parallel else MOST_CHOSEN * max(cells, ANSWER_TOKENS)
    with Model(
        arguments.model,
        memory=parse_size(arguments.memory),
        sequences=arguments.parallel,
        context_tokens=context,
        kv_type=arguments.kv_type,
    ) as model:
        parallel = model.most_parallel
        n_requests = max(arguments.requests, parallel)
        text = model.tokenize(arguments.text.read_text("utf-8", "replace")[:1_000_000], add_special=False)
        starts = np.linspace(0, len(text) - arguments.prompt - 1, n_requests, dtype=int)
        prompts = [text[start : start + arguments.prompt] for start in starts]
        started = time.monotonic()
        moments: dict[int, list[float]] = {}
        results: dict[int, Generation] = {}
        for number, piece in model.generate_many(prompts, max_tokens=arguments.tokens, temperature=0):
            if isinstance(piece, Exception):
                raise piece
            if piece.token_ids:
                moments.setdefault(number, []).append(time.monotonic() - started)
            if piece.generation:
                results[number] = piece.generation
        wall_s = time.monotonic() - started
        gaps = np.concatenate([np.diff(times) for times in moments.values()])
        # From the moment at which all that run at once have a first token until the first of them has its last one.
        first = sorted(times[0] for times in moments.values())[parallel - 1]
        last = min(times[-1] for times in moments.values())
        steady = sum(first < moment <= last for times in moments.values() for moment in times)
        n_tokens = sum(one.completion_tokens for one in results.values())
        print(
            json.dumps(
                {
                    "mode": model.plan.mode,
                    "abreast": parallel,
                    "micro_batch_tokens": model.plan.micro_batch_tokens,
                    "tokens": n_tokens,
                    "wall_s": wall_s,
                    "tokens_per_s": n_tokens / wall_s,
                    "steady_tokens_per_s": steady / (last - first) if last > first else 0.0,
                    "gap_median_s": float(np.median(gaps)),
                    "gap_p99_s": float(np.quantile(gaps, 0.99)),
                    "bytes_read": sum(one.io.bytes_read for one in results.values()),
                    "peak_bytes": process_memory().peak_bytes,
                    "budget_bytes": model.plan.budget_bytes,
                }
            )
        )


if __name__ == "__main__":
    main()
