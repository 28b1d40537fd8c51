"""A storm of clients on one `edge-run serve`: does `/health` still answer at once, and is every answer there?

    python benchmarks/serve_storm.py [--seconds 300] [--clients 1000] [--slow 100] [--vanish 100] [--flood 10]

Most clients connect and stay, and ask for a short answer again and again, each with a few seconds between; slow ones
send their request a byte at a time; others vanish in the middle of an answer; floods ask for `/v1/models` as fast as
they can. One more process asks for `/health` ten times a second, also where it still waits for an answer. The clients
are processes of their own. An answer is lost where a request neither gets one nor a refusal (429, 503). It tells the
times of `/health`, what came of all requests, and what the threads of the server took of the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import math
import multiprocessing
import os
import queue
import random
import sys
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import httpx
from _box import write_results

from kit_models import KIT
from served import Served, served

PROCESSES = 4
PAUSE_S, HEALTH_EVERY_S, SLOW_BYTE_S = 5.0, 0.1, 0.05
ANSWER_S = 120.0
WORST_HEALTH_S = 0.1
REFUSED = (429, 503)


def request(path: str, body: Any = None) -> bytes:
    """Return the bytes of a request, on a connection that stays."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer that has a length; return its status and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return int(head[9:12]), await reader.readexactly(int(length.split(b":")[1]))


