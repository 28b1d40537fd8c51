"""Real, trained models on a small device: plain decoding, a real draft, and llama.cpp's mmap at its best read-ahead.

Models: those that EDGE_RUN_REAL_MODELS holds (CONTRIBUTING.md, Real models), and of Qwen2.5 1.5B three more: all
matrices Q4_0 (`requantize.py`), and both grown to 5 GiB by layers, which changes no logit. Budget and control group:
half the model, or the least that works. In each round every way runs once, in turn, cold, at the same disk speed; each
continues the same English text greedily. Read-ahead is 128 KiB for edge-run, which reads past the page cache; mmap runs
with several, and in each round the fastest counts. A draft takes its memory from the same budget; where it has no room
the reason is printed. Tokens a second are those after the prompt.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _box import MODELS, ROOT, run_worker, skip, spread, write_results
from requantize import requantize
from speculation import WORKER, compared

from edge_run import BudgetError, ConfigError, inflate, plan
from edge_run.base.units import format_size, parse_size
from edge_run.runtime.tools.inflate import plan_growth
from edge_run.runtime.tools.inflate_source import read_source

sys.path.append(str(ROOT / "tests"))

from real_models import QWEN, QWEN_DRAFT, TEXTS, Missing, find

READ_AHEADS_KB = (128, 512, 2048, 8192)
CONTEXT: dict[str, Any] = {"context_tokens": 1024, "micro_batch_tokens": 64, "threads": 2}  # as the worker has them


@dataclass(frozen=True, slots=True)
class Variant:
    """A model to measure, and the draft that has its tokens."""

    name: str
    path: Path
    draft: Path | None


def variants(names: Sequence[str], size: str) -> Iterator[Variant]:
    """Yield the models that are there, of those that `names` names (all, when empty); makes what is to be made."""
    for model in TEXTS:
        try:
            path = find(model)
            draft = find(QWEN_DRAFT) if model is QWEN else None
        except Missing as reason:
            print(f"left out: {reason}", file=sys.stderr)
            continue
        for name, make in makers(model.name, path, size if model is QWEN else None).items():
            if not names or name in names:
                yield Variant(name, make(), draft)


def makers(name: str, path: Path, size: str | None) -> dict[str, Callable[[], Path]]:
    """Return by name what gives the model at `path`, and with a `size` what it is made into."""
    if size is None:
        return {name: lambda: path}
    return {
        name: lambda: path,
        f"{name}-q4_0": lambda: pure_q4_0(path),
        f"{name}-{size}": lambda: grown_by_layers(path, size),
        f"{name}-q4_0-{size}": lambda: grown_by_layers(pure_q4_0(path), size),
    }


def pure_q4_0(source: Path) -> Path:
    """Return `source` with all matrices in Q4_0, made when missing."""
    path = MODELS / f"{source.stem}-q4_0.gguf"
    return path if path.exists() else requantize(source, path)


def grown_by_layers(source: Path, size: str) -> Path:
    """Return `source` with as many layers as `size` has room for, made when missing; every matrix keeps its size."""
    path, most_bytes = MODELS / f"{source.stem}-{size}.gguf", parse_size(size)
    if not path.exists():
        layers = read_source(source).layers
        in_layers = sum(tensor.size_bytes for layer in layers for tensor in layer.values())
        n_layers = len(layers) + (most_bytes - source.stat().st_size) * len(layers) // in_layers
        while (needed_bytes := size_with(source, n_layers)) > most_bytes:  # layers of several types differ in size
            n_layers -= 1
        inflate(source, path, needed_bytes, layers=n_layers)
    return path


def size_with(source: Path, n_layers: int) -> int:
    """Return what `source` takes with `n_layers` layers."""
    try:
        plan_growth(read_source(source), 1, n_layers)
    except ConfigError as refusal:
        return refusal.needed_bytes
    raise AssertionError("a model of one byte")


def budget_of(variant: Variant) -> int:
    """Return half the model, or where that is too little a tenth more than the least."""
    half = variant.path.stat().st_size // 2
    try:
        plan(variant.path, memory=half, **CONTEXT)
    except BudgetError as refusal:
        return refusal.minimum_bytes * 11 // 10
    return half


def has_room(variant: Variant, budget: int) -> bool:
    """Return whether the draft fits the budget beside the model; says why not."""
    if variant.draft is None:
        return False
    try:
        plan(variant.path, memory=budget, draft=variant.draft, **CONTEXT)
    except BudgetError as refusal:
        print(f"{variant.name}: no draft: {refusal}", file=sys.stderr)
        return False
    return True


class Measurement:
    """One model in its box, all ways."""

    def __init__(self, variant: Variant, disk_mbps: int, n_tokens: int, n_mmap_tokens: int) -> None:
        """Find its budget."""
        MODELS.mkdir(parents=True, exist_ok=True)
        self.variant, self.budget = variant, budget_of(variant)
        self._box: dict[str, Any] = {"memory": self.budget, "disk_mbps": disk_mbps}
        self._common = [variant.path, "--memory", self.budget, "--text", "docs", "--tokens", n_tokens]
        self._is_drafted = has_room(variant, self.budget)
        self._mmap_tokens = n_mmap_tokens
        self._files = [variant.path, *([variant.draft] if variant.draft else [])]

    def measure(self, number: int) -> dict[str, Any]:
        """Return the row of one round."""
        plain = self._run("--speculate", "off")
        by_read_ahead = {kilobytes: self._mmap(kilobytes) for kilobytes in READ_AHEADS_KB}
        fastest_kb, mmap = max(by_read_ahead.items(), key=lambda found: found[1]["tokens_per_s"])
        row: dict[str, Any] = {
            "model": self.variant.name,
            "model_bytes": self.variant.path.stat().st_size,
            "budget_bytes": self.budget,
            "disk_mbps": self._box["disk_mbps"] or "unthrottled",
            "round": number,
            "plain_tokens_per_s": plain["tokens_per_s"],
            "mmap_tokens_per_s": mmap["tokens_per_s"],
            "mmap_read_ahead_kb": fastest_kb,
            "mmap_by_read_ahead": " ".join(f"{kb}:{run['tokens_per_s']:.3f}" for kb, run in by_read_ahead.items()),
            "over_mmap": plain["tokens_per_s"] / mmap["tokens_per_s"],
            "mmap_same_tokens": same_start(plain, mmap),
            "plain_peak_bytes": plain["peak_bytes"],
            "plain_oom_kills": plain["box"]["oom_kills"],
        }
        if self._is_drafted:
            drafted = self._run("--draft", self.variant.draft)
            row["drafted_tokens_per_s"] = drafted["tokens_per_s"]
            row["drafted_over_plain"] = drafted["tokens_per_s"] / plain["tokens_per_s"]
            row |= compared(plain, drafted)
        return row

    def _run(self, *flags: object) -> dict[str, Any]:
        return run_worker([*self._common, *flags], self._box, self._files, WORKER)

    def _mmap(self, read_ahead_kb: int) -> dict[str, Any]:
        flags = ["--backend", "llama.cpp", "--speculate", "off", "--tokens", self._mmap_tokens]
        box = {**self._box, "readahead_kb": read_ahead_kb}
        return run_worker([*self._common, *flags], box, self._files, WORKER)


def same_start(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the answers of two runs are the same as far as the shorter ones go."""
    pairs = zip(one["answers"], other["answers"], strict=True)
    return all(a == b for both in pairs for a, b in zip(*both, strict=False))


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the models, as they are called in the results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=int, default=500, help="MB/s; 0 is not limited")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--mmap-tokens", type=int, default=6)
    parser.add_argument("--size", default="5G", help="of the grown ones")
    arguments = parser.parse_args()
    rows = []
    for variant in variants(arguments.names, arguments.size):
        measurement = Measurement(variant, arguments.disk, arguments.tokens, arguments.mmap_tokens)
        for number in range(arguments.rounds):
            rows.append(measurement.measure(number))
            print(rows[-1], flush=True)
    if not rows:
        skip("none of the models is there")
    lines = [summary(list(some)) for _, some in itertools.groupby(rows, key=lambda row: row["model"])]
    write_results("real", rows, "\n".join([__doc__ or "", *lines]))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return what the rounds of one model say."""
    first = rows[0]

    def median(key: str) -> float:
        return float(statistics.median(row[key] for row in rows))

    same = "the same tokens" if all(row["mmap_same_tokens"] for row in rows) else "OTHER TOKENS"
    drafted = ""
    if "drafted_tokens_per_s" in first:
        drafted = (
            f"; with the draft {median('drafted_tokens_per_s'):.2f}, {median('drafted_over_plain'):.2f} x plain, "
            f"{median('tokens_per_pass'):.2f} tokens a pass"
        )
    return (
        f"* **{first['model']}** ({format_size(first['model_bytes'])}, budget {format_size(first['budget_bytes'])}, "
        f"{first['disk_mbps']} MB/s): {median('plain_tokens_per_s'):.2f} tokens/s, "
        f"{spread(row['over_mmap'] for row in rows)} x mmap ({median('mmap_tokens_per_s'):.2f} with "
        f"{', '.join(str(row['mmap_read_ahead_kb']) for row in rows)} KiB of read-ahead; {same}){drafted}."
    )


if __name__ == "__main__":
    main()
