"""A model with a part of it on a GPU: what a token and a prompt take, foretold and measured, and what is held.

Budgets of the GPU's memory: a quarter, half and three quarters of the file, and all that it takes. At each, by turns:
edge-run with the rest of the model in memory; llama-cpp-python alone, without anything of ours, with as many layers on
the GPU (from the second round on its file is in the page cache); and edge-run with the rest streamed in the smallest
budget of memory that works. A prompt of 512 tokens in one pass, fed a second time, then 32 tokens, with the threads
that edge-run takes by default; 8 tokens where weights stream. The device is probed once beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _box import ROOT, file_at, need_gpu, run_worker, sameness, spread, write_results

OURS, PLAIN = ROOT / "benchmarks" / "_gpu_parts_worker.py", ROOT / "benchmarks" / "_plain_worker.py"
SHARES = (0.25, 0.5, 0.75, 1.5)
MUCH = 1 << 40


def one_round(model: Path, cache: str, share: float, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one budget, of the three by turns."""
    prompt, decode, size = given.prompt, given.decode, model.stat().st_size
    ours = [model, "--cache", cache, "--gpu-memory", int(size * share), "--prompt", prompt]
    resident = run_worker([*ours, "--decode", decode, "--memory", MUCH], worker=OURS)
    flags = ["--layers", resident["layers"], "--context", 1024, "--micro-batch", 512, "--threads", resident["threads"]]
    plain = run_worker([model, prompt, decode, *flags], worker=PLAIN)
    row = {
        "share": share,
        "layers": resident["layers"],
        "token_s": resident["token_s"],
        "llama_cpp_token_s": plain["token_s"],
        "speed_ratio": plain["mean_token_s"] / resident["mean_token_s"],
        "prompt_s": resident["prompt_again_s"],
        "llama_cpp_prompt_s": plain["prompt_again_s"],
        "prompt_speed_ratio": plain["prompt_again_s"] / resident["prompt_again_s"],
        "same_token": resident["last_token"] == plain["last_token"],
        **errors("", resident, prompt),
        **held("", resident),
    }
    if given.streamed_decode and resident["layers"] < largest(model):
        streamed = run_worker([*ours, "--decode", given.streamed_decode, "--memory", 0], worker=OURS)
        row |= {
            "streamed_mode": streamed["mode"],
            "streamed_token_s": streamed["token_s"],
            "streamed_prompt_s": streamed["prompt_again_s"],
            "streamed_bytes": streamed["streamed_bytes"],
            **errors("streamed_", streamed, prompt),
            **held("streamed_", streamed),
        }
    return row


def largest(model: Path) -> int:
    """Return the layers of `model`, as llama.cpp counts them."""
    from edge_run.tiers.gguf import read_gguf

    return int(str(read_gguf(model).value("block_count"))) + 1


def errors(prefix: str, run: Mapping[str, Any], prompt: int) -> dict[str, float]:
    """Return by how much the forecasts of `run` were off."""
    return {
        f"{prefix}token_error": run["predicted_decode_tokens_per_s"] * run["mean_token_s"] - 1,
        f"{prefix}prompt_error": run["predicted_prefill_tokens_per_s"] * run["prompt_again_s"] / prompt - 1,
    }


def held(prefix: str, run: Mapping[str, Any]) -> dict[str, int]:
    """Return the memory that `run` had and took."""
    names = ("gpu_budget", "gpu_counted", "gpu_less_free", "memory_budget", "memory_peak")
    return {prefix + name: run[name] for name in names}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=file_at)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--streamed-decode", type=int, default=8, help="tokens where weights stream; 0 leaves that out")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    arguments = parser.parse_args()
    gpu, rows, lines = need_gpu(), [], []
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as cache:
            print(f"{model.stem}: {run_worker([model, '--cache', cache], worker=OURS)}", flush=True)
            for number in range(arguments.rounds):
                for share in arguments.shares:
                    row = one_round(model, cache, share, arguments)
                    rows.append({"model": model.stem, "round": number, **row})
                    print(rows[-1], flush=True)
        for share in arguments.shares:
            lines.append(line(model, [row for row in rows if row["model"] == model.stem and row["share"] == share]))
    both = [row[key] for row in rows for key in ("token_error", "streamed_token_error") if key in row]
    over = [row["memory_peak"] > row["memory_budget"] for row in rows]
    over += [row["streamed_memory_peak"] > row["streamed_memory_budget"] for row in rows if "streamed_mode" in row]
    finding = (
        f"{__doc__}\n* GPU: {gpu.name} ({gpu.description}).\n" + "\n".join(lines) + "\n"
        f"* Forecasts of a token: off by {statistics.median(map(abs, both)):.1%} in the median, "
        f"{max(map(abs, both)):.1%} at most; {sum(abs(error) <= 0.15 for error in both)} of {len(both)} within 15 %.\n"
        f"* Over the budget of memory: {sum(over)} of {len(over)} runs. Of the GPU's memory, its driver and llama.cpp "
        f"took up to {max(row['gpu_less_free'] - row['gpu_counted'] for row in rows) / 2**20:.0f} MiB more than was "
        "counted."
    )
    write_results("gpu-parts", rows, finding)


def line(model: Path, rows: list[dict[str, Any]]) -> str:
    """Return what the rounds of one budget found."""
    tokens, prompts = (spread((row[key] for row in rows), 3) for key in ("speed_ratio", "prompt_speed_ratio"))
    said = (
        f"* {model.stem}, {rows[0]['layers']} layers on the GPU: a token takes "
        f"{statistics.median(row['token_s'] for row in rows) * 1e3:.1f} ms, {tokens} times as fast as llama.cpp; "
        f"the prompt {statistics.median(row['prompt_s'] for row in rows) * 1e3:.0f} ms, {prompts}; {sameness(rows)}."
    )
    if "streamed_mode" in rows[0]:
        said += (
            f" Streamed ({rows[0]['streamed_bytes'] / 1e9:.2f} GB a token): "
            f"{statistics.median(row['streamed_token_s'] for row in rows) * 1e3:.0f} ms, the prompt "
            f"{statistics.median(row['streamed_prompt_s'] for row in rows) * 1e3:.0f} ms."
        )
    return said


if __name__ == "__main__":
    main()
