"""A model that fits in the GPU's memory: tokens per second against llama-cpp-python alone, interleaved.

Model: the kit model grown to 64 MB. Both sides have all of it on the GPU that llama.cpp names first, the same context
and micro-batches of 32; llama-cpp-python alone is its low-level interface with default settings, in a process of its
own, without anything of ours. Reached when the median speed is within 2 % of llama.cpp's. And how fast bytes reach the
GPU from ordinary memory and from pinned memory, as uploads use it, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from _box import KIT, ROOT, need_gpu, run_worker, spread, write_results

if TYPE_CHECKING:
    from edge_run.runtime.gpu.devices import Gpu

PLAIN = ROOT / "benchmarks" / "_plain_worker.py"


def upload_speeds(gpu: Gpu, rounds: int) -> str:
    """Return in words how many bytes a second reach `gpu` from either kind of memory."""
    from edge_run.runtime.gpu.devices import UPLOAD_BYTES, upload_speed
    from edge_run.runtime.llama._ggml import PinnedMemory
    from edge_run.tiers import _libc

    plain, pinned = _libc.map_anonymous(UPLOAD_BYTES), PinnedMemory(gpu.handle, UPLOAD_BYTES)
    pairs = [(upload_speed(gpu, plain), upload_speed(gpu, pinned.address)) for _ in range(rounds)]
    from_plain, from_pinned = (statistics.median(speeds) / 1e9 for speeds in zip(*pairs, strict=True))
    return f"{from_plain:.2f} GB/s from ordinary memory, {from_pinned:.2f} GB/s from pinned memory"


def main() -> None:
    """Measure and write the results."""
    from edge_run import inflate
    from edge_run.base.units import MIB
    from edge_run.runtime.gpu.devices import SOFTWARE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    arguments = parser.parse_args()
    gpu, rows = need_gpu(), []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "kit.gguf"
        inflate(KIT, model, 64 * MIB)
        for number in range(arguments.rounds):
            flags = ["--prompt", arguments.prompt, "--decode", arguments.decode, "--warm", 2, "--again"]
            ours = run_worker([model, *flags, "--gpu-memory", "1GiB"])
            plain = run_worker([model, arguments.prompt, arguments.decode], worker=PLAIN)
            rows.append(
                {
                    "round": number,
                    "edge_run_token_s": ours["token_s"],
                    "llama_cpp_token_s": plain["token_s"],
                    "speed_ratio": plain["token_s"] / ours["token_s"],
                    "prompt_speed_ratio": plain["prompt_again_s"] / ours["prompt_again_s"],
                    "same_token": ours["last_token"] == plain["last_token"],
                }
            )
            print(rows[-1], flush=True)
    ratios, prompts = (spread((row[key] for row in rows), 3) for key in ("speed_ratio", "prompt_speed_ratio"))
    note = "The processor plays this GPU: this says what edge-run adds to llama.cpp, and nothing of a GPU's speed."
    finding = (
        f"{__doc__}\n* GPU: {gpu.name} ({gpu.description}). {note if gpu.kind == SOFTWARE else ''}\n"
        f"* A token: edge-run is {ratios} times as fast as llama.cpp in {len(rows)} rounds; a prompt of "
        f"{arguments.prompt} tokens: {prompts}. The same last token in "
        f"{sum(row['same_token'] for row in rows)} of {len(rows)}.\n"
        f"* Uploads: {upload_speeds(gpu, arguments.rounds)}."
    )
    write_results("gpu-speed", rows, finding)


if __name__ == "__main__":
    main()
