"""Logits of mixtures of experts, streamed, against llama.cpp all resident, under every policy and way to prefetch.

Models: kit-moe as it was trained and grown (wider), and tiny random ones: gpt-oss, deepseek2 with shared experts, and
deepseek32 with gate and up in one tensor. Per combination: a prompt of 300 tokens and 100 decoded tokens, at three
budgets that stream (one with the fewest frames that work by expert), and resident. `auto` lets the controller switch
tunables as it goes. A row counts as different unless it is equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _box import KIT_MOE, ROOT, need, write_results

from edge_run import inflate
from edge_run.base.config import EXPERT_POLICIES, EXPERT_PREFETCH
from edge_run.base.units import MIB

sys.path.insert(0, str(ROOT / "tests"))
SCRIPT = ROOT / "tests" / "exactness.py"
TINY = ("gpt-oss", "deepseek2", "deepseek32")
GROWN_BYTES = 256 * MIB


def compare(path: Path, policy: str, prefetch: str) -> dict[str, object]:
    """Return the figures of one combination, from a child process."""
    flags = ["--decode", "100", "--by-expert", "--expert-policy", policy, "--expert-prefetch", prefetch]
    done = subprocess.run([sys.executable, str(SCRIPT), str(path), *flags], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"failure": done.stderr.strip().splitlines()[-1:] or done.returncode}
    figures = json.loads(done.stdout.splitlines()[-1])
    runs = figures["runs"]
    return {
        "rows": figures["rows"] * len(runs),
        "different": sum(run["different_rows"] for run in runs),
        "runs_by_expert": sum(run["expert_bytes"] > 0 for run in runs),
    }


def main() -> None:
    """Measure and write the results."""
    from tiny_models import make_model

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need(KIT_MOE)
    pairs = [(policy, "off") for policy in EXPERT_POLICIES] + [("default", name) for name in EXPERT_PREFETCH[2:]]
    pairs += [("default", "auto"), ("lru", "2")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        grown = Path(folder) / "kit-moe-grown.gguf"
        inflate(KIT_MOE, grown, GROWN_BYTES)
        models = [make_model(name, Path(folder)) for name in TINY]
        for path in (KIT_MOE, grown, *models):
            for policy, prefetch in pairs:
                named = {"model": path.stem, "policy": policy, "prefetch": prefetch}
                rows.append({**named, **compare(path, policy, prefetch)})
                print(rows[-1], flush=True)
    exact = [row for row in rows if row.get("different") == 0 and row["runs_by_expert"]]
    finding = f"{__doc__}\n* Bit-identical: {len(exact)} of {len(rows)} combinations."
    write_results("mixture-exactness", rows, finding)


if __name__ == "__main__":
    main()
