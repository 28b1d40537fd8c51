"""Several texts at once whose keys and values have no room together: what is held, and whether tokens are the same.

As many texts as `--sequences` are read and continued in shared passes, in a box whose memory is the budget, in which
their keys and values do not fit. Compared are the same run in a budget that holds all of them, token by token, and
llama.cpp alone (llama-cpp-python, weights by mmap, the same texts in as many sequences) in a box of the same size.
Prompts are read in full passes by all, so that passes are the same whatever they take.

    kv_spill_many.py --model MODEL.gguf --text FILE [--memory 400MiB] [--sequences 8] [--each 2048] [--tokens 96]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _box import READAHEAD_KB, ROOT, file_at, run_worker, skip, write_results
from edgebox import NO_BOX, boxed

from edge_run.base.units import format_size, parse_size

WORKER = ROOT / "benchmarks" / "_kv_spill_many_worker.py"
PLENTY = "8GiB"


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=file_at, required=True)
    parser.add_argument("--text", type=file_at, required=True)
    parser.add_argument("--memory", default="400MiB")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--each", type=int, default=2048, help="tokens of a text, its prompt and its answer")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer: so many that all texts are there at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=int, default=1800, help="seconds after which llama.cpp is ended")
    parser.add_argument("--name", default="kv-spill-many")
    arguments = parser.parse_args()
    shape = [arguments.model, "--text", arguments.text, "--sequences", arguments.sequences, "--each", arguments.each]
    shape += ["--tokens", arguments.tokens, "--threads", arguments.threads]
    box: dict[str, Any] = {"memory": parse_size(arguments.memory)}
    spilled = run_worker([*shape, "--memory", arguments.memory], box, arguments.model, WORKER)
    print(spilled, flush=True)
    plain = run_plain([*shape, "--plain"], box, arguments.model, arguments.patience)
    print(plain, flush=True)
    plenty = run_worker([*shape, "--memory", PLENTY], worker=WORKER)
    print(plenty, flush=True)
    is_same = spilled.pop("answers") == plenty.pop("answers")
    rows = [
        {"run": "edge-run, --kv-spill", **flat(spilled)},
        {"run": "llama.cpp", **flat(plain)},
        {"run": f"edge-run, {PLENTY}", **flat(plenty)},
    ]
    write_results(arguments.name, rows, finding(rows, arguments, is_same=is_same))


def run_plain(command: list[object], box: dict[str, Any], model: Path, patience_s: int) -> dict[str, Any]:
    """Return the figures of llama.cpp alone in a box, whose memory may be too little for it."""
    limited = boxed([sys.executable, str(WORKER), *map(str, command)], readahead_kb=READAHEAD_KB, **box, cold=model)
    with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            said, errors = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # and with it what runs in the box, or it would go on beside the next run
            process.communicate()
            return {"ended": f"after {patience_s:,} s it was not through"}
    if process.returncode == NO_BOX:
        skip(errors.strip())
    figures = {"box": json.loads(errors.splitlines()[-1])}
    if figures["box"]["oom_kills"]:
        return {**figures, "ended": "killed for want of memory"}
    if process.returncode:
        raise SystemExit(errors[-3000:])
    found: dict[str, Any] = {**figures, **json.loads(said.splitlines()[-1])}
    found.pop("answers")
    return found


def flat(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures with those of the box among them."""
    box = figures.pop("box", {})
    return {
        **figures,
        **{f"box_{name}": box[name] for name in box if name in ("peak_bytes", "oom_kills", "read_bytes")},
    }


def finding(rows: list[dict[str, Any]], arguments: argparse.Namespace, *, is_same: bool) -> str:
    """Return the rows for a reader."""
    lines = [
        "| run | seconds | CPU s | held at most | read | away at most | written |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "ended" in row:
            held = format_size(row["box_peak_bytes"]) if "box_peak_bytes" in row else "-"
            lines.append(f"| {row['run']} | {row['ended']} | - | {held} | - | - | - |")
            continue
        sizes = (format_size(row.get(key, 0)) for key in ("peak_bytes", "read_bytes", "away_bytes", "written_bytes"))
        lines.append(f"| {row['run']} | {row['wall_s']} | {row['cpu_s']} | {' | '.join(sizes)} |")
    peak, budget = rows[0]["peak_bytes"], parse_size(arguments.memory)
    return (
        f"{arguments.model.name}, {arguments.sequences} texts of {arguments.each:,} tokens, {arguments.tokens} of them "
        f"answered, in {arguments.memory}; {arguments.threads} threads.\n\n" + "\n".join(lines) + "\n\n"
        f"Keys and values of all take {format_size(rows[0]['kv_bytes'])}. The run with --kv-spill held "
        f"{peak / budget:.3f} of its budget, {rows[0]['box_oom_kills']} kills; its tokens are "
        f"{'those' if is_same else '**not** those'} of the run with room for all."
    )


if __name__ == "__main__":
    main()
