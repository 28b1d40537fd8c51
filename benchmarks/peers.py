"""Seconds a token of programs that run a model which does not fit: AirLLM, accelerate's disk offload, llama.cpp's mmap
and edge-run, in turn, in one small box.

    peers.py --peers-python PYTHON [--rounds 3] [--memory 2GiB] [--disk 500] [--tokens 5]

Model: Qwen2.5-Coder 1.5B (CONTRIBUTING.md, Real models) in 16 bits (BF16): `requantize.py` makes the GGUF of it, which
edge-run and llama.cpp read, and `safetensors_of.py` the same weights, bit for bit, for the others. Each run is cold, in
a control group of its own, on two threads, continues the same prompt of 16 tokens, and greedily. AirLLM runs on the
processor, and splits the file into layers before, outside the box. accelerate holds as many layers as --held says, and
leaves the others in the file; the largest that works in the box is to be given. mmap runs with 128 KiB and with
8192 KiB of read-ahead, the others with 128. Read is what storage read for the process, page faults included. PYTHON is
of an environment with torch, transformers, accelerate, airllm and gguf; a peer that is missing there is left out, and
its reason printed. Last comes edge-run with the file as it was published (Q4_K_M), which has fewer bytes a weight.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from _box import MODELS, READAHEAD_KB, ROOT, run_json, run_worker, skip, spread, write_results
from edgebox import boxed
from requantize import requantize
from safetensors_of import write_safetensors

from edge_run.base.units import format_size

sys.path.append(str(ROOT / "tests"))

from real_models import QWEN, Missing, find

WORKER = ROOT / "benchmarks" / "_peers_worker.py"
OUR_WORKER = ROOT / "benchmarks" / "_peers_ours.py"
PROMPT = (785, 53416, 315, 279, 326, 57909, 6139, 1495, 1449, 8284, 429, 5823, 11, 448, 1181, 829)
WIDE_READAHEAD_KB = 8192
PEERS = ("airllm", "accelerate")
WAYS = ("edge-run", "mmap", "mmap, wide read-ahead", *PEERS, "edge-run, Q4_K_M")


class Peers:
    """The ways to run the model, each in a box."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Make what is missing of the model: its file in 16 bits, the safetensors, and AirLLM's layers."""
        self._arguments = arguments
        try:
            self._published = find(QWEN)
        except Missing as reason:
            skip(reason)
        self._gguf = MODELS / f"{QWEN.name}-bf16.gguf"
        self._folder = MODELS / f"{QWEN.name}-safetensors"
        MODELS.mkdir(parents=True, exist_ok=True)
        if not self._gguf.exists():
            requantize(self._published, self._gguf, "BF16")
        if not (self._folder / "model.safetensors").exists():
            write_safetensors(self._gguf, self._folder)
        if arguments.peers_python and not (self._folder / "tokenizer.json").exists():
            run_json(
                [arguments.peers_python, str(WORKER), "prepare", str(self._folder), "--source", str(self._published)]
            )

    @functools.cached_property
    def names(self) -> list[str]:
        """The ways, in the order in which they take turns."""
        wanted = [way for way in WAYS if not self._arguments.only or way in self._arguments.only]
        return [way for way in wanted if way not in PEERS or self._is_there(way)]

    def run(self, name: str) -> dict[str, Any]:
        """Return the figures of one way."""
        if name in PEERS:
            return self._run_peer(name)
        is_published = name.endswith("Q4_K_M")
        path = self._published if is_published else self._gguf
        backend = "llama.cpp" if name.startswith("mmap") else "edge-run"
        flags = [path, "--backend", backend, "--tokens", self._arguments.tokens, "--prompt", *PROMPT]
        flags += ["--memory", self._arguments.memory] if backend == "edge-run" else []
        read_ahead_kb = WIDE_READAHEAD_KB if "wide" in name else READAHEAD_KB
        box = {"memory": self._arguments.memory, "disk_mbps": self._arguments.disk, "readahead_kb": read_ahead_kb}
        return run_worker(flags, box, path, OUR_WORKER)

    def prepare(self) -> None:
        """Have AirLLM split the file, once, outside the box."""
        if "airllm" in self.names and not (self._folder / "airllm").exists():
            run_json([*self._command("airllm"), "--tokens", "2"])

    def _is_there(self, name: str) -> bool:
        """Return whether a peer can be run; says why not."""
        python, reason = self._arguments.peers_python, "no --peers-python"
        if python:
            command = [python, "-c", f"import torch, transformers, {name}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return True
            reason = done.stderr.strip().splitlines()[-1]
        print(f"left out: {name}: {reason}", file=sys.stderr)
        return False

    def _command(self, name: str) -> list[str]:
        return [self._arguments.peers_python, str(WORKER), name, str(self._folder), "--prompt", *map(str, PROMPT)]

    def _run_peer(self, name: str) -> dict[str, Any]:
        command = [*self._command(name), "--tokens", str(self._arguments.tokens), "--held", self._arguments.held]
        box = {"memory": self._arguments.memory, "disk_mbps": self._arguments.disk, "readahead_kb": READAHEAD_KB}
        figures, done = run_json(boxed(command, **box, cold=self._folder / "model.safetensors"))
        return {**figures, "box": json.loads(done.stderr.splitlines()[-1])}


def finding(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Return a table of the medians."""
    lines = [
        f"{format_size(rows[0]['memory_bytes'])}, {arguments.disk or 'unthrottled'} MB/s; accelerate holds "
        f"{arguments.held}.",
        "",
        "| | seconds a token | to the first token | read a token | peak of the group | the same first tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["way"] for row in rows):
        some = [row for row in rows if row["way"] == name]
        first = statistics.median(row["load_s"] + row["first_token_s"] for row in some)
        read = format_size(round(statistics.median(row["bytes_per_token"] for row in some)))
        peak = format_size(max(row["peak_bytes"] or 0 for row in some))
        lines.append(
            f"| {name} | {spread(row['token_s'] for row in some)} | {first:.1f} s | "
            f"{read} | {peak} | {min(row['same_tokens'] for row in some)} of {arguments.tokens} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--disk", type=int, default=500, help="MB/s; 0 is not limited")
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--held", default="900MiB", help="by accelerate, of weights")
    parser.add_argument("--only", nargs="*", choices=WAYS, help="some of the ways")
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    peers = Peers(arguments)
    peers.prepare()
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        answer: list[int] = []
        for name in peers.names:
            figures = peers.run(name)
            tokens, box = figures.pop("tokens"), figures.pop("box")
            answer = answer or tokens
            same = next((i for i, (a, b) in enumerate(zip(answer, tokens, strict=True)) if a != b), len(tokens))
            row = {"way": name, "round": number, **figures, "same_tokens": same}
            row |= {"memory_bytes": box["limit_bytes"], "peak_bytes": box["peak_bytes"], "oom_kills": box["oom_kills"]}
            rows.append(row | {"read_bytes": box["read_bytes"], "wall_s": box["wall_s"]})
            print(rows[-1], flush=True)
    text = f"{__doc__}\n{finding(rows, arguments)}"
    if arguments.print_only:
        print(text)
    else:
        write_results("peers", rows, text)


if __name__ == "__main__":
    main()
