"""One measured run in a process of its own, for the benchmarks: opens a model, feeds a prompt, decodes tokens, prints
JSON.

Figures: seconds per decoded token, bytes read, wait and CPU of the readers, peak resident size, swap; with
--direct-read also the bandwidth of plain direct reads of the same file, in the same process and box, with the readers'
threads and sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.base.units import MIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine
from edge_run.tiers import _libc
from edge_run.tiers.source import SourceFile

BLOCK = 2 * MIB
SLOTS = 12


def direct_read_bandwidth(path: Path, n_threads: int, total_bytes: int) -> float:
    """Return bytes per second of `n_threads` reading blocks of 2 MiB, over the first `total_bytes` of the file.

    Each thread goes round SLOTS blocks of memory, together as much as a window: a single block each would stay in the
    processor's cache and look a quarter faster than any reading that is of use.
    """
    source = SourceFile(path)
    total_bytes = min(total_bytes, source.size_bytes // BLOCK * BLOCK)
    length = (n_threads * SLOTS + 1) * BLOCK
    memory = _libc.map_anonymous(length)
    first = -(-memory // BLOCK) * BLOCK
    _libc.advise_working_memory(first, length - BLOCK)
    for slot in range(n_threads * SLOTS):
        _libc.view(first + slot * BLOCK, 1)[0] = 1

    def read(index: int) -> None:
        for number, offset in enumerate(range(index * BLOCK, total_bytes, n_threads * BLOCK)):
            source.read_into(first + (index * SLOTS + number % SLOTS) * BLOCK, BLOCK, offset)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(n_threads)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - started
    _libc.unmap(memory, length)
    source.close()
    return total_bytes / elapsed


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="edge-run")
    parser.add_argument("--memory", default="1024GiB")
    parser.add_argument("--gpu-memory", default="0")
    parser.add_argument("--also", type=Path)
    parser.add_argument("--page-cache", default="auto")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--warm", type=int, default=1, help="decoded tokens before the measured ones")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--repack", default="auto")
    parser.add_argument("--packed", help="a packed file, or off; the one beside the model, where there is one")
    parser.add_argument("--again", action="store_true", help="feed the prompt a second time, and time that too")
    parser.add_argument("--direct-read", type=int, default=0, metavar="MiB")
    arguments = parser.parse_args()
    config = ModelConfig(
        memory=None if arguments.backend == "llama.cpp" else arguments.memory,
        gpu_memory=arguments.gpu_memory,
        context_tokens=arguments.context,
        micro_batch_tokens=arguments.micro_batch,
        threads=arguments.threads,
        backend=arguments.backend,
        kv_type=arguments.kv_type,
        also=arguments.also,
        page_cache=arguments.page_cache,
        repack=arguments.repack,
        packed=arguments.packed,
    )
    engine = Engine.open(arguments.model, config)

    def feed() -> tuple[float, int]:
        """Return the seconds that the prompt takes, and the bytes read."""
        engine.decoder.rewind(0, 0)
        started, before = time.monotonic(), engine.read_totals
        last = arguments.prompt - 1
        engine.decoder.decode([BatchToken(5 + i % 97, i, 0, i == last) for i in range(arguments.prompt)])
        return time.monotonic() - started, engine.read_totals.since(before).bytes_read

    prompt_s, prompt_bytes = feed()
    cached_bytes = engine.read_totals.cached_bytes
    prompt_again_s, _ = feed() if arguments.again else (0.0, 0)
    times, position, token = [], arguments.prompt, 7
    for i in range(arguments.warm + arguments.decode):
        if i == arguments.warm:
            before, wait_s = engine.read_totals, engine.wait_s
        started = time.monotonic()
        token = int(engine.decoder.decode([BatchToken(token, position, 0, True)])[0].argmax())
        times.append(time.monotonic() - started)
        position += 1
    reads = engine.read_totals.since(before)
    memory, plan = process_memory(), engine.plan
    result = {
        "backend": engine.backend.name,
        "mode": plan.mode,
        "repacked": plan.repacked,
        "read_repacked": plan.read_repacked,
        "load_s": engine.load_s,
        "prompt_s": prompt_s,
        "prompt_bytes": prompt_bytes,
        "cached_share": cached_bytes / prompt_bytes if prompt_bytes else 0.0,
        "prompt_again_s": prompt_again_s,
        "token_s": statistics.median(times[arguments.warm :]),
        "mean_token_s": statistics.fmean(times[arguments.warm :]),
        "bytes_per_token": reads.bytes_read / arguments.decode,
        "reader_cpu_s_per_gb": reads.cpu_s / (reads.bytes_read / 1e9) if reads.bytes_read else 0.0,
        "read_busy_share": reads.busy_s / sum(times[arguments.warm :]),
        "wait_s_per_token": (engine.wait_s - wait_s) / arguments.decode,
        "model_bytes": plan.model_bytes,
        "pinned_bytes": plan.pinned_bytes,
        "window_bytes": plan.window_bytes,
        "budget_bytes": plan.budget_bytes,
        "other_bytes": sum(i.size_bytes for i in plan.items if i.what not in ("pinned", "window")),
        "peak_bytes": memory.peak_bytes,
        "swapped_bytes": memory.swapped_bytes,
        "copy_share": reads.copy_bytes / reads.bytes_read if reads.bytes_read else 0.0,
        "last_token": token,
    }
    engine.close()
    if arguments.direct_read:
        result["direct_bytes_per_s"] = direct_read_bandwidth(
            arguments.model, config.readers, arguments.direct_read * MIB
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
