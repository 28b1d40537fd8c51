#!/usr/bin/env python3
"""Do three uneven nodes say what one device says, each inside its budget? And slices, of every architecture?

    mesh_exact.py [--architectures] [--nodes] [MODEL ...] [--context 16384] [--prompt 1000] [--tokens 24]

Nodes: real processes with a real mosquitto, budgets of 20, 35 and 60 % of the model for the whole process, so that the
model fits none of them: those named, or a dense model and a mixture of experts that write sensible text, and
architectures that scale their input (granite, gemma) with random weights. In a long context keys and values are a good
part of a budget, and take room from weights as they are written. Architectures: three engines in one process with the
layers dealt out in turn, resident and with the fewest frames that can work, against llama.cpp's own loader, logit by
logit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import ROOT, file_at, grown_model, grown_moe, write_results
from _mesh_box import need_mesh, run
from _usage import peak_bytes

SHARES = (0.20, 0.35, 0.60)
SCALING = ("granite", "gemma")


def three_nodes(model: Path, *lengths: object) -> dict[str, Any]:
    """Run a model on one device and on three, and compare. lengths: flags of context, prompt and answer."""
    from mesh_processes import MeshOfProcesses

    size = model.stat().st_size
    budgets = [int(size * share) for share in SHARES]
    flags = [str(one) for one in lengths]
    with tempfile.TemporaryDirectory() as folder:
        cache = ["--cache", folder]
        wanted = run(Path(folder), model, [*flags, *cache, "--alone"])
        mesh = MeshOfProcesses(Path(folder), model)
        try:
            for name, budget in zip(("w35", "w60"), budgets[1:], strict=True):
                mesh.spawn(name, str(budget), (), 2 << 20, folder)
            for worker in mesh.workers.values():
                worker.wait_ready()
            here = mesh.prepare_folder(Path(folder) / "here")
            found = run(here, model, [*flags, *cache, "--memory", str(budgets[0]), "--workers", "2"])
            peaks = [found["peak_bytes"], *(peak_bytes(worker.pid) for worker in mesh.workers.values())]
        finally:
            mesh.close()
    return {
        "model": model.name,
        "model_mb": size // 10**6,
        "layers": " ".join(f"{name}:{count}" for name, count in found["layers"].items()),
        "rounds": found["rounds"],
        "kv_mb": found["kv_bytes"] // 10**6,
        "lent_mb": found["lent_bytes"] // 10**6,
        "identical": found["tokens"] == wanted["tokens"],
        "different_tokens": sum(a != b for a, b in zip(found["tokens"], wanted["tokens"], strict=True)),
        "budget_mb": " ".join(str(budget // 10**6) for budget in budgets),
        "peak_mb": " ".join(str(peak // 10**6) for peak in peaks),
        "is_within_budget": all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)),
        "left_out": "; ".join(found["left_out"].values()),
    }


def large_model(name: str, folder: Path) -> Path:
    """Return a model of random weights with 40 layers, about 1.3 GB."""
    from tiny_models import ARCHITECTURES, make_model

    small = ARCHITECTURES[name]
    ARCHITECTURES[name] = dataclasses.replace(small, n_layer=40, n_embd=1024, n_ff=4096, n_head=16, n_head_kv=4)
    try:
        return make_model(name, folder)
    finally:
        ARCHITECTURES[name] = small


def slices(path: Path, *flags: str) -> dict[str, Any]:
    """Compare slices of one model with the whole."""
    command = [sys.executable, str(ROOT / "tests" / "slices.py"), str(path), "--owners", "1,2,1", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)
    if done.returncode:
        return {"outcome": (done.stderr.strip().splitlines() or ["ended without a word"])[-1][:160]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "outcome": "compared",
        "rows": found["rows"],
        "different_rows": found["different_rows"] + found["different_again"],
        "units": found["units"],
        "cut_bytes": max(found["cut_bytes"]),
        "streamed_mb": round(sum(found["streamed_bytes"]) / 1e6, 1),
    }


def all_architectures() -> None:
    """Compare every architecture that tests/tiny_models.py makes."""
    from tiny_models import ARCHITECTURES, make_model

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            path = make_model(name, Path(folder))
            for mode, flags in (("resident", ("--again",)), ("streamed", ("--streams",))):
                rows.append({"model": name, "mode": mode, **slices(path, *flags)})
                print(rows[-1], file=sys.stderr)
            path.unlink()
    compared = [row for row in rows if row["outcome"] == "compared"]
    exact = [row for row in compared if row["different_rows"] == 0]
    failed = sorted({f"{row['model']} ({row['outcome']})" for row in rows if row["outcome"] != "compared"})
    write_results(
        "mesh-slices",
        rows,
        f"Three engines with the layers dealt out in turn, against llama.cpp's own loader: {len(exact)} of "
        f"{len(compared)} comparisons ({len({row['model'] for row in compared})} architectures, resident with the "
        "layers dealt out twice, and streamed with the fewest frames) are identical in every logit of a prompt of 70 "
        f"tokens in micro-batches of 32 and 6 tokens. Not compared: {', '.join(failed) or 'none'}.",
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader."""
    lines = [
        "| model | layers | budgets, MB | peaks, MB | keys and values of the first node, MB | lent at first, MB |",
        "|---|---|---|---|---|---|",
    ]
    shown = ("model", "layers", "budget_mb", "peak_mb", "kv_mb", "lent_mb")
    lines += [f"| {' | '.join(str(row[name]) for name in shown)} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", action="store_true")
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("models", nargs="*", type=file_at, metavar="MODEL")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=70)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="mesh-exact")
    arguments = parser.parse_args()
    if not (arguments.architectures or arguments.nodes):
        parser.error("--architectures, --nodes or both?")
    if arguments.architectures:
        all_architectures()
    if arguments.nodes:
        need_mesh()
        flags = [
            part
            for name in ("context", "prompt", "tokens", "threads")
            for part in (f"--{name}", getattr(arguments, name))
        ]
        named = arguments.models or (grown_model("1G", 64), grown_moe("2G"))
        rows = [three_nodes(model, *flags) for model in named]
        for name in () if arguments.models else SCALING:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(three_nodes(large_model(name, Path(folder)), *flags))
        for row in rows:
            print(row, file=sys.stderr)
        write_results(
            arguments.name,
            rows,
            "Three nodes with budgets of 20, 35 and 60 % of the model for the whole process; the model fits none. "
            f"{arguments.tokens} greedy tokens after a prompt of {arguments.prompt}, in a context of "
            f"{arguments.context:,}, against one device with all in memory: identical in "
            f"{sum(row['identical'] for row in rows)} of {len(rows)} models; every node within its budget in "
            f"{sum(row['is_within_budget'] for row in rows)} of {len(rows)}.\n\n{table(rows)}",
        )


if __name__ == "__main__":
    main()
