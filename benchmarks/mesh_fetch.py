"""What fetching layers from another device takes, over loopback: seconds, bytes a second, the memory of who fetches.

A coordinator with the file and a worker without it, two processes with caches of their own; most layers are the
worker's, since the coordinator's budget has room for few. Run twice: the second time the layers are there. Tokens are
compared with those of one device. Part of opening are the processes' own start, a look at the file, and the plan.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from _box import file_at, grown_model, write_results
from _mesh_box import need_mesh, run
from _usage import peak_bytes

from edge_run.base.units import GIB, MIB
from edge_run.runtime.fetch.fingerprint import fingerprint
from mesh_processes import MeshOfProcesses

SAID = re.compile(r"after ([\d.]+) s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at, nargs="?", help="[default: the kit model grown to 1 GB]")
    parser.add_argument("--budget", default="450MiB", help="of the coordinator")
    given = parser.parse_args()
    need_mesh()
    given.model = given.model or grown_model("1G", 24)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as temporary:
        folder = Path(temporary)
        cache = ["--cache", str(folder / "cache-here")]
        fingerprint([given.model], folder / "cache-here")  # once for each file, and not part of fetching
        wanted = run(folder, given.model, ["--alone", *cache])["tokens"]
        mesh = MeshOfProcesses(folder, given.model)
        try:
            worker = mesh.spawn("there", memory="4GiB", chunk_bytes=2 * MIB, fetch="8GiB")
            worker.wait_ready()
            mesh.prepare_folder(folder / "coordinator")
            for what in ("first run", "second run"):
                flags = ["--workers", "1", "--memory", given.budget, *cache]
                found = run(folder / "coordinator", given.model, flags)
                seconds = sum(float(one) for line in found["said"] for one in SAID.findall(line))
                held = sum(path.stat().st_blocks * 512 for path in folder.rglob("there/cache/fetched/*/*.gguf"))
                rows.append(
                    {
                        "run": what,
                        "layers": found["layers"].get("there", 0),
                        "fetched_gib": round(held / GIB, 3) if seconds else 0,
                        "fetch_s": seconds,
                        "mb_per_s": round(held / seconds / 1e6) if seconds else "",
                        "worker_peak_mib": round(peak_bytes(worker.pid) / MIB),
                        "tokens": "identical" if found["tokens"] == wanted else "different",
                    }
                )
                print(rows[-1], found["said"], flush=True)
        finally:
            mesh.close()
    head = list(rows[0])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    write_results("mesh-fetch", rows, "\n".join([__doc__ or "", f"Model: {given.model.name}.", "", *lines]))


if __name__ == "__main__":
    main()
