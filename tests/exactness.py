"""Compares a streamed run of a model with llama.cpp all resident, logit by logit. Run as a child process: a read of
weights that are not resident ends the process.

    python exactness.py MODEL.gguf [--decode 50] [--prefill 300] [--micro-batch 64] [--kv-type f16] [--by-expert]
        [--chunk-kib 2048] [--readers 2]

The first run has the fewest frames that can work, the last has all in memory. Prints one JSON line: for each budget
tried, the streamed bytes per pass and how many rows of logits differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB, MIB
from edge_run.devices.host import memory
from edge_run.partition.plan import ResidencyPlan
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.planning import memory_plan
from edge_run.runtime.planning.expert_plan import MoePlan
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.streaming import assemble


def run(engine: Engine, tokens: list[int], prefill: int) -> list[np.ndarray]:
    """Return the logits of each pass: the prompt, every row of its last pass, then token by token."""
    width = engine.shape.micro_batch_tokens
    rows = []
    for start in range(0, prefill, width):
        part = tokens[start : min(start + width, prefill)]
        batch = [BatchToken(t, start + i, 0, start + width >= prefill) for i, t in enumerate(part)]
        rows.append(engine.decoder.decode(batch).copy())
    for i in range(prefill, len(tokens)):
        rows.append(engine.decoder.decode([BatchToken(tokens[i], i, 0, True)]).copy())
    return rows


READERS = 2  # enough to end out of order; where chunks are as large as usual, there are as many as usual
CHUNK_BYTES = 64 * KIB  # small ones, for small models: two and a half to the smallest matrix, with its neighbours
LEAST_STEP_BYTES = CHUNK_BYTES // 2  # between a budget that is refused and one that holds everything


def open_at(
    path: Path,
    share: float,
    options: dict[str, object],
    by_expert: bool = False,
    chunk_bytes: int = 0,
    in_order_too: bool = False,
    smallest_bytes: int = 0,
) -> Engine:
    """Open under the smallest budget that works plus `share` of the model; below a share of 1, so that it streams.

    The smallest budget is the one that a refusal names. What the process holds besides weights changes a little from
    engine to engine, as the allocator keeps memory: a budget may turn out to hold everything, to be refused again, or,
    `by_expert`, to have no room for experts one by one: then it is changed in steps, larger when several in one
    direction were too few, and half as large in the other direction when that was too much. What the process held
    before, as for making the model, is not in its peak. `in_order_too`: beside the experts, some of what every token
    reads streams as well. `smallest_bytes`: the smallest budget, where it is known, which saves the refusal.
    """
    count_peak_from_here()
    extra, step, n_same, too_large = int(share * path.stat().st_size), 0, 0, 0
    budget = smallest_bytes + extra if smallest_bytes else 40 * MIB
    for _ in range(40):
        try:
            chosen = {"readers": READERS, **options, "chunk_bytes": chunk_bytes or CHUNK_BYTES}
            engine = Engine.open(path, ModelConfig(memory=budget, backend="edge-run", **chosen))
        except BudgetError as error:
            is_between = too_large - budget > 2 * LEAST_STEP_BYTES
            budget, step = ((budget + too_large) // 2, step // 2) if is_between else (error.minimum_bytes + extra, step)
            continue
        plan = engine.plan
        is_too_large = plan.mode != "streamed" or (in_order_too and plan.window_bytes == 0)
        is_too_small = not is_too_large and by_expert and plan.expert_bytes == 0
        if share >= 1 or not (is_too_large or is_too_small):
            return engine
        too_large = budget if is_too_large else too_large
        direction = 1 if is_too_small else -1
        n_same = n_same + 1 if step * direction > 0 else 0
        size = abs(step) * (2 if n_same > 1 else 1) if n_same else max(CHUNK_BYTES, abs(step) // 2)
        step = direction * (size if step else MIB // 2)
        engine.close()
        least = plan.minimum_bytes if plan.mode == "resident" else budget  # with less, some of it streams
        budget, extra = max(MIB, min(budget, least) + step), 0
    raise NothingStreams(f"no streamed run at {share} of the model above the smallest budget")


class NothingStreams(AssertionError):
    """A model that is smaller than what a run that streams needs besides: it fits every budget that works."""


@contextmanager
def places(choose: Callable[[Sequence[Sequence[int]], int], int]) -> Iterator[None]:
    """Let plans in this block have room for as many chunks as `choose` says, whatever the budget.

    choose: is given the chunks of each segment, and the fewest that work.
    """
    real = memory_plan.plan_residency

    def plan(
        segments: Sequence[Sequence[int]], fixed: frozenset[int], chunk_bytes: int, available: int, *others: Any
    ) -> ResidencyPlan:
        fewest = real(segments, fixed, chunk_bytes, available, *others).minimum_chunks
        return real(segments, fixed, chunk_bytes, choose(segments, fewest) * chunk_bytes, *others)

    memory_plan.plan_residency = plan
    try:
        yield
    finally:
        memory_plan.plan_residency = real


@contextmanager
def fewest_frames(share: float) -> Iterator[None]:
    """Let plans in this block give out no more frames than have to be, whatever the budget.

    Those of mixtures of experts streamed by expert at a share of 0.25, others at 0.
    """
    real = assemble.plan_moe

    def plan_moe(terms: Terms, *arguments: Any) -> MoePlan | None:
        planned = real(terms, *arguments)
        return planned and replace(planned, n_frames=planned.n_least, n_lent=0)

    with places(lambda segments, fewest: fewest) if share == 0 else nullcontext():
        if share == 0.25:
            assemble.plan_moe = plan_moe
        try:
            yield
        finally:
            assemble.plan_moe = real


def count_peak_from_here() -> None:
    """Forget what this process held at most so far."""
    Path("/proc/self/clear_refs").write_text("5")
    memory._Peak.earlier_bytes = 0


def main() -> None:
    """Compare, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefill", type=int, default=300)
    parser.add_argument("--decode", type=int, default=50)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--flash-attention", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--expert-policy", default="default")
    parser.add_argument("--expert-prefetch", default="auto")
    parser.add_argument("--by-expert", action="store_true", help="all but the first run are to stream by expert")
    parser.add_argument("--chunk-kib", type=int, default=0)
    parser.add_argument("--readers", type=int, default=READERS)
    arguments = parser.parse_args()
    options = {
        "context_tokens": 512,
        "micro_batch_tokens": arguments.micro_batch,
        "kv_type": arguments.kv_type,
        "flash_attention": arguments.flash_attention,
        "threads": arguments.threads,
        "readers": arguments.readers,
        "expert_policy": arguments.expert_policy,
        "expert_prefetch": arguments.expert_prefetch,
        "outputs_per_pass": arguments.micro_batch,
        "check_file": False,
    }
    with_plain = Engine.open(arguments.model, ModelConfig(backend="llama.cpp", **options))
    vocabulary = with_plain.model.vocabulary
    tokens = np.random.default_rng(0).integers(1, vocabulary, arguments.prefill + arguments.decode).tolist()
    wanted = run(with_plain, tokens, arguments.prefill)
    with_plain.close()
    count_peak_from_here()  # llama.cpp's was the whole model
    results, smallest_bytes = list[dict[str, Any]](), 0
    for share in (0.0, 0.25, 0.6, 8.0):
        engine = None
        with fewest_frames(share), suppress(NothingStreams):
            by_expert = arguments.by_expert and share > 0
            engine = open_at(
                arguments.model, share, options, by_expert, arguments.chunk_kib * KIB, smallest_bytes=smallest_bytes
            )
        if engine is None:
            continue
        is_known = not arguments.by_expert or engine.plan.expert_bytes > 0
        smallest_bytes = engine.plan.minimum_bytes if is_known else 0  # else it is that of a run in order
        found = run(engine, tokens, arguments.prefill)
        results.append(
            {
                "budget_bytes": engine.budget_bytes,
                "mode": engine.plan.mode,
                "rows_bytes": sum(i.size_bytes for i in engine.plan.items if i.what == "rows"),
                "minimum_bytes": engine.plan.minimum_bytes,
                "expert_bytes": engine.plan.expert_bytes,
                "streamed_bytes": engine.plan.streamed_bytes_per_pass,
                "different_rows": sum(not np.array_equal(a, b) for a, b in zip(wanted, found, strict=True)),
                "peak_bytes": engine.memory_use.peak_bytes,
            }
        )
        engine.close()
    spread = float(np.ptp(np.concatenate([rows.ravel() for rows in wanted])))
    print(json.dumps({"rows": len(wanted), "spread": spread, "finite": bool(np.isfinite(spread)), "runs": results}))


if __name__ == "__main__":
    main()
