"""What HTTP costs: sixteen answers through `edge-run serve` against the same through `Model.generate_many`.

    python benchmarks/http_overhead.py MODEL@BUDGET [--requests 16] [--rounds 5] [--tokens 48]

In each round a process generates without a server, and a server answers clients that are another process on the same
cores, now the one first and now the other; prompts, settings and the number of tokens are the same, and both begin when
the weights are at their place: those of a model that is in the system's cache are moved there while it answers. Tokens
a second count from the first request to the last token; memory is the most that the process held. `import` is what a
process takes longer to import that serves, and a plain run must import none of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from _box import KIT, ROOT, WIKITEXT, file_at, model_at, need, run_worker, until_idle, write_results
from _usage import peak_bytes

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.base.units import MIB
from served import served

WORKER = ROOT / "benchmarks" / "_many_worker.py"
MOST_LESS, MOST_MORE_BYTES, MOST_IMPORT_S = 0.02, 15 * MIB, 0.150
IMPORTS = """
import time
from edge_run import Model
import edge_run.cli.commands.serve
Model({kit!r}, context_tokens=64).close()
began_s = time.perf_counter()
import uvicorn, msgspec
import edge_run.runtime.server.serving
print(time.perf_counter() - began_s)
"""
PLAIN = """
import sys
from edge_run import Model
with Model({kit!r}, context_tokens=64) as model:
    model.generate("Once", max_tokens=2).result()
print([name for name in sys.modules if name.split(".")[0] in ("uvicorn", "starlette", "msgspec", "h11")
       or name.startswith("edge_run.runtime.server")])
"""


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=model_at, metavar="MODEL@BUDGET")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--text", type=file_at, default=WIKITEXT)
    parser.add_argument("--imports", type=int, default=9)
    given = parser.parse_args()
    need(given.text)
    ways = [("generate_many", plainly), ("http", over_http)]
    rows = []
    for number in range(given.rounds):
        for way, measure in reversed(ways) if number % 2 else ways:
            rows.append({"round": number, "way": way, **measure(*given.model, given)})
            print(rows[-1], flush=True)
    import_s = [float(child(IMPORTS)) for _ in range(given.imports)]
    write_results("http-overhead", rows, f"{(__doc__ or '').strip()}\n\n{finding(rows, import_s, child(PLAIN), given)}")


def plainly(model: Path, budget: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of answers without a server."""
    words = [model, "--text", given.text, "--memory", budget, "--requests", given.requests]
    words += ["--parallel", given.requests, "--prompt", given.prompt, "--tokens", given.tokens, "--whole", "--settled"]
    found = run_worker(words, worker=WORKER)
    return {key: found[key] for key in ("tokens", "wall_s", "tokens_per_s", "peak_bytes", "passes")}


def over_http(model: Path, budget: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the same answers through a server."""
    context = given.requests * (given.prompt + given.tokens + 16)
    with served(model, "--memory", budget, "-c", context, "--parallel", given.requests) as server:
        httpx.post(f"{server.url}/completion", json={"prompt": "a", "n_predict": 2}, timeout=60).raise_for_status()
        until_idle(server.process.pid)
        command = [sys.executable, str(Path(__file__).with_name("_http_client.py"))]
        words = [server.url, model, given.text, given.requests, given.prompt, given.tokens]
        done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=True, cwd=ROOT)
        return {**json.loads(done.stdout.splitlines()[-1]), "peak_bytes": peak_bytes(server.process.pid)}


def child(program: str) -> str:
    """Return what a Python program prints last."""
    command = [sys.executable, "-c", program.format(kit=str(KIT))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def finding(rows: list[dict[str, Any]], import_s: list[float], imported: str, given: argparse.Namespace) -> str:
    """Return what came out, in words."""
    sides = [[row for row in rows if row["way"] == way] for way in ("generate_many", "http")]
    speeds = [[row["tokens_per_s"] for row in side] for side in sides]
    less = [1 - over / plain for plain, over in zip(*speeds, strict=True)]
    more = [over["peak_bytes"] - plain["peak_bytes"] for plain, over in zip(*sides, strict=True)]
    peaks = [max(row["peak_bytes"] for row in side) for side in sides]
    return "\n".join(
        [
            "| | without a server | over HTTP | difference | reach |",
            "|---|---|---|---|---|",
            f"| tokens/s, {given.requests} requests | {statistics.median(speeds[0]):.2f} | "
            f"{statistics.median(speeds[1]):.2f} | {statistics.median(less):.1%} less ({min(less):.1%} to "
            f"{max(less):.1%}) | <= {MOST_LESS:.0%} |",
            f"| most memory | {peaks[0] / MIB:.1f} MiB | {peaks[1] / MIB:.1f} MiB | "
            f"{statistics.median(more) / MIB:.1f} MiB more ({min(more) / MIB:.1f} to {max(more) / MIB:.1f}) | "
            f"<= {MOST_MORE_BYTES / MIB:.0f} MiB |",
            f"| import | | | {1000 * statistics.median(import_s):.0f} ms more ({1000 * min(import_s):.0f} to "
            f"{1000 * max(import_s):.0f}) | <= {1000 * MOST_IMPORT_S:.0f} ms |",
            f"| of the server, imported by a plain run | {imported} | | | none |",
        ]
    )


if __name__ == "__main__":
    main()
