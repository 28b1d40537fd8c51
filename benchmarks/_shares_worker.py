"""One run for `shares.py` in a process of its own: what the thread that makes a text computes with; prints JSON.

CPU seconds of that thread, by the clock of the thread, around the calls in which it does what is asked about. Those
calls hold each other: a pass holds llama.cpp's `llama_decode`, which holds the callback.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edge_run import Model
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.row_products import RowProducts

PROMPT = "The history of the lighthouse on the cape, as its last keeper told it to his children:"
COPIES = 50


class Spent:
    """CPU seconds of this thread, by what they went into, and how often. is_on: whether they count now."""

    def __init__(self) -> None:
        self.cpu_s: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.is_on = False

    def around(self, owner: Any, name: str, what: str) -> None:
        """Count each call of a method."""
        real: Callable[..., Any] = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            if not self.is_on:
                return real(*arguments, **options)
            started = time.thread_time()
            try:
                return real(*arguments, **options)
            finally:
                self.cpu_s[what] += time.thread_time() - started
                self.calls[what] += 1

        setattr(owner, name, counted)


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--answers", type=int, default=1, help="that share passes")
    arguments = parser.parse_args()
    spent = Spent()
    spent.around(L, "llama_decode", "llama.cpp")
    spent.around(Driver, "callback", "callback")
    spent.around(RowProducts, "_compute", "products")  # llama.cpp's, of a few rows each, inside the callback
    spent.around(LocalDecoder, "decode", "passes")
    spent.around(Sampler, "choose", "sampling")
    spent.around(Sampler, "accept", "sampling")
    n_answers = arguments.answers
    options: dict[str, Any] = {"context_tokens": 1024 * n_answers, "threads": arguments.threads, "sequences": n_answers}
    with Model(arguments.model, memory=arguments.memory, speculate="off", **options) as model:
        main_s = wall_s = 0.0
        for seed in range(arguments.tokens):
            pieces = begun(model, n_answers, arguments.temperature, seed)
            spent.is_on = True
            started_s, started_wall_s = time.thread_time(), time.monotonic()
            for _ in pieces:
                if n_answers > 1 and spent.calls["passes"] >= arguments.tokens:
                    break
            main_s += time.thread_time() - started_s
            wall_s += time.monotonic() - started_wall_s
            spent.is_on = False
            if spent.calls["passes"] >= arguments.tokens:
                break
        n_passes = spent.calls["passes"]
        row = np.zeros(model.plan.context_tokens and len_of_row(model), np.float32)
        target, started_s = np.empty_like(row), time.thread_time()
        for _ in range(COPIES):
            target[:] = row
        copy_s = (time.thread_time() - started_s) / COPIES
        callback_s = spent.cpu_s["callback"] - spent.cpu_s["products"]
        figures = {
            "mode": model.plan.mode,
            "vocabulary": len(row),
            "answers": n_answers,
            "passes": n_passes,
            "pass_s": wall_s / n_passes,
            "main_s": main_s / n_passes,
            "llama_s": (spent.cpu_s["llama.cpp"] - callback_s) / n_passes,
            "callback_s": callback_s / n_passes,
            "callbacks": spent.calls["callback"] / n_passes,
            "sampling_s": spent.cpu_s["sampling"] / n_passes,
            "copy_s": n_answers * copy_s,
            "budget_bytes": model.plan.budget_bytes,
            "streamed_bytes_per_pass": model.plan.streamed_bytes_per_pass,
        }
    figures["python_s"] = figures["main_s"] - figures["llama_s"] - figures["sampling_s"]
    print(json.dumps(figures))


def begun(model: Model, n_answers: int, temperature: float, seed: int) -> Iterator[object]:
    """Return what comes of answers that share passes, after the first token of each."""
    options: dict[str, Any] = {"max_tokens": 64 if n_answers == 1 else 900, "temperature": temperature, "seed": seed}
    if n_answers == 1:
        stream = model.generate(PROMPT, **options)
        next(stream)
        return stream
    many = model.generate_many([PROMPT] * n_answers, ignore_eos=True, **options)
    waiting = set(range(n_answers))
    while waiting:
        number, piece = next(many)
        assert not isinstance(piece, Exception), piece
        waiting -= {number} if piece.token_ids else set()
    return many


def len_of_row(model: Model) -> int:
    """Return the length of a row of logits."""
    return int(model._engine.model.vocabulary)


if __name__ == "__main__":
    main()
