"""What is predicted against what is measured: decode and prefill tokens/s, and the first token.

Four budgets x two disk speeds x a dense model (the kit model grown to 2 GB, 64 layers, Q4_0) and a mixture of experts
(kit-moe grown to 2 GB, F16). For each budget the box is probed from nothing, for the drive's speed changes within
minutes, then, in a process of its own, the prediction is made, the model opened and measured: a prompt of 200 tokens in
micro-batches of 64 (cold: the first token), another one (prefill), 32 tokens (decode; 96 of the mixture, since of 32
the share that misses the cache varies by half), all of them held-out English. How evenly a mixture chooses its experts,
how fast new memory is, and what passes take beside reading, is known from runs before, under other budgets: one at 40
%, and those of the table. The machine rests for some seconds before each process: a virtual machine takes memory from
its host when it is first used, up to two seconds a GB, but less when it was in use a moment ago. `drive` is how fast
the drive was while tokens were decoded, over what the probe had found.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _box import ROOT, grown_model, grown_moe, run_worker, write_results

WORKER = ROOT / "benchmarks" / "_forecast_worker.py"
SHARES = (0.25, 0.5, 0.75, 0.95)
EARLIER_SHARE = 0.4
DECODE = {"dense": "32", "mixture": "96"}
REST_S = 30.0
FIGURES = ("first_token_s", "prefill_tokens_per_s", "decode_tokens_per_s")


def boxed(model: Path, mbps: int | None, flags: list[str]) -> dict[str, Any]:
    """Return what the worker prints, run in a box of that disk speed."""
    time.sleep(REST_S)
    row = run_worker([model, *flags], {"disk_mbps": mbps}, model, WORKER)
    return {key: value for key, value in row.items() if key != "box"}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--unthrottled", action="store_true", help="only with a drive that is not limited")
    parser.add_argument("--only", choices=("dense", "mixture"), help="one of the models")
    arguments = parser.parse_args()
    rows = []
    models = {"dense": grown_model(arguments.size, 64), "mixture": grown_moe(arguments.size)}
    for kind, model in models.items():
        if arguments.only not in (None, kind):
            continue
        for mbps in (None,) if arguments.unthrottled else (500, None):
            with tempfile.TemporaryDirectory() as cache:
                for share in [EARLIER_SHARE] * (kind == "mixture") + [*SHARES]:
                    probe_s = boxed(model, mbps, ["--cache", cache])["probe_s"]
                    row = boxed(model, mbps, ["--cache", cache, "--share", str(share), "--decode", DECODE[kind]])
                    if share == EARLIER_SHARE:
                        continue
                    errors = {f"error_{name}": row[f"predicted_{name}"] / row[name] - 1 for name in FIGURES}
                    rows.append(
                        {"model": kind, "disk_mbps": mbps or "unthrottled", **errors, "probe_s": probe_s, **row}
                    )
                    print({key: value for key, value in rows[-1].items() if "predicted" not in key}, flush=True)
    lines = []
    for name in FIGURES:
        errors = [abs(row[f"error_{name}"]) for row in rows]
        within = sum(error <= 0.15 for error in errors)
        lines.append(
            f"* {name}: off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most; "
            f"{within} of {len(errors)} within 15 %."
        )
    write_results(
        "-".join(["forecast", *["unthrottled"] * arguments.unthrottled, *filter(None, [arguments.only])]),
        rows,
        "\n".join([__doc__ or "", *lines]),
    )


if __name__ == "__main__":
    main()
