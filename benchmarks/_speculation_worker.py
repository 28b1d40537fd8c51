"""One measured run with or without speculation, in a process of its own: continues a text greedily, and prints JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _box import GSM8K, NOVELS, ROOT, SPEC_BENCH

from edge_run.base.config import ModelConfig
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.llama import _ggml as ggml

REPEATING = ("summarization", "rag")


def prompts(kind: str) -> Iterator[str]:
    """Return the prompts of a kind: `novels`, `gsm8k`, `repeating`, `random` (any text), or `docs`, which are here."""
    if kind == "docs":
        text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
        return (text[start : start + 600] for start in range(1000, len(text), 2000))
    if kind == "gsm8k":
        lines = GSM8K.read_text().splitlines()
        return (json.loads(line)["question"] + "\n" for line in lines[::61])
    if kind == "repeating":
        lines = SPEC_BENCH.read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        return (entry["turns"][0] for entry in entries[::7] if entry["category"] in REPEATING)
    text = NOVELS.read_text()
    return (text[start : start + 600] for start in range(20_000, len(text), 150_000))


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", default="novels")
    parser.add_argument("--backend", default="edge-run")
    parser.add_argument("--memory", default=None)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--repack", default="auto")
    parser.add_argument("--packed")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=120, help="the last ones; of text that repeats 600")
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    config = ModelConfig(
        memory=arguments.memory,
        context_tokens=1024,
        micro_batch_tokens=64,
        threads=2,
        backend=arguments.backend,
        draft=arguments.draft,
        speculate=arguments.speculate,
        exact=arguments.exact,
        repack=arguments.repack,
        packed=arguments.packed,
    )
    engine = Engine.open(arguments.model, config)
    session = open_session(engine)
    chance = random.Random(0)
    decode_s, decode_bytes, n_tokens, answers, gaps, speculations = 0.0, 0, 0, [], [], []
    n_prompt = 600 if arguments.text == "repeating" else arguments.prompt_tokens
    for _, prompt in zip(range(arguments.prompts), prompts(arguments.text), strict=False):
        tokens = ggml.tokenize(engine.model.vocab, prompt, True, False)[-n_prompt:]
        if arguments.text == "random":
            tokens = [chance.randrange(10, 4000) for _ in tokens]
        logits, _ = session.feed(tokens)
        answer, gap = [], []
        started, before = time.monotonic(), engine.read_totals
        for number in range(arguments.tokens + 1):
            second, best = np.partition(logits, -2)[-2:]
            gap.append(float(best - second))
            token = chance.randrange(10, 4000) if arguments.text == "random" else int(logits.argmax())
            answer.append(token)
            if number < arguments.tokens:
                logits = session.step(token)
        decode_s += time.monotonic() - started
        decode_bytes += engine.read_totals.since(before).bytes_read
        n_tokens += arguments.tokens
        answers.append(answer)
        gaps.append(gap)
        speculations.append(dataclasses.asdict(session.speculation()))
    memory = process_memory()
    result = {
        "tokens_per_s": n_tokens / decode_s,
        "repacked": engine.numerics.repacked,
        "read_repacked": engine.plan.read_repacked,
        "answers": answers,
        "gaps": gaps,
        "speculations": speculations,
        "budget_bytes": engine.plan.budget_bytes,
        "peak_bytes": memory.peak_bytes,
        "swapped_bytes": memory.swapped_bytes,
        "bytes_per_token": engine.read_totals.bytes_read / n_tokens,  # with the reading of prompts
        "decode_bytes_per_token": decode_bytes / n_tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
