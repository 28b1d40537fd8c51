"""A model that streams from one drive, and from two that each hold it (`--also`).

Two loop devices with file systems of their own, each limited to so many bytes a second for the control group of the
run. Model: the kit model grown to 2 GB (16 layers, Q4_0); budget: half of it. In each round, one after the other and
cold: the first drive alone, the second alone, both. What counts is the time of a token with one drive over that with
both; it is to be 1.9 at least. Takes root, loop devices and mkfs.ext4.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _box import MODELS, file_at, grown_model, run_worker, sameness, skip, spread, write_results

BUDGET_SHARE = 0.5
MARGIN_BYTES = 256 << 20  # of a file system, for what is not the model


@contextlib.contextmanager
def drive_with(model: Path) -> Iterator[Path]:
    """Yield a copy of `model` on a drive of its own for a block. Ends this process where no drive can be made."""
    MODELS.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        image = Path(undo.enter_context(tempfile.NamedTemporaryFile(dir=MODELS, suffix=".drive")).name)
        os.truncate(image, model.stat().st_size + MARGIN_BYTES)
        place = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=MODELS)))
        try:
            _call("mkfs.ext4", "-q", "-F", image)
            device = _call("losetup", "--find", "--show", "--direct-io=on", image)
            undo.callback(_call, "losetup", "--detach", device)
            _call("mount", device, place)
            undo.callback(_call, "umount", place)
        except (OSError, subprocess.CalledProcessError) as error:
            skip(f"no drive can be made: {error}")
        yield Path(shutil.copy(model, place))


def _call(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=6)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--mbps", type=int, default=250, help="of each drive")
    parser.add_argument("--model", type=file_at, help="another model")
    arguments = parser.parse_args()
    model = arguments.model or grown_model(arguments.size, 16)
    budget = int(model.stat().st_size * BUDGET_SHARE)
    rows = []
    with drive_with(model) as first, drive_with(model) as second:
        for number in range(arguments.rounds):
            figures = {}
            for name, path, also in (("first", first, None), ("second", second, None), ("both", first, second)):
                worker = [path, "--memory", budget, "--decode", arguments.decode, "--prompt", 4]
                worker += ["--also", also] if also else []
                box = {"memory": None, "disk_mbps": arguments.mbps}
                figures[name] = run_worker(worker, box, [first, second])
            both = figures["both"]
            alone_s = figures["first"]["mean_token_s"], figures["second"]["mean_token_s"]
            rows.append(
                {
                    "round": number,
                    "mbps": arguments.mbps,
                    "first_token_s": alone_s[0],
                    "second_token_s": alone_s[1],
                    "both_token_s": both["mean_token_s"],
                    "times_as_fast": min(alone_s) / both["mean_token_s"],
                    "copy_share": both["copy_share"],
                    "bytes_per_token": both["bytes_per_token"],
                    "peak_bytes": both["peak_bytes"],
                    "budget_bytes": budget,
                    "same_token": len({one["last_token"] for one in figures.values()}) == 1,
                }
            )
            print(rows[-1], flush=True)
    times = spread(float(str(row["times_as_fast"])) for row in rows)
    finding = (
        f"{__doc__}\n* Two drives of {arguments.mbps} MB/s: {times} times as fast as the faster one; {sameness(rows)}."
    )
    write_results("two-drives", rows, finding)


if __name__ == "__main__":
    main()
