"""Vectors of an encoder, streamed, against stock llama-cpp-python: how many of their bits differ.

Eight texts of 3 to some 400 tokens. llama-cpp-python's own `Llama` computes each alone, with flash attention and as
many threads, all resident. Then edge-run does, in a process each: under a budget of the least that works and half the
model; under the least that works; and with texts that share passes, as the command line has them by default, where
vectors are near and not equal. Vectors are compared as they are, not normalised.

    embeddings.py --model MODEL.gguf [--threads 2] [--context 512]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _box import write_results

from edge_run import BudgetError, Model
from edge_run.base.units import MIB, format_size

_SENTENCE = "A fox ran through the snow of an early morning, and left no more than {n} prints behind. "
TEXTS = [
    "fox",
    "search_query: who ran?",
    *("search_document: " + "".join(_SENTENCE.format(n=n) for n in range(count)) for count in (1, 2, 4, 8, 12, 18)),
]


def stock(options: argparse.Namespace) -> dict[str, Any]:
    """Return what llama-cpp-python makes of the texts."""
    from llama_cpp import Llama

    tokens = options.context
    model = Llama(
        str(options.model), embedding=True, flash_attn=True, n_ctx=tokens, n_batch=tokens, n_ubatch=tokens,
        n_threads=options.threads, n_threads_batch=options.threads, verbose=False,
    )  # fmt: skip
    return {"vectors": [model.embed([text])[0] for text in TEXTS]}


def ours(options: argparse.Namespace, share: float, together: int) -> dict[str, Any]:
    """Return what edge-run makes of them. share: of the model, that the budget is above the least that works."""
    asked: dict[str, Any] = {"context_tokens": options.context, "threads": options.threads, "sequences": together}
    try:
        Model(options.model, memory="1MiB", **asked)
    except BudgetError as error:
        least = error.minimum_bytes
    for _ in range(16):
        budget = least + int(share * options.model.stat().st_size)
        try:
            with Model(options.model, memory=budget, **asked) as model:
                found = model.embed(TEXTS, normalize=False)
                break
        except BudgetError as error:  # what a process holds differs a little from one to the next
            least = max(least + MIB, error.minimum_bytes)
    else:
        raise SystemExit("every budget that was named as the smallest is too small")
    assert found.plan.mode == "streamed"
    return {
        "vectors": found.vectors.tolist(),
        "budget_bytes": found.memory.budget_bytes,
        "peak_bytes": found.memory.peak_bytes,
        "model_bytes": found.plan.model_bytes,
        "streamed_bytes_per_pass": found.plan.streamed_bytes_per_batch,
        "bytes_read": found.bytes_read,
        "passes": found.passes,
        "tokens": sum(found.tokens),
    }


RUNS = {
    "stock": stock,
    "half": lambda options: ours(options, 0.5, 1),
    "least": lambda options: ours(options, 0.0, 1),
    "together": lambda options: ours(options, 0.5, len(TEXTS)),
}


def compare(name: str, found: dict[str, Any], wanted: np.ndarray) -> dict[str, Any]:
    """Return a row: the figures of a run, and in how many bits its vectors differ."""
    vectors = np.array(found.pop("vectors"), np.float32)
    bits = np.unpackbits((vectors.view(np.uint32) ^ wanted.view(np.uint32)).view(np.uint8))
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(wanted, axis=1)
    return {
        "run": name,
        "different_bits": int(bits.sum()),
        "all_bits": bits.size,
        "least_cosine": float(((vectors * wanted).sum(axis=1) / lengths).min()),
        **found,
    }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--run", choices=RUNS, help="only this one, for the process of a run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run:
        options.out.write_text(json.dumps(RUNS[options.run](options)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            out = Path(folder, name)
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--run", name, "--out", str(out)], check=True)
            results[name] = json.loads(out.read_text())
    wanted = np.array(results.pop("stock")["vectors"], np.float32)
    rows = [compare(name, found, wanted) for name, found in results.items()]
    lines = [
        f"* {row['run']}: {row['different_bits']:,} of {row['all_bits']:,} bits differ, least cosine "
        f"{row['least_cosine']:.7f}; {row['tokens']:,} tokens in {row['passes']} passes, budget "
        f"{format_size(row['budget_bytes'])} (peak {format_size(row['peak_bytes'])}), "
        f"{format_size(row['streamed_bytes_per_pass'])} of {format_size(row['model_bytes'])} read per pass"
        for row in rows
    ]
    finding = f"{__doc__}\n{options.model.name}, {options.threads} threads:\n\n" + "\n".join(lines)
    print(finding)
    write_results("embeddings", rows, finding)


if __name__ == "__main__":
    main()
