"""Shared by the benchmarks: models grown to size, children run in a small box, results written with their date and
machine.

The box (RAM cap, disk speed, read-ahead, cold cache) is that of `edgebox.py`; where none can be made, the benchmark is
skipped with the reason. A script that SIGTERM ends ends what it started first, as it does after Ctrl-C.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import math
import os
import platform
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil
from edgebox import NO_BOX, boxed

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
MODELS = Path(os.environ.get("BENCH_MODELS", Path.home() / ".cache" / "edge-run" / "bench"))
RESULTS = ROOT / "benchmarks" / "results"
KIT = ROOT / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"
KIT_MOE = SHARED / "models" / "kit-moe.gguf"
NOVELS, WIKITEXT = (SHARED / "data" / "text" / f"{name}.txt" for name in ("novels", "wikitext-2-valid"))
SPEC_BENCH, GSM8K = (SHARED / "data" / "prompts" / f"{name}.jsonl" for name in ("spec_bench", "gsm8k"))
WORKER = ROOT / "benchmarks" / "_worker.py"
READAHEAD_KB = 128
IDLE_S, IDLE_SHARE = 1.0, 0.02
SKIPPED, SKIPPED_MAGIC = struct.Struct("<II"), 0x184D2A50  # a frame that zstd skips

if not Path(sys.argv[0]).name.startswith("_"):  # a worker, which may be in a long pass, dies at once
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def skip(reason: object) -> NoReturn:
    """End this process, which cannot measure here, and say why. It is no failure."""
    print(f"skipped: {reason}", file=sys.stderr)
    raise SystemExit(0)


def need(*paths: Path) -> None:
    """Skip the benchmark where one of `paths` is not there, as what is shared by those who work on this is not."""
    for path in paths:
        if not path.exists():
            skip(f"{path} is not there (CONTRIBUTING.md, Measure, then claim)")


def need_box(**limits: Any) -> None:
    """Skip the benchmark where no box can be made. limits: arguments of `boxed`."""
    run_in_box(boxed(["true"], **limits))


def need_gpu() -> Any:
    """Return the first GPU that llama.cpp offers; skip the benchmark where there is none."""
    from edge_run.runtime.gpu.devices import find_gpus

    if not (gpus := find_gpus()):
        skip("llama.cpp offers no GPU here")
    return gpus[0]


def file_at(text: str) -> Path:
    """Return where a file is, wherever a process looks from; a type for argparse."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return Path(text).absolute()


def program_at(text: str) -> Path:
    """Return where a program is, which may be named as a shell would find it; a type for argparse."""
    if (found := shutil.which(text)) is None:
        raise argparse.ArgumentTypeError(f"{text}: no such program")
    return Path(found).absolute()


def model_at(text: str) -> tuple[Path, str]:
    """Return the model and the budget of `MODEL@BUDGET`; a type for argparse."""
    path, _, budget = text.rpartition("@")
    if not path:
        raise argparse.ArgumentTypeError(f"{text}: name a budget too, as in model.gguf@2GiB")
    return file_at(path), budget


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

        need(KIT_MOE)
        MODELS.mkdir(parents=True, exist_ok=True)
        inflate(KIT_MOE, path, parse_size(size))
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
    need(KIT_MOE)
    trained = packing.pack(KIT_MOE, MODELS / "kit-moe.packed", is_overwritten=True)
    compress = packing._compressor()

    def filled_up(block: bytes) -> bytes:
        frame = compress(block)
        missing = int(trained.share * len(block)) - len(frame) - SKIPPED.size
        if len(frame) > len(block) // 2:
            return frame
        return frame + SKIPPED.pack(SKIPPED_MAGIC, missing) + os.urandom(missing)

    with mock.patch.object(packing, "_compressor", return_value=filled_up):
        made = packing.pack(model, target, is_overwritten=True)
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
    done = run_in_box(command, **options)
    return json.loads(done.stdout.splitlines()[-1]), done


def run_in_box(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `command`, boxed or not; return how it ended. Ends this process where no box can be made, or where it fails.

    options: of `subprocess.run`.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)
    if done.returncode == NO_BOX:
        skip(done.stderr.strip())
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-3000:]}")
    return done


def kill_inside(pid: int) -> bool:
    """Kill the command in a box, whose process is `pid`; return whether there was one."""
    try:
        children = psutil.Process(pid).children()
        for child in children:
            child.kill()
    except psutil.NoSuchProcess:  # it ended by itself meanwhile
        return False
    return bool(children)


def until_idle(process: int) -> None:
    """Wait until a process computes nothing, as what it moves in the background is moved."""
    used, before_s = psutil.Process(process).cpu_times, -math.inf
    while (now_s := used().user + used().system) > before_s + IDLE_SHARE * IDLE_S:
        before_s = now_s
        time.sleep(IDLE_S)


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the median, the least and the most."""
    found = sorted(values)
    return f"{statistics.median(found):.{digits}f} ({found[0]:.{digits}f} to {found[-1]:.{digits}f})"


def sameness(rows: Sequence[Mapping[str, object]], key: str = "same_token") -> str:
    """Return in words whether all that was compared said the same. key: in `rows`, whether it did."""
    others = sum(not row[key] for row in rows)
    return f"OTHER TOKENS in {others} of {len(rows)} rounds" if others else "the same tokens"


def write_results(name: str, rows: Sequence[Mapping[str, object]], finding: str, *, replaces: bool = False) -> Path:
    """Write `rows` as CSV and `finding` as Markdown under results/; return their path, without those endings.

    Both are named by `name` and today's date. A result that is there already stays, as somebody may have written in it,
    and the new one gets a number. replaces: it takes that one's place, since it holds all that was in it.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.date.today():%Y-%m-%d}-{name}"
    for number in itertools.count(2):
        if replaces or not (RESULTS / f"{stem}.md").exists():
            break
        stem = f"{datetime.date.today():%Y-%m-%d}-{name}-{number}"
    with (RESULTS / f"{stem}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    (RESULTS / f"{stem}.md").write_text(f"# {name}\n\n{machine()}\n\n{finding.strip()}\n", encoding="utf-8")
    print(f"{RESULTS / stem}.csv and .md written", file=sys.stderr)
    return RESULTS / stem


def table(fields: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Return `rows` as a table in Markdown, with a column for each of `fields`."""
    lines = [fields, ["---"] * len(fields), *([str(row.get(field, "")) for field in fields] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Return what the figures were measured on, in two lines."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=False)

    commit = git("rev-parse", "--short", "HEAD").stdout.strip()
    is_changed = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results").returncode == 1
    text = Path("/proc/cpuinfo").read_text()
    cpu = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line), "?")
    return (
        f"Machine: {len(os.sched_getaffinity(0))} cores ({cpu}), Linux {platform.release()}"
        f"{', virtual disk' if 'hypervisor' in text.split() else ''}; Python {platform.python_version()}; "
        f"commit {commit}{', with changes that are in no commit' if is_changed else ''}."
    )
