"""What is predicted against what is measured: decode and prefill tokens/s, and the first token.

Four budgets x two disk speeds x a dense model (the kit model grown to 2 GB, 64 layers, Q4_0) and a mixture of experts
(kit-moe grown to 2 GB, F16), or `--models`. For each budget the box is probed from nothing, for the drive's speed
changes within minutes, or, with `--age`, once for all and so long before the first budget; then, in a process of its
own, the prediction is made, the model opened and measured: a prompt of 200 tokens in micro-batches of 64 (cold: the
first token), another one (prefill), 32 tokens (decode; 96 of the mixture, since of 32 the share that misses the cache
varies by half), all of them held-out English. How evenly a mixture chooses its experts, how fast new memory is, and
what passes take beside reading, is known from runs before, under other budgets: one at 40 %, and those of the table.
The machine rests for some seconds before each process: a virtual machine takes memory from its host when it is first
used, up to two seconds a GB, but less when it was in use a moment ago. `drive` is how fast the drive was while tokens
were decoded, over what the probe had found.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _box import NOVELS, ROOT, file_at, grown_model, grown_moe, need, run_worker, write_results

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--unthrottled", action="store_true", help="only with a drive that is not limited")
    parser.add_argument("--only", choices=("dense", "mixture"), help="one of the models")
    parser.add_argument("--models", type=file_at, nargs="+", metavar="FILE", help="dense ones, in place of those")
    parser.add_argument("--age", type=float, default=0.0, metavar="MINUTES", help="of what the probe found")
    parser.add_argument("--name", default="forecast")
    given = parser.parse_args()
    need(NOVELS)
    makers = {"dense": lambda: grown_model(given.size, 64), "mixture": lambda: grown_moe(given.size)}
    models = {path.stem: path for path in given.models or ()} or {
        kind: make() for kind, make in makers.items() if given.only in (None, kind)
    }
    places = [(kind, mbps) for kind in models for mbps in ((None,) if given.unthrottled else (500, None))]
    rows: list[dict[str, Any]] = []
    try:
        for row in measured(models, places, given.age):
            rows.append(row)
            print({key: value for key, value in row.items() if "predicted" not in key}, flush=True)
    finally:  # a budget may be too small for a model
        if rows:
            name = "-".join([given.name, *["unthrottled"] * given.unthrottled, *filter(None, [given.only])])
            write_results(name, rows, finding(rows, given.age))


def measured(
    models: Mapping[str, Path], places: Sequence[tuple[str, int | None]], age_minutes: float
) -> Iterator[dict[str, Any]]:
    """Yield what was foretold and what was measured of each model, disk speed and budget."""
    with contextlib.ExitStack() as stack:
        caches = {place: stack.enter_context(tempfile.TemporaryDirectory()) for place in places}
        if age_minutes:
            for kind, mbps in places:
                boxed(models[kind], mbps, ["--cache", caches[kind, mbps]])
            time.sleep(60 * age_minutes)
        for kind, mbps in places:
            model, cache = models[kind], ["--cache", caches[kind, mbps]]
            for share in [EARLIER_SHARE] * (kind == "mixture") + [*SHARES]:
                probed = {} if age_minutes else boxed(model, mbps, cache)
                row = boxed(model, mbps, [*cache, "--share", str(share), "--decode", DECODE.get(kind, DECODE["dense"])])
                if share == EARLIER_SHARE:
                    continue
                errors = {f"error_{name}": row[f"predicted_{name}"] / row[name] - 1 for name in FIGURES}
                yield {"model": kind, "disk_mbps": mbps or "unthrottled", **errors, **probed, **row}


def finding(rows: Sequence[Mapping[str, Any]], age_minutes: float) -> str:
    """Return how far off predictions were."""
    lines = []
    for name in FIGURES:
        off = [abs(row[f"error_{name}"]) for row in rows]
        within = sum(error <= 0.15 for error in off)
        lines.append(
            f"* {name}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at most; "
            f"{within} of {len(off)} within 15 %."
        )
    if age_minutes:
        lines.append(f"\nThe device was probed {age_minutes:g} minutes before the first of these runs.")
    return "\n".join([__doc__ or "", *lines])


if __name__ == "__main__":
    main()
