"""Perplexity of a streamed model against that of llama.cpp's own program, `llama-perplexity`, to its last digit.

    perplexity.py MODEL.gguf [--text FILE] [--memory BYTES] [--chunks 6] [--context 512] [--micro-batch 128]

Both read the same text, cut into chunks of `--context` tokens, of which the second half counts, as `llama-perplexity`
has it; and both have the same numerics key: threads, micro-batch, keys and values of 16 bits, and in turn all weights
repacked with flash attention, and neither. `llama-perplexity` must be of the llama.cpp that edge-run has (its folder in
PATH, or `--program`); it has the model in memory, edge-run streams it under the budget, half the model where none is
given. Compared are the running perplexity after each chunk and the final one with its standard error, as texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import WIKITEXT, file_at, need, skip, write_results

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.base.units import format_size
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine

KERNELS = {"repacked": "on", "plain": "off"}  # what `--repack` and `--flash-attn` are
MOST_TEXT_BYTES_OF_A_TOKEN = 16
CHUNK = re.compile(r"\[(\d+)\](\d+\.\d+|nan|inf),")
FINAL = re.compile(r"Final estimate: PPL = (\S+) \+/- (\S+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What both programs are given."""

    model: Path
    text: Path
    memory: int
    chunks: int
    context: int
    micro_batch: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Perplexity:
    """What a program says: after each chunk, and at the end with the standard error; as it is printed."""

    running: tuple[str, ...]
    final: str
    error: str


