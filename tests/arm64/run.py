"""Runs the tests on the emulated arm64 system that `make_system.sh FOLDER` made, part by part; goes on where it was.

    run.py FOLDER [PATH ...] [--seconds N] [--summary]

The exactness gate comes first, then the tests of units, the properties, and the rest. What measures time is left out.
How each test ended is in FOLDER/root/var/lib/tests-4096.jsonl: what failed there is run again, what passed is not.
QEMU_PAGESIZE=16384 lets the system have pages of 16 KiB, with records of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE_BYTES = os.environ.get("QEMU_PAGESIZE", "4096")
RECORDS = f"var/lib/tests-{PAGE_BYTES}.jsonl"  # in the system, as seen from its root
GATE = ("test_exactness", "test_repack")
PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "records", "-m", "not alone")


def parts() -> Iterator[list[Path]]:
    """Yield what is run at a time: a file, or a folder of units."""
    tests = ROOT / "tests"
    integration = sorted((tests / "integration").glob("test_*.py"))
    gate = [path for path in integration if path.stem in GATE]
    folders = sorted({path.parent for path in (tests / "unit").rglob("test_*.py")})
    properties = sorted((tests / "property").glob("test_*.py"))
    rest = [path for path in integration if path not in gate]
    yield from ([path] for path in gate)
    yield from (sorted(folder.glob("test_*.py")) for folder in folders)
    yield from ([path] for path in (*properties, *rest))


def run(folder: Path, paths: list[Path], seconds: float) -> None:
    """Run what is left of the tests in `paths`, and begin none after so many seconds."""
    names = [str(path.relative_to(ROOT)) for path in paths]
    options = ("--records", f"/{RECORDS}", "--seconds", f"{seconds:g}")
    there = ("env", "PYTHONPATH=/edge-run/tests/arm64", *PYTEST, *options, *names)
    subprocess.run([HERE / "enter.sh", folder, *there], check=False)


def summary(records: Path) -> tuple[str, bool]:
    """Return how many tests of each folder ended how, and which failed and why; and whether any did."""
    lines = map(json.loads, records.read_text(encoding="utf-8").splitlines()) if records.exists() else ()
    last = {line["test"]: line for line in lines}
    counts = Counter(("/".join(test.split("/")[:2]), line["outcome"]) for test, line in last.items())
    failed = [line for line in last.values() if line["outcome"] == "failed"]
    text = [f"{folder}: {n} {outcome}" for (folder, outcome), n in sorted(counts.items())]
    text += [f"{line['test']}: {line['why'].splitlines()[-1] if line['why'] else ''}" for line in failed]
    return "\n".join(text), bool(failed)


def main() -> None:
    """Run them, and say how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("path", nargs="*", type=Path, help="files of tests; all without")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further test after so many")
    parser.add_argument("--summary", action="store_true", help="say how the tests ended, and run none")
    given = parser.parse_intermixed_args()
    end_s = time.monotonic() + given.seconds
    chosen = [[path.resolve() for path in given.path]] if given.path else parts()
    for paths in () if given.summary else chosen:
        if time.monotonic() < end_s:
            run(given.folder, paths, end_s - time.monotonic())
    text, has_failures = summary(given.folder / "root" / RECORDS)
    print(text)
    sys.exit(has_failures)


if __name__ == "__main__":
    main()
