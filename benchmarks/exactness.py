"""Logits of streamed runs against llama.cpp all resident, over every architecture that the test suite can make a tiny
random model of.

Per model: a prompt of 300 tokens, 50 decoded tokens, at four budgets from the smallest that works up, chunks of 16 KiB
(4 in models of less than 4 MiB) so that small models have something to stream. A row counts as different unless it is
equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _box import KIT, ROOT, SHARED, write_results

sys.path.insert(0, str(ROOT / "tests"))


def compare(path: Path) -> dict[str, object]:
    """Return the figures of one model, from a child process."""
    script = ROOT / "tests" / "exactness.py"
    chunk_kib = "4" if path.stat().st_size < 4 << 20 else "16"
    command = [sys.executable, str(script), str(path), "--chunk-kib", chunk_kib]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"failure": done.stderr.strip().splitlines()[-1:] or done.returncode}
    figures = json.loads(done.stdout.splitlines()[-1])
    runs = figures["runs"]
    return {
        "passes": figures["rows"],
        "is_finite": figures["finite"],
        "different": sum(run["different_rows"] for run in runs),
        "streamed_runs": sum(run["streamed_bytes"] > 0 for run in runs),
        "runs_with_rows": sum(run["rows_bytes"] > 0 for run in runs),
        "largest_streamed_bytes_per_pass": max(run["streamed_bytes"] for run in runs),
    }


def main() -> None:
    """Measure and write the results."""
    from tiny_models import ARCHITECTURES, make_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = [(name, make_model(name, Path(folder))) for name in arguments.architectures]
        models.append(("kit-dense-q4_0", KIT))
        models += [(path.stem, path) for path in sorted((SHARED / "models").glob("*.gguf"))]
        for name, path in models:
            rows.append({"model": name, "file_bytes": path.stat().st_size, **compare(path)})
            print(rows[-1], flush=True)
    exact = [row for row in rows if row.get("different") == 0 and row["streamed_runs"]]
    others = [str(row["model"]) for row in rows if row not in exact]
    finding = f"{__doc__}\n* Bit-identical: {len(exact)} of {len(rows)} models. Others: {', '.join(others) or 'none'}."
    write_results("exactness", rows, finding)


if __name__ == "__main__":
    main()