def by_llama(program: str, work: Work, kernels: str) -> Perplexity:
    """Return what `llama-perplexity` prints."""
    flags: dict[str, object] = {
        "--model": work.model,
        "--file": work.text,
        "--chunks": work.chunks,
        "--ctx-size": work.context,
        "--batch-size": work.context,
        "--ubatch-size": work.micro_batch,
        "--threads": work.threads,
        "--flash-attn": KERNELS[kernels],
    }
    command = [program, *(str(part) for flag in flags.items() for part in flag)]
    command += ["--repack" if kernels == "repacked" else "--no-repack"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    final = FINAL.search(printed)
    if done.returncode != 0 or final is None:
        raise SystemExit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{printed[-3000:]}")
    return Perplexity(tuple(value for _, value in CHUNK.findall(printed)), final[1], final[2])


def by_edge_run(work: Work, kernels: str) -> tuple[Perplexity, dict[str, Any]]:
    """Return what streaming gives, and the run's figures."""
    config = ModelConfig(
        memory=work.memory,
        context_tokens=work.context,
        micro_batch_tokens=work.micro_batch,
        outputs_per_pass=work.micro_batch,
        threads=work.threads,
        flash_attention=KERNELS[kernels],
        repack=KERNELS[kernels],
        backend="edge-run",
    )
    engine = Engine.open(work.model, config)
    n_tokens = work.chunks * work.context
    text = work.text.read_text(encoding="utf-8").removesuffix("\n")[: n_tokens * MOST_TEXT_BYTES_OF_A_TOKEN]
    tokens = engine.model.tokenize(text, add_special=True, parse_special=False)[:n_tokens]
    running, losses = [], list[float]()
    for start in range(0, n_tokens, work.context):
        losses += losses_of(engine, tokens[start : start + work.context])
        running.append(f"{math.exp(math.fsum(losses) / len(losses)):.4f}")
        print(f"[{len(running)}]{running[-1]}", end=", ", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    figures = {
        "mode": engine.plan.mode,
        "memory_bytes": work.memory,
        "peak_bytes": process_memory().peak_bytes,
        "bytes_read": engine.read_totals.bytes_read,
        "numerics": json.dumps(dataclasses.asdict(engine.numerics)),
    }
    engine.close()
    return estimate(running, losses), figures


def losses_of(engine: Engine, chunk: Sequence[int]) -> Iterator[float]:
    """Yield -log p of each token of a chunk in the second half but its first, given those before it."""
    engine.decoder.clear()
    half, width = len(chunk) // 2, engine.shape.micro_batch_tokens
    for start in range(0, len(chunk), width):
        part = chunk[start : start + width]
        rows = engine.decoder.decode([BatchToken(t, start + i, 0, start + i >= half) for i, t in enumerate(part)])
        first = max(start, half)
        for token, logits in zip(chunk[first + 1 : start + len(part) + 1], rows, strict=False):
            best = logits.max()
            total = float(np.exp(logits - best).sum(dtype=np.float64))
            yield math.log(total) - float(logits[token] - best)


def estimate(running: Sequence[str], losses: Sequence[float]) -> Perplexity:
    """Return the perplexity with its standard error, which is that of the mean loss, times the perplexity."""
    n_losses = len(losses)
    mean = math.fsum(losses) / n_losses
    variance = math.fsum(loss * loss for loss in losses) / n_losses - mean * mean
    final = math.exp(mean)
    return Perplexity(tuple(running), f"{final:.4f}", f"{final * math.sqrt(variance / (n_losses - 1)):.5f}")


def compare(program: str, work: Work, kernels: str) -> dict[str, Any]:
    """Return the row of one choice of kernels."""
    ours, figures = by_edge_run(work, kernels)
    theirs = by_llama(program, work, kernels)
    n_same = sum(one == other for one, other in zip(ours.running, theirs.running, strict=True))
    return {
        "model": work.model.stem,
        "kernels": f"weights {kernels}, flash attention {KERNELS[kernels]}",
        "perplexity": ours.final,
        "standard_error": ours.error,
        "llama_perplexity": theirs.final,
        "llama_standard_error": theirs.error,
        "is_equal": ours == theirs,
        "chunks": work.chunks,
        "equal_chunks": n_same,
        **figures,
    }


def finding(rows: Sequence[dict[str, Any]], work: Work) -> str:
    """Return what was found, a line for each choice of kernels."""
    lines = [
        f"{work.model.stem}, {work.text.name}: the first {work.chunks} chunks of {work.context} tokens, micro-batch "
        f"{work.micro_batch}, {work.threads} threads, {format_size(work.memory)}.",
        "",
    ]
    for row in rows:
        verdict = "equal to the last digit" if row["is_equal"] else "NOT EQUAL"
        lines.append(
            f"* {row['kernels']}: {row['perplexity']} +/- {row['standard_error']} {row['mode']}, "
            f"{row['llama_perplexity']} +/- {row['llama_standard_error']} by llama-perplexity: {verdict}, and so were "
            f"{row['equal_chunks']} of {row['chunks']} running values; {format_size(row['bytes_read'])} were read, the "
            f"peak was {row['peak_bytes'] / row['memory_bytes']:.3f} of the budget."
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--text", type=file_at, default=WIKITEXT)
    parser.add_argument("--memory", type=int, help="bytes; half the model where none are given")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", choices=KERNELS, help="one of the two, and its name is in that of the results")
    parser.add_argument("--program", default="llama-perplexity")
    arguments = parser.parse_args()
    if (program := shutil.which(arguments.program)) is None:
        skip(f"{arguments.program} is not there; build it from the llama.cpp of edge-run")
    need(arguments.text)
    work = Work(
        arguments.model,
        arguments.text,
        arguments.memory or arguments.model.stat().st_size // 2,
        arguments.chunks,
        arguments.context,
        arguments.micro_batch,
        arguments.threads,
    )
    rows = []
    for kernels in [arguments.kernels] if arguments.kernels else KERNELS:
        rows.append(compare(program, work, kernels))
        print(rows[-1], flush=True)
    write_results(
        "-".join(["perplexity", *filter(None, [arguments.kernels])]), rows, f"{__doc__}\n{finding(rows, work)}"
    )


if __name__ == "__main__":
    main()
