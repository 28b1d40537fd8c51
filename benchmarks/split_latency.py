"""Latency of a split over a throttled link: the chosen mode against every fixed one, and after the bandwidth changes.

Real processes: a device, a server, and between them a relay that lets bytes through at a rate, each way, 1 ms later.
The device is made 8 times slower than this machine's core by computing its part of a frame 8 times. The split is that
of `benchmarks/split.py`; frames are files of CIFAR-10's test images. Each mode runs alone, three
times in turn with the others: 10 frames that do not count, then 80, or 1.3 s. Then the bandwidth changes under the
chosen mode every 3 s; counted is what comes later than 1 s after.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

from _box import MODELS, SHARED, need, skip, write_results

BUNDLE = MODELS / "split-resnet56"
MEGABITS = (0.1, 0.5, 1.0, 5.0, 20.0, 100.0)
CHANGES = (100.0, 0.1, 5.0, 0.1, 100.0, 1.0)
FIXED = ("local", "image", "code 0", "code 1", "code 2", "code 3")
SLOWER, DELAY_S = 8, 0.001
FRAMES, WARM_FRAMES, MOST_S, ROUNDS = 80, 10, 1.3, 3
CHANGE_EVERY_S, SETTLE_S = 3.0, 1.0


class Relay:
    """Passes bytes on at `bytes_per_s` each way, all connections together, and DELAY_S later."""

    def __init__(self, port: int) -> None:
        self._target, self.bytes_per_s = port, 1e9
        self._free_s = {"up": 0.0, "down": 0.0}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            for way, source, target in (("up", device, server), ("down", server, device)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(way, source, target), daemon=True).start()

    def _pass_on(self, way: str, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(4096):
                with self._lock:
                    now_s = time.monotonic()
                    self._free_s[way] = max(self._free_s[way], now_s) + len(data) / self.bytes_per_s
                    wait_s = self._free_s[way] + DELAY_S - now_s
                time.sleep(wait_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()


def run_device(port: int, images: Path) -> None:
    """Be the device: for each line of standard input, `frames seconds mode`, answer frames and print their reports."""
    from edge_run.runtime.split import model as split_model

    plain = split_model.run_session

    def slow(session: Any, value: Any) -> Any:
        return [plain(session, value) for _ in range(SLOWER)][-1]

    split_model.run_session = slow
    files = [path.read_bytes() for path in sorted(images.rglob("*.jpg"))[::50]]
    for line in sys.stdin:
        frames, most_s, mode = line.strip().split(" ", 2)
        options = {"mode": mode, "deadline_s": 5.0, "threads": 1}
        with split_model.SplitModel(BUNDLE / "head.onnx", f"127.0.0.1:{port}", **options) as model:
            found, end_s = [], time.monotonic() + float(most_s)
            while len(found) < int(frames) and time.monotonic() < end_s:
                report = model.run(files[len(found) % len(files)]).report
                found.append((time.monotonic(), report.seconds, report.mode))
        print(json.dumps(found), flush=True)


class Device:
    """The device's process."""

    def __init__(self, port: int, images: Path) -> None:
        command = [sys.executable, __file__, "--device", str(port), str(images)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, mode: str, frames: int, most_s: float) -> list[tuple[float, float, str]]:
        """Return (clock, seconds, mode) of frames in `mode`."""
        self.start(mode, frames, most_s)
        return self.result()

    def start(self, mode: str, frames: int, most_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{frames} {most_s} {mode}\n")
        self._process.stdin.flush()

    def result(self) -> list[tuple[float, float, str]]:
        assert self._process.stdout is not None
        return [tuple(one) for one in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def p50_ms(frames: list[tuple[float, float, str]]) -> float:
    return 1e3 * statistics.median(one[1] for one in frames)


def measure(relay: Relay, device: Device) -> list[dict[str, object]]:
    """Return the latency of every mode at every bandwidth."""
    rows = []
    for megabits in MEGABITS:
        relay.bytes_per_s = megabits * 1e6 / 8
        row: dict[str, object] = {"megabits_per_s": megabits}
        frames: dict[str, list[tuple[float, float, str]]] = {mode: [] for mode in (*FIXED, "auto")}
        for mode in [*frames] * ROUNDS:
            frames[mode] += device.run(mode, WARM_FRAMES + FRAMES, MOST_S)[WARM_FRAMES:]
        row |= {mode: p50_ms(found) for mode, found in frames.items()}
        names = [one[2] for one in frames["auto"]]
        row["chosen"] = max(set(names), key=names.count)
        best = min(FIXED, key=lambda one: row[one])  # type: ignore[arg-type,return-value]
        row["best"], row["over_best"] = best, row["auto"] / row[best] - 1  # type: ignore[operator]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def change(relay: Relay, device: Device, best_ms: dict[float, float]) -> list[dict[str, object]]:
    """Return the latency from one second after each change of the bandwidth on."""
    relay.bytes_per_s = CHANGES[0] * 1e6 / 8
    device.start("auto", 1_000_000, CHANGE_EVERY_S * len(CHANGES))
    starts = []
    time.sleep(0.7)  # it opens its files
    for megabits in CHANGES:
        relay.bytes_per_s = megabits * 1e6 / 8
        starts.append(time.monotonic())
        time.sleep(CHANGE_EVERY_S)
    frames = device.result()
    rows = []
    for megabits, start_s in zip(CHANGES, starts, strict=True):
        part = [one for one in frames if start_s + SETTLE_S <= one[0] - one[1] and one[0] < start_s + CHANGE_EVERY_S]
        found = p50_ms(part) if part else float("nan")
        names = [one[2] for one in part] or ["none"]
        rows.append(
            {"changed_to_megabits_per_s": megabits, "frames": len(part), "auto": found,
             "chosen": max(set(names), key=names.count), "over_best": found / best_ms[megabits] - 1}
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs=2, metavar=("PORT", "IMAGES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device:
        run_device(int(given.device[0]), Path(given.device[1]))
        return
    need(SHARED / "data" / "vision")
    if not (BUNDLE / "tail.onnx").exists():
        skip(f"nothing was trained into {BUNDLE} so far: benchmarks/split.py --train")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(SHARED / "data" / "vision" / "cifar10-jpeg.zip") as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("test/")])
        command = [
            sys.executable,
            "-m",
            "edge_run",
            "split",
            "serve",
            str(BUNDLE / "tail.onnx"),
            "--port",
            "0",
            "-t",
            "1",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        relay = Relay(int(server.stdout.readline().rsplit(":", 1)[1]))
        device = Device(relay.port, Path(folder))
        try:
            rows = measure(relay, device)
            best_ms = {row["megabits_per_s"]: row[str(row["best"])] for row in rows}
            changes = change(relay, device, best_ms)  # type: ignore[arg-type]
        finally:
            device.close()
            server.kill()
            server.wait()
    lines = [__doc__ or "", f"| Mbit/s | {' | '.join(FIXED)} | chosen: p50, ms | most often | over the best fixed, % |"]
    lines.append("|---" * (len(FIXED) + 4) + "|")
    for row in rows:
        figures = " | ".join(f"{row[mode]:.1f}" for mode in (*FIXED, "auto"))
        lines.append(f"| {row['megabits_per_s']} | {figures} | {row['chosen']} | {100 * row['over_best']:+.1f} |")  # type: ignore[operator]
    lines += [
        "",
        "From 1 s after a change on:",
        "",
        "| to Mbit/s | frames | p50, ms | most often | over the best fixed, % |",
    ]
    lines.append("|---|---|---|---|---|")
    for row in changes:
        lines.append(
            f"| {row['changed_to_megabits_per_s']} | {row['frames']} | {row['auto']:.1f} | {row['chosen']} | "
            f"{100 * row['over_best']:+.1f} |"  # type: ignore[operator]
        )
    print(*lines, sep="\n")
    write_results("split-latency", [*rows, *changes], "\n".join(lines))


if __name__ == "__main__":
    main()
