"""Logits with keys and values in a file against llama.cpp with all in memory, over every architecture that the test
suite can make a tiny random model of.

    spill_exactness.py [ARCHITECTURE ...]

Before each pass all that is complete is sent away, and one attention at a time has its rows back. A text of some pieces
grows, is guessed at, and is cut in what is away. A row counts as different unless it is equal bit for bit. Models
whose context has nothing that may be away, as that of a recurrent model, are told apart, with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _box import ROOT, write_results

from edge_run.base.config import ModelConfig
from edge_run.base.errors import EdgeRunError

sys.path.insert(0, str(ROOT / "tests"))

PATIENCE_S = 600


def one(path: Path) -> dict[str, Any]:
    """Return the figures of one model. What is away is unreadable: a read of it elsewhere ends this process."""
    from edge_run.runtime.engine.engine import Engine
    from edge_run.runtime.planning import spill_terms
    from spilling import open_spilling, spill_of
    from talks import OPTIONS, Talk

    def say(talk: Talk) -> None:
        talk.prompt(400)
        talk.step(3)
        talk.verify(5, 2)
        talk.prompt(150)
        talk.step(2)
        talk.rewind(170)
        talk.step(3)

    spill_terms.ATTENTIONS_AT_ONCE = 1
    try:
        engine = open_spilling(path, path.parent)
    except EdgeRunError as error:
        return {"why": str(error).partition(": ")[2]}
    except AssertionError as error:
        return {"why": str(error)}
    spill = spill_of(engine)
    spill.room_bytes = 0
    found = Talk(engine.decoder, spill.texts[0].check)
    say(found)
    figures = {"written_bytes": spill.file.written_bytes, "read_bytes": spill.file.read_bytes}
    engine.close()
    plain = Engine.open(path, ModelConfig(**OPTIONS, backend="llama.cpp"))
    wanted = Talk(plain.decoder)
    say(wanted)
    plain.close()
    different = sum(not np.array_equal(a, b) for a, b in zip(wanted.rows, found.rows, strict=True))
    is_finite = all(np.isfinite(rows).all() for rows in wanted.rows)
    return {"passes": len(found.rows), "different": different, "is_finite": bool(is_finite), **figures}


def compare(path: Path) -> dict[str, Any]:
    """Return the figures of one model, from a child process."""
    command = [sys.executable, __file__, "--one", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return {"failure": f"not through after {PATIENCE_S} s"}
    if done.returncode != 0:
        return {"failure": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and write the results."""
    from tiny_models import ARCHITECTURES, make_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return
    rows = list[dict[str, Any]]()
    for name in arguments.architectures:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"model": name, **compare(make_model(name, Path(folder)))})
        print(rows[-1], flush=True)
    spilled = [row for row in rows if "different" in row and row["read_bytes"]]
    exact = [row for row in spilled if row["different"] == 0 and row["is_finite"]]
    lines = [f"* Bit-identical: {len(exact)} of {len(spilled)} models that have rows away."]
    lines += [f"* **{row['model']}** differs or failed: {row}" for row in rows if row in spilled and row not in exact]
    lines += [f"* {row['model']} failed: {row['failure']}" for row in rows if "failure" in row]
    rest = [row for row in rows if row not in spilled and "failure" not in row]
    others = [f"{row['model']} ({row.get('why', 'nothing was away')})" for row in rest]
    lines += [f"* Others: {len(others)}: {'; '.join(others) or 'none'}."]
    write_results("spill-exactness", rows, f"{__doc__}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
