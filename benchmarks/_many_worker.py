"""Answers in shared passes, in one process, for `many.py`. Prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import until_idle

from edge_run import Generation, Model
from edge_run.base.config import REQUEST_TOKENS
from edge_run.base.protocols import BatchToken, Logits
from edge_run.base.units import parse_size
from edge_run.devices.host.memory import process_memory
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.speculation.drafting import Guesses
from edge_run.runtime.speculation.shared_drafters import SharedDrafters
from edge_run.runtime.speculation.width_control import WidthControl

MOST_CHOSEN = 64  # for which there is context
MOST_LETTERS = 100_000  # of the text: what tokens of more would take is not in the budget
BASE_S, TOKEN_S = 0.05, 0.015  # to compute a pass, and each of its tokens, as two quiet cores take with 1.5B weights
DRAFT_SHARE = 1 / 3  # of that: a pass of the draft model


def count_passes(decoder: LocalDecoder) -> list[int]:
    """Return a list to which each pass from now on adds its width."""
    passes, decode, most = list[int](), decoder.decode, decoder.capabilities.micro_batch_tokens

    def counted(batch: Sequence[BatchToken]) -> Logits:
        passes.extend(len(batch[start : start + most]) for start in range(0, len(batch), most))
        return decode(batch)

    decoder.decode = counted  # type: ignore[method-assign]
    return passes


class ModelledTime:
    """The seconds that a drive of `mbps` MB/s and two quiet cores would take, whatever else this machine does.

    They are what the width of passes is decided by.
    """

    def __init__(self, mbps: int, draft_passes: list[int]) -> None:
        self._drive, self._draft_passes, self._n_noted = mbps * 1e6, draft_passes, 0
        self.pass_s = self.draft_s = 0.0
        observe, observe_drafting, guess = WidthCosts.observe, WidthControl.observe_drafting, SharedDrafters.guess

        def noted(costs: WidthCosts, width: int, wall_s: float, wait_s: float, read_s: float, read_bytes: int) -> None:
            compute_s, read_s = BASE_S + TOKEN_S * width, read_bytes / self._drive
            wall_s = max(compute_s, read_s)
            self.pass_s += wall_s
            observe(costs, width, wall_s, wall_s - compute_s, read_s, read_bytes)

        def noted_drafting(control: WidthControl, seconds: float, *, once_s: float = 0.0) -> None:
            modelled_s = self._drafting_s()
            observe_drafting(control, modelled_s, once_s=modelled_s if once_s else 0.0)

        def guessed(drafters: SharedDrafters, *arguments: Any, **options: Any) -> Guesses:
            self._drafting_s()  # what was not noted, as the reading of prompts, is no part of it
            return guess(drafters, *arguments, **options)

        WidthCosts.observe = noted  # type: ignore[method-assign]
        SharedDrafters.guess = guessed  # type: ignore[method-assign]
        WidthControl.observe_drafting = noted_drafting  # type: ignore[method-assign]

    def _drafting_s(self) -> float:
        widths = self._draft_passes[self._n_noted :]
        self._n_noted += len(widths)
        seconds = DRAFT_SHARE * sum(BASE_S + TOKEN_S * width for width in widths)
        self.draft_s += seconds
        return seconds


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
    parser.add_argument("--context", type=int, default=0, help="tokens; 0: as many as the answers need")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--whole", action="store_true", help="no answer ends before it has --tokens tokens")
    parser.add_argument("--settled", action="store_true", help="begin when the weights are at their place")
    parser.add_argument("--drive", type=int, default=0, help="MB/s: seconds are those of a model, not measured")
    arguments = parser.parse_args()
    cells = arguments.prompt + arguments.tokens + 16
    context = arguments.context or (
        arguments.parallel * cells if arguments.parallel else MOST_CHOSEN * max(cells, REQUEST_TOKENS)
    )
    with Model(
        arguments.model,
        memory=parse_size(arguments.memory),
        sequences=arguments.parallel,
        context_tokens=context,
        kv_type=arguments.kv_type,
        exact=arguments.exact,
        draft=arguments.draft,
        speculate=arguments.speculate,
    ) as model:
        parallel = model.most_parallel
        n_requests = max(arguments.requests, parallel)
        text = model.tokenize(arguments.text.read_text("utf-8", "replace")[:MOST_LETTERS], add_special=False)
        starts = np.linspace(0, len(text) - arguments.prompt - 1, n_requests, dtype=int)
        prompts = [text[start : start + arguments.prompt] for start in starts]
        if arguments.settled:
            model.generate(prompts[0][:1], max_tokens=2).result()
            until_idle(os.getpid())
        passes = count_passes(model._engine.decoder)
        draft_passes = count_passes(model._engine.draft._decoder) if model._engine.draft else []
        modelled = ModelledTime(arguments.drive, draft_passes) if arguments.drive else None
        started = time.monotonic()
        moments: dict[int, list[float]] = {}
        results: dict[int, Generation] = {}
        for number, piece in model.generate_many(
            prompts, max_tokens=arguments.tokens, temperature=0, ignore_eos=arguments.whole
        ):
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
        guessing = model.speculation
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
                    "speculate": guessing.mode,
                    "passes": len(passes),
                    "drafted": guessing.drafted,
                    "accepted": guessing.accepted,
                    "draft_passes": len(draft_passes),
                    "modelled_s": modelled.pass_s + modelled.draft_s if modelled else 0.0,
                    "draft_s": guessing.draft_s,
                    "switched_off_share": guessing.switched_off_share,
                    "widths": {str(width): count for width, count in guessing.widths.items()},
                    "peak_bytes": process_memory().peak_bytes,
                    "budget_bytes": model.plan.budget_bytes,
                }
            )
        )


if __name__ == "__main__":
    main()
