"""Every call that edge-run makes of the system, failing once: reads, opened and written files, mapped memory, threads.

For each kind of run (all in memory, streamed, a mixture of experts, from a packed file, with a draft model, with keys
and values in a file, as two slices, an upload, fetched pieces, a file that is new, and what writes files) each call of
a kind is made to fail in its turn, by a library loaded before the C library (`tests/injector.c`), and the same is done
again with what was open. Right is: an error of ours in one line, or the right result in spite of it; and then the right
result. A sample of llama.cpp's own calls fails too: there a process may end, but has to say what of.
"""

from __future__ import annotations

import argparse
import collections
import errno
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))

RUNS = ("resident", "dense", "copied", "moe", "packed", "draft", "spill", "slices", "upload", "fetched", "first")
WRITERS = ("packing", "inflating", "tracing")
OURS = (
    ("read", "ours", errno.EIO, (*RUNS, *WRITERS)),
    ("open", "ours", errno.EMFILE, (*RUNS, *WRITERS)),
    ("write", "ours", errno.ENOSPC, (*RUNS, *WRITERS)),
    ("map", "ctypes", errno.ENOMEM, RUNS),
    ("thread", "ours", errno.EAGAIN, ("resident", "dense", "moe", "packed", "draft", "upload", "packing")),
)
THEIRS = (
    ("read", "llama", errno.EIO, ("resident", "dense", "plain")),
    ("open", "llama", errno.EMFILE, ("resident", "dense", "plain")),
    ("map", "llama", errno.ENOMEM, ("resident", "dense", "plain")),
    ("heap", "llama", errno.ENOMEM, ("dense", "plain")),
)
THEIR_STEPS = {"heap": 499, "read": 29}  # of llama.cpp's calls a sample
BY = ("ours", "ctypes", "llama")


def is_told(found: dict[str, Any]) -> bool:
    """Whether a process that llama.cpp ended said what it was."""
    return str(found["outcome"]).startswith(("signal", "exit")) and "llama.cpp" in str(found.get("message"))


def main() -> None:
    """Measure and write the results."""
    from faults import is_right, sweep
    from injector import build

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="the runs to try")
    parser.add_argument("--step", type=int, default=1, help="try one of so many calls")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    defects = 0
    with tempfile.TemporaryDirectory() as name:
        library = build(Path(name))
        for kind, caller, error, scenarios in (*OURS, *THEIRS):
            step = max(arguments.step, THEIR_STEPS.get(kind, 1) if caller == "llama" else 1)
            for scenario in scenarios:
                if arguments.only and scenario not in arguments.only:
                    continue
                counts: collections.Counter[str] = collections.Counter()
                for found in sweep(library, scenario, Path(name), kind, caller, error, step):
                    if "outcome" not in found:
                        continue
                    is_fine = is_right(found) or (caller == "llama" and is_told(found))
                    outcome = str(found["outcome"]) if is_fine else f"DEFECT ({found['outcome']})"
                    counts[outcome] += 1
                    defects += not is_fine
                    if not is_fine:
                        print(scenario, kind, found, flush=True)
                rows.append(
                    {"run": scenario, "calls": kind, "by": caller, "errno": errno.errorcode[error], "step": step}
                    | {"tried": counts.total()}
                    | {"outcomes": "; ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))}
                )
                print(*rows[-1].values(), sep="\t", flush=True)
    ours, everything = (sum(r["tried"] for r in rows if r["by"] in by) for by in ({"ours", "ctypes"}, {*BY}))
    finding = (
        f"{__doc__}\n* {ours} calls of ours and {everything - ours} of llama.cpp's failed, one at "
        f"a time; {defects} defects.\n* Of two runs of the same there are not always as many calls: readers race."
    )
    print(finding)
    if not arguments.dry:
        write_results("fault-injection", rows, finding)


if __name__ == "__main__":
    main()
