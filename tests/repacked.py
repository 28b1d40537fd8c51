"""Compares a run with repacked weights with llama.cpp's own, logit by logit. Run as a child process: kernels that find
weights other than they are end it.

    python repacked.py MODEL.gguf CACHE [--repack on] [--plain PATTERN ...] [--prefill 70] [--decode 10] [--threads 1]
        [--streamed] [--by-expert] [--chunk-kib 32]

llama.cpp repacks all that it has kernels for but what the patterns (regular expressions of names) keep as it is. The
second run has the smallest budget that keeps the model in memory. `--streamed`: the model streams instead, first
through the fewest frames that can work, then under larger budgets. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as low
import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import KIB, MIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama import _ggml as ggml
from exactness import count_peak_from_here, fewest_frames, open_at, run
from llama_tensors import silence_llama_logs

WIDTH = 64


def stock_logits(
    path: Path, plain: Sequence[str], tokens: Sequence[int], prefill: int, threads: int
) -> list[np.ndarray]:
    """Return llama.cpp's logits: of each row of the last pass of the prompt, then token by token."""
    model_params = low.llama_model_default_params()
    model_params.n_gpu_layers = 0
    overrides = ggml.kept_on_host(plain)
    if plain:
        model_params.tensor_buft_overrides = ggml.void_pointer(overrides)
    assert model_params.use_extra_bufts, "llama.cpp's default"
    model = low.llama_model_load_from_file(os.fsencode(path), model_params)
    params = low.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, WIDTH, WIDTH
    params.n_threads = params.n_threads_batch = threads
    context = low.llama_init_from_model(model, params)
    n_vocabulary = low.llama_vocab_n_tokens(low.llama_model_get_vocab(model))
    rows = []
    starts = [*range(0, prefill, WIDTH), *range(prefill, len(tokens))]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        rows.append(_decode(context, tokens[start:stop], start, n_vocabulary, all_rows=stop >= prefill))
    low.llama_free(context)
    low.llama_model_free(model)
    return rows


def _decode(context: Any, tokens: Sequence[int], position: int, n_vocabulary: int, *, all_rows: bool) -> np.ndarray:
    n = len(tokens)
    batch = low.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, 0
        batch.logits[i] = all_rows
    assert low.llama_decode(context, batch) == 0
    n_rows = n if all_rows else 0
    found = low.llama_get_logits(context) if n_rows else None
    rows = np.ctypeslib.as_array(found, (n_rows, n_vocabulary)).copy() if n_rows else np.zeros((0, n_vocabulary))
    low.llama_batch_free(batch)
    return rows


def resident(path: Path, options: dict[str, Any]) -> Iterator[Engine]:
    """Open without a budget, then under the smallest one that holds the model."""
    memory: Any = None
    for smallest in (False, True):
        count_peak_from_here()
        engine = _at_once(path, memory, options)
        while smallest and engine is None and memory < 2 * path.stat().st_size + 100 * MIB:
            memory += MIB // 2  # the process has grown since
            engine = _at_once(path, memory, options)
        assert engine is not None
        memory = engine.plan.minimum_bytes
        yield engine


def _at_once(path: Path, memory: int | None, options: dict[str, Any]) -> Engine | None:
    """Return an engine that holds all weights, None where the budget is too small for one."""
    try:
        engine = Engine.open(path, ModelConfig(memory=memory, **options))
    except BudgetError:
        return None
    if engine.plan.mode == "resident":
        return engine
    engine.close()
    return None


def streamed(path: Path, options: dict[str, Any], chunk_bytes: int, by_expert: bool) -> Iterator[Engine]:
    """Open under budgets from the smallest on, with the fewest frames at first.

    In all but the last each pass reads weights again. A budget may turn out to hold them all, some in memory that is
    lent, as the process held more when the smallest one was refused: then a smaller one is taken.
    """
    smallest_bytes = 0  # known once a run has streamed in the same way
    for share in (0.0, 0.25, 0.6):
        of_experts = by_expert and share > 0
        with fewest_frames(share):
            engine = open_at(path, share, options, of_experts, chunk_bytes, smallest_bytes=smallest_bytes)
            for _attempt in range(8 if share < 0.5 else 0):
                if engine.plan.streamed_bytes_per_pass:
                    break
                smaller = engine.budget_bytes - path.stat().st_size // 4
                engine.close()
                engine = open_at(path, 0, options, of_experts, chunk_bytes, smallest_bytes=smaller)
        smallest_bytes = engine.plan.minimum_bytes if not by_expert or engine.plan.expert_bytes else 0
        yield engine


def main() -> None:
    """Compare, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--repack", default="on")
    parser.add_argument("--plain", action="append", default=[])
    parser.add_argument("--prefill", type=int, default=70)
    parser.add_argument("--decode", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check-file", action="store_true")
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument(
        "--by-expert", action="store_true", help="all but the first streamed run are to stream by expert"
    )
    parser.add_argument("--chunk-kib", type=int, default=32)
    parser.add_argument("--packed", default="off")
    arguments = parser.parse_args()
    silence_llama_logs()
    options: dict[str, Any] = {
        "context_tokens": 512,
        "micro_batch_tokens": WIDTH,
        "outputs_per_pass": WIDTH,
        "threads": arguments.threads,
        "check_file": arguments.check_file,
        "cache_folder": arguments.cache,
    }
    chunk_bytes = arguments.chunk_kib * KIB
    path, prefill = arguments.model, arguments.prefill
    with_plain = Engine.open(path, ModelConfig(repack="off", backend="llama.cpp", **options))
    tokens = np.random.default_rng(0).integers(1, with_plain.model.vocabulary, prefill + arguments.decode).tolist()
    plain = run(with_plain, tokens, prefill)
    with_plain.close()
    wanted = stock_logits(path, arguments.plain, tokens, prefill, arguments.threads)
    runs: list[dict[str, Any]] = []
    options |= {"repack": arguments.repack, "packed": arguments.packed}
    engines = (
        streamed(path, options, chunk_bytes, arguments.by_expert)
        if arguments.streamed
        else resident(path, {**options, "backend": "edge-run", "chunk_bytes": chunk_bytes})
    )
    for engine in engines:
        found = run(engine, tokens, prefill)
        assert [rows.shape for rows in found] == [rows.shape for rows in wanted]
        runs.append(
            {
                "mode": engine.plan.mode,
                "repacked": engine.numerics.repacked,
                "planned": list(engine.plan.repacked),
                "different_rows": sum(not np.array_equal(a, b) for a, b in zip(wanted, found, strict=True)),
                "as_plain": all(np.array_equal(a, b) for a, b in zip(plain, found, strict=True)),
                "streamed_bytes": engine.plan.streamed_bytes_per_pass,
                "expert_bytes": engine.plan.expert_bytes,
                "planned_bytes": sum(item.size_bytes for item in engine.plan.items if item.what == "repacking"),
                "budget_bytes": engine.budget_bytes,
                "peak_bytes": engine.memory_use.peak_bytes,
                "read_repacked": engine.plan.read_repacked,
                "unpacked": any(item.what == "packed" for item in engine.plan.items),
            }
        )
        engine.close()
    print(json.dumps({"runs": runs, "rows": len(wanted)}))


if __name__ == "__main__":
    main()
