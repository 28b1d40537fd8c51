"""Shared by the benchmarks: models grown to size, children run in a small box, results written with their date and
machine.

The box (RAM cap, disk speed, read-ahead, cold cache) is that of `edgebox.py`; where none can be made, the benchmark is
skipped with the reason.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
import platform
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from edgebox import NO_BOX, boxed

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
MODELS = Path(os.environ.get("BENCH_MODELS", Path.home() / ".cache" / "edge-run" / "bench"))
RESULTS = ROOT / "benchmarks" / "results"
KIT = ROOT / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"
WORKER = ROOT / "benchmarks" / "_worker.py"
READAHEAD_KB = 128
IDLE_S, IDLE_SHARE = 1.0, 0.02
SKIPPED, SKIPPED_MAGIC = struct.Struct("<II"), 0x184D2A50  # a frame that zstd skips


def grown_model(size: str, layers: int) -> Path:
    """Return the kit model grown to `size` (`4G`) with `layers` layers, made when missing."""
    path = MODELS / f"kit-dense-{size}-{layers}.gguf"
    if not path.exists():
        from edge_run import inflate
        from edge_run.base.units import parse_size

        MODELS.mkdir(parents=True, exist_ok=True)
        inflate(KIT, path, parse_size(size), layers=layers)
    return path


def grown_moe(size: str) -> Path:
    """Return kit-moe, which is among the shared models, grown to `size`; made when missing."""
    path = MODELS / f"kit-moe-{size}.gguf"
    if not path.exists():
        from edge_run import inflate
        from edge_run.base.units import parse_size

        MODELS.mkdir(parents=True, exist_ok=True)
        inflate(SHARED / "models" / "kit-moe.gguf", path, parse_size(size))
    return path


def packed_moe(model: Path) -> Path:
    """Return the packed file of a grown `model`, made when missing; it is as large as one of trained weights would be.

    What growing adds to down projections are zeros, which would pack to nothing: frames of these are filled up with
    noise that is read and skipped, to the share that kit-moe's trained experts pack to.
    """
    from edge_run.runtime.tools import pack as packing

    target = model.with_name(f"{model.name}.as-trained")
    if target.exists() and target.stat().st_mtime > model.stat().st_mtime:
        return target
    trained = packing.pack(SHARED / "models" / "kit-moe.gguf", MODELS / "kit-moe.packed", is_replacing=True)
    compress = packing._compressor()

    def filled_up(block: bytes) -> bytes:
        frame = compress(block)
        missing = int(trained.share * len(block)) - len(frame) - SKIPPED.size
        if len(frame) > len(block) // 2:
            return frame
        return frame + SKIPPED.pack(SKIPPED_MAGIC, missing) + os.urandom(missing)

    with mock.patch.object(packing, "_compressor", return_value=filled_up):
        made = packing.pack(model, target, is_replacing=True)
    print(f"kit-moe packs to {trained.share:.3f} of its size, {model.name} was made to {made.share:.3f}", flush=True)
    return target


def run_worker(
    arguments: Sequence[object],
    box: Mapping[str, Any] | None = None,
    cold: Path | Sequence[Path] | None = None,
    worker: Path = WORKER,
) -> dict[str, Any]:
    """Run one worker, in a box when one is given (arguments of `boxed`), and return its figures and the box's.

    cold: the model file, or files, whose page cache is dropped first, and whose disks are limited.
    """
    command = [sys.executable, str(worker), *map(str, arguments)]
    if box is not None:
        command = boxed(command, **{"readahead_kb": READAHEAD_KB, **box}, cold=cold)
    figures, done = run_json(command)
    if box is not None:
        figures["box"] = json.loads(done.stderr.splitlines()[-1])
    return figures


def run_json(command: Sequence[str], **options: Any) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run `command`; return the JSON that it prints last, and how it ended. Ends this process where no box can be made.

    options: of `subprocess.run`.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)
    if done.returncode == NO_BOX:
        print(f"skipped: {done.stderr.strip()}", file=sys.stderr)
        raise SystemExit(0)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1]), done


def until_idle(process: int) -> None:
    """Wait until a process computes nothing, as what it moves in the background is moved."""
    used_s, before_s = psutil.Process(process).cpu_times, -math.inf
    while (now_s := used_s().user + used_s().system) > before_s + IDLE_SHARE * IDLE_S:
        before_s = now_s
        time.sleep(IDLE_S)


def write_results(name: str, rows: Sequence[Mapping[str, object]], finding: str) -> None:
    """Write `rows` as CSV and `finding` as Markdown under results/, both named by `name` and today's date."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.date.today():%Y-%m-%d}-{name}"
    with (RESULTS / f"{stem}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    (RESULTS / f"{stem}.md").write_text(f"# {name}\n\n{machine()}\n\n{finding.strip()}\n", encoding="utf-8")
    print(f"{RESULTS / stem}.csv and .md written", file=sys.stderr)


def table(fields: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Return `rows` as a table in Markdown, with a column for each of `fields`."""
    lines = [fields, ["---"] * len(fields), *([str(row.get(field, "")) for field in fields] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Return what the figures were measured on, in two lines."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "?")
    return (
        f"Machine: {len(os.sched_getaffinity(0))} cores ({cpu}), Linux {platform.release()}, virtual disk; "
        f"Python {platform.python_version()}; commit {commit.stdout.strip()}."
    )