async def waited_for(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer. Raises TimeoutError where it does not come."""
    status, _ = await asyncio.wait_for(answer_of(reader), ANSWER_S)
    return status


class Clients:
    """The clients of one process. counts: what came of their requests."""

    def __init__(self, host: str, port: int, ends_s: float, seed: int) -> None:
        self.host, self.port, self.ends_s, self.chance = host, port, ends_s, random.Random(seed)
        self.counts = collections.Counter[str]()
        self.health_s: list[float] = []

    async def run(self, n_usual: int, n_slow: int, n_vanish: int, n_flood: int, has_health: bool) -> None:
        """Be so many clients of each kind until the end."""
        kinds = [(self.usual, n_usual), (self.slow, n_slow), (self.vanish, n_vanish), (self.flood, n_flood)]
        tasks = [self._again(kind) for kind, number in kinds for _ in range(number)]
        await asyncio.gather(*tasks, *([self.health()] if has_health else []))

    async def _again(self, kind: Any) -> None:
        await asyncio.sleep(self.chance.random() * PAUSE_S)
        while time.time() < self.ends_s:
            try:
                await kind()
            except asyncio.TimeoutError:
                self.counts[f"{kind.__name__}: lost, no answer"] += 1
            except (OSError, asyncio.IncompleteReadError):
                self.counts[f"{kind.__name__}: lost, connection"] += 1
                await asyncio.sleep(1.0)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    def _count(self, kind: str, status: int) -> None:
        came = "answered" if status == 200 else f"refused {status}" if status in REFUSED else f"lost, status {status}"
        self.counts[f"{kind}: {came}"] += 1

    async def usual(self) -> None:
        """Ask on one connection, with pauses."""
        reader, writer = await self._connect()
        try:
            while time.time() < self.ends_s:
                writer.write(request("/v1/completions", {"prompt": f"{self.chance.random()}", "max_tokens": 4}))
                status = await waited_for(reader)
                self._count("usual", status)
                await asyncio.sleep(PAUSE_S * (0.5 + self.chance.random()))
        finally:
            writer.close()

    async def slow(self) -> None:
        """Send and read slowly."""
        reader, writer = await self._connect()
        try:
            for byte in request("/v1/completions", {"prompt": "Slow", "max_tokens": 2}):
                writer.write(bytes([byte]))
                await asyncio.sleep(SLOW_BYTE_S)
            status = await waited_for(reader)
            self._count("slow", status)
        finally:
            writer.close()

    async def vanish(self) -> None:
        """Go away in the middle of an answer."""
        reader, writer = await self._connect()
        writer.write(request("/v1/completions", {"prompt": "Gone", "max_tokens": 64, "stream": True}))
        await asyncio.wait_for(reader.read(200), ANSWER_S)
        writer.transport.abort()
        self.counts["vanish: went"] += 1
        await asyncio.sleep(self.chance.random() * PAUSE_S)

    async def flood(self) -> None:
        """Ask without a pause."""
        reader, writer = await self._connect()
        try:
            while time.time() < self.ends_s:
                writer.write(request("/v1/models"))
                status = await waited_for(reader)
                self._count("flood", status)
        finally:
            writer.close()

    async def health(self) -> None:
        """Ask for the health ten times a second, each on a new connection; no answer is waited for before that."""
        asked = set[asyncio.Task[None]]()
        while time.time() < self.ends_s:
            asked.add(asyncio.create_task(self._health_once()))
            await asyncio.sleep(HEALTH_EVERY_S)
        await asyncio.gather(*asked)

    async def _health_once(self) -> None:
        began_s = time.perf_counter()
        try:
            reader, writer = await self._connect()
            writer.write(request("/health"))
            self._count("health", await waited_for(reader))
            writer.close()
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            self.counts[f"health: lost, {type(error).__name__}"] += 1
        self.health_s.append(time.perf_counter() - began_s)


def client_process(
    found: Queue[Any], place: tuple[str, int, float, int], numbers: tuple[int, ...], is_health: bool
) -> None:
    """Be the clients of one process."""
    clients = Clients(*place)
    usual, slow, vanish, flood = numbers
    asyncio.run(clients.run(usual, slow, vanish, flood, is_health))
    found.put((clients.counts, clients.health_s))


def thread_times(pid: int) -> dict[str, float]:
    """Return the seconds of processor that each thread of a process has had, by its name."""
    ticks, times = os.sysconf("SC_CLK_TCK"), collections.Counter[str]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        text = (task / "stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()
        times[(task / "comm").read_text().strip()] += (int(fields[11]) + int(fields[12])) / ticks
    return dict(times)


def at(values: list[float], share: float) -> float:
    """Return the value that so large a share of all does not exceed."""
    ordered = sorted(values)
    return round(ordered[math.ceil(share * len(ordered)) - 1], 4)


def main() -> None:
    """Let the storm loose; say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--model", type=Path, default=KIT)
    for name, number in (("clients", 1000), ("slow", 100), ("vanish", 100), ("flood", 10)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    with served(given.model, "-c", 2048, "-t", 1, "--max-queue", 2000, program=("-m", "edge_run")) as server:
        found = storm(server, given)
        memory = httpx.get(f"{server.url}/edge-run/status", timeout=60).json()["memory"]
    found["memory"] = {name: memory[f"{name}_bytes"] for name in ("budget", "peak")}
    print(json.dumps(found))
    rows = [{"what": name, "number": number} for name, number in found["counts"].items()]
    write_results("serve-storm", rows, f"{__doc__}\n{describe(found)}")


def describe(found: dict[str, Any]) -> str:
    """Return the outcome for a reader."""
    health_s, memory = found["health_s"], found["memory"]
    lost = sum(number for name, number in found["counts"].items() if "lost" in name)
    lines = [f"{found['seconds']:g} s; answers lost: {lost}.", "", "| requests | number |", "|---|---|"]
    lines += [f"| {name} | {number:,} |" for name, number in found["counts"].items()]
    lines += ["", f"`/health`, {health_s['n']:,} times: median {1000 * health_s['p50']:.0f} ms, p99 "]
    lines[-1] += f"{1000 * health_s['p99']:.0f} ms (reach {1000 * WORST_HEALTH_S:.0f}), longest "
    lines[-1] += f"{1000 * health_s['p100']:.0f} ms. Most memory: {memory['peak'] / 2**20:.0f} MiB of a budget of "
    lines[-1] += f"{memory['budget'] / 2**20:.0f}."
    return "\n".join(lines)


def storm(server: Served, given: argparse.Namespace) -> dict[str, Any]:
    """Return what came of a storm on a server."""
    context = multiprocessing.get_context("spawn")
    found: Queue[Any] = context.Queue()
    ends_s = time.time() + given.seconds
    numbers = (given.clients, given.slow, given.vanish, given.flood)
    shares = [tuple(n // PROCESSES + (k < n % PROCESSES) for n in numbers) for k in range(PROCESSES)]
    before = thread_times(server.process.pid)
    clients: list[tuple[Any, ...]] = [
        (found, (server.host, server.port, ends_s, k), share, False) for k, share in enumerate(shares)
    ]
    clients.append((found, (server.host, server.port, ends_s, 99), (0, 0, 0, 0), True))
    processes = [context.Process(target=client_process, args=one, daemon=True) for one in clients]
    for process in processes:
        process.start()
    try:
        results = [found.get(timeout=given.seconds + 2 * ANSWER_S) for _ in processes]
    except queue.Empty:
        raise SystemExit("a process of clients ended without a word, or hangs") from None
    for process in processes:
        process.join()
    after = thread_times(server.process.pid)
    counts = sum((one for one, _ in results), collections.Counter[str]())
    health_s = [value for _, values in results for value in values]
    return {
        "seconds": given.seconds,
        "load": os.getloadavg()[0],
        "health_s": {"n": len(health_s), **{f"p{round(100 * q)}": at(health_s, q) for q in (0.5, 0.9, 0.99, 1.0)}},
        "is_quick": at(health_s, 0.99) <= WORST_HEALTH_S,
        "counts": dict(sorted(counts.items())),
        "cpu_s": {name: round(took - before.get(name, 0.0), 2) for name, took in sorted(after.items())},
    }


if __name__ == "__main__":
    main()
