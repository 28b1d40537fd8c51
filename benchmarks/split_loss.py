"""A device whose server is killed in mid-stream, again and again: every frame is answered, within its deadline.

Real processes and sockets: a server process is started, the device sends frames without a pause, the server is killed
(SIGKILL) after a random time, frames go on, and the next server starts at the same port. The split is an untrained one
of the small network that the tests use.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from _box import ROOT, write_results

from edge_run import SplitModel

sys.path.insert(0, str(ROOT / "tests"))
DEADLINE_S = 0.2
FRAMES_AFTER = 20


def serve(folder: Path, port: int) -> subprocess.Popen[str]:
    """Start a server process and wait until it listens."""
    command = [sys.executable, "-m", "edge_run", "split", "serve", str(folder / "tail.onnx"), "--port", str(port)]
    process = subprocess.Popen([*command, "-t", "1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving")
    return process


def kill_once(model: SplitModel, folder: Path, port: int, pixels: object) -> dict[str, object]:
    """Run frames while a server comes and goes; return what was seen."""
    process = serve(folder, port)
    started_s = time.monotonic()
    while not model.stats.has_server:
        time.sleep(0.01)
    back_s = time.monotonic() - started_s
    killer = threading.Timer(random.uniform(0.01, 0.3), process.kill)
    killer.start()
    reports = []
    while killer.is_alive() or reports[-1].mode != "local":
        reports.append(model.run(pixels).report)  # type: ignore[arg-type]
    first_local = len(reports)
    reports += [model.run(pixels).report for _ in range(FRAMES_AFTER)]  # type: ignore[arg-type]
    process.wait()
    return {
        "frames": len(reports),
        "remote": sum(one.mode != "local" for one in reports),
        "answered": sum(one.answer >= 0 for one in reports),
        "longest_s": max(one.seconds for one in reports),
        "late": sum(one.seconds > DEADLINE_S for one in reports),
        "local_after": sum(one.mode == "local" for one in reports[first_local:]),
        "back_after_s": back_s,
    }


def main() -> None:
    """Kill servers, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    given = parser.parse_args()
    from vision_models import make_bundle, make_pixels

    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        head = make_bundle(Path(folder))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        pixels = make_pixels(1)[0]
        with SplitModel(head, f"127.0.0.1:{port}", mode="code", deadline_s=DEADLINE_S, threads=1) as model:
            rows = [kill_once(model, Path(folder), port, pixels) for _ in range(given.kills)]
    frames, answered, late = (sum(int(str(row[key])) for row in rows) for key in ("frames", "answered", "late"))
    longest = sorted(float(row["longest_s"]) for row in rows)  # type: ignore[arg-type]
    local = all(row["local_after"] == FRAMES_AFTER for row in rows)
    finding = (
        f"{__doc__}\n{given.kills} servers were killed under {frames:,} frames, of which {answered:,} were answered. "
        f"The longest took {longest[-1] * 1e3:.0f} ms, the deadline was {DEADLINE_S * 1e3:.0f} ms: {late} "
        f"frames were later. After the first local frame all were "
        f"{'local' if local else 'NOT local'}, until the next server was there."
    )
    print(finding)
    write_results("split-loss", rows, finding)


if __name__ == "__main__":
    main()
