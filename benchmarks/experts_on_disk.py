"""What another layout of experts on disk would gain: their pieces side by side, or compressed.

Bundling: a layer lacks some experts, of three pieces each. They are read as a model file has them, each piece in
another place, and as one run for each expert, in turns: both by 4 readers, direct, at places of the grown kit model
that are drawn at random, until the last one is there. Compression: pieces of 1 MiB of the weights of kit-moe (F16) and
of the bundled model (Q4_0), by zstd, as they are and with the bytes of each number apart (all first bytes, then all
second ones); packed size over size, and bytes unpacked a second by one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from _box import KIT, KIT_MOE, grown_model, need, write_results

from edge_run.base.units import KIB, MIB
from edge_run.tiers import _libc
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.readers import Readers
from edge_run.tiers.source import SourceFile

PIECES_BYTES = (64 * KIB, 256 * KIB, 896 * KIB, 2560 * KIB)
MISSING = (2, 6)
N_PIECES, N_READERS = 3, 4
SAMPLE_BYTES, MOST_SAMPLES, LEVELS = MIB, 40, (1, 3)
PAGE = 4096


def time_layer(source: SourceFile, readers: Readers, memory: int, reads: list[tuple[int, int]]) -> float:
    """Return the seconds until all of `reads`, (offset, length), are there."""
    left, done = [len(reads)], threading.Event()
    lock = threading.Lock()

    def job(target: int, offset: int, length: int) -> int:
        n_bytes = source.read_into(target, length, offset)
        with lock:
            left[0] -= 1
            if not left[0]:
                done.set()
        return n_bytes

    started, target = time.monotonic(), memory
    for offset, length in reads:
        readers.submit(lambda target=target, offset=offset, length=length: job(target, offset, length), is_urgent=True)
        target += length
    assert done.wait(60)
    return time.monotonic() - started


def bundling(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of a layer, both ways."""
    chance, rows = random.Random(0), []
    source, readers = SourceFile(path), Readers(N_READERS)
    size, most = path.stat().st_size, max(MISSING) * N_PIECES * max(PIECES_BYTES)
    memory = _libc.map_anonymous(most)
    _libc.advise_working_memory(memory, most)
    _libc.view(memory, most)[::PAGE] = b"\1" * (most // PAGE)

    def place(length: int) -> int:
        return chance.randrange((size - length) // PAGE) * PAGE

    for piece in PIECES_BYTES:
        for missing in MISSING:
            times: dict[str, list[float]] = {"scattered": [], "bundled": []}
            for _ in range(rounds):
                scattered = [(place(piece), piece) for _ in range(missing * N_PIECES)]
                bundled = [(place(piece * N_PIECES), piece * N_PIECES) for _ in range(missing)]
                times["scattered"].append(time_layer(source, readers, memory, scattered))
                times["bundled"].append(time_layer(source, readers, memory, bundled))
            medians = {way: statistics.median(found) for way, found in times.items()}
            row = {"what": "bundling", "piece_kib": piece // KIB, "experts": missing}
            row |= {f"{way}_ms": 1e3 * seconds for way, seconds in medians.items()}
            rows.append(row | {"gain": medians["scattered"] / medians["bundled"]})
            print(rows[-1], flush=True)
    readers.close()
    source.close()
    _libc.unmap(memory, most)
    return rows


def compression(path: Path) -> list[dict[str, Any]]:
    """Return how far the weights of a model can be packed."""
    gguf, rows = read_gguf(path), []
    samples: list[bytes] = []
    with path.open("rb") as file:
        for tensor in gguf.tensors:
            if len(tensor.shape) >= 2 and "token_embd" not in tensor.name and len(samples) < MOST_SAMPLES:
                file.seek(tensor.offset)
                samples.append(file.read(min(SAMPLE_BYTES, tensor.size_bytes)))
    kinds = {TENSOR_TYPES[tensor.type_id].name for tensor in gguf.tensors if len(tensor.shape) >= 2}
    element = 2 if "F16" in kinds else 18  # bytes of a number, or of a block of Q4_0
    for is_apart in (False, True):
        data = [_apart(sample, element) if is_apart else sample for sample in samples]
        for level in LEVELS:
            packed = [zstandard.ZstdCompressor(level=level).compress(one) for one in data]
            unpacker, started = zstandard.ZstdDecompressor(), time.perf_counter()
            for one in packed:
                unpacker.decompress(one)
            seconds = time.perf_counter() - started
            rows.append(
                {
                    "what": "compression",
                    "model": path.stem,
                    "types": "+".join(sorted(kinds)),
                    "bytes_apart": is_apart,
                    "level": level,
                    "packed_share": sum(map(len, packed)) / sum(map(len, data)),
                    "unpacked_gb_per_s": sum(map(len, data)) / seconds / 1e9,
                }
            )
            print(rows[-1], flush=True)
    return rows


def _apart(sample: bytes, element: int) -> bytes:
    whole = len(sample) // element * element
    return np.frombuffer(sample[:whole], np.uint8).reshape(-1, element).T.tobytes() + sample[whole:]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    need(KIT_MOE)
    rows = bundling(grown_model("4G", 32), arguments.rounds)
    packed = [*compression(KIT_MOE), *compression(KIT)]
    lines = ["| piece | experts | scattered | bundled | gain |", "|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row['scattered_ms']:.2f} ms | {row['bundled_ms']:.2f} ms | {row['gain']:.2f} x"
        lines.append(f"| {row['piece_kib']} KiB | {row['experts']} | {figures} |")
    lines += ["", "| model | bytes apart | level | packed size | unpacked by a core |", "|---|---|---|---|---|"]
    for row in packed:
        apart = "yes" if row["bytes_apart"] else "no"
        figures = f"{row['packed_share']:.3f} | {row['unpacked_gb_per_s']:.2f} GB/s"
        lines.append(f"| {row['model']} ({row['types']}) | {apart} | {row['level']} | {figures} |")
    write_results("experts-on-disk", [*rows, *packed], "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
