"""What it costs to keep the books of reading: CPU seconds per GB of experts, when nothing is read and no frame moves.

Chunks of 64 KiB, experts of three parts of 3.4 MiB each, room for half of them: experts come and go as the passes of a
mixture let them. The rest of what reading costs is the kernel's, and that of a system which is at work on other things
is no measure; this is, in the best of some rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from pathlib import Path

from _box import write_results

from edge_run.base.units import GIB, KIB
from edge_run.tiers.address_space import AddressSpace, MappedSpan
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import Readers
from edge_run.tiers.weights import WeightsOnDemand

CHUNK_BYTES, MODEL_BYTES, BASE = 64 * KIB, 2 * GIB, 1 << 40
PART_CHUNKS, EXPERT_CHUNKS = 55, 168
PASSES, EXPERTS_A_PASS = 60, 4


class NoFile:
    """A shard of which every read is done at once."""

    path, size_bytes, is_doubtful = Path("none"), MODEL_BYTES, False

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Return what would have been read."""
        return length


class NoMemory(AddressSpace):
    """An address space in which no frame moves."""

    def map(self, chunk: int, source: int | None, count: int = 1) -> None:
        """Do nothing."""


class Books:
    """Weights that are nowhere, and the experts that are held of them."""

    def __init__(self, readers: Readers) -> None:
        address_space = NoMemory([MappedSpan(0, BASE, BASE + MODEL_BYTES, BASE)], CHUNK_BYTES)
        self.n_frames = address_space.n_chunks // 2
        states = OnDemand(address_space.n_chunks, self.n_frames, address_space.unmovable)
        self.weights = WeightsOnDemand(address_space, [NoFile()], readers, states, run_chunks=128)
        self.weights._sums._sums = array("I", [1]) * address_space.n_chunks  # nothing is new
        self.held: list[int] = []
        self._n_experts, self._random = address_space.n_chunks // EXPERT_CHUNKS, random.Random(1)

    def run(self) -> int:
        """Make passes; return the bytes that they would have read."""
        n_chunks = 0
        for _ in range(PASSES):
            missing = [i for i in self._random.sample(range(self._n_experts), EXPERTS_A_PASS) if i not in self.held]
            self.held += missing
            while len(self.held) * 3 * PART_CHUNKS > self.n_frames - EXPERTS_A_PASS * EXPERT_CHUNKS:
                self.weights.release(chunks_of(self.held.pop(0)))
            chunks = [chunk for expert in missing for chunk in chunks_of(expert)]
            self.weights.hold(chunks)
            self.weights.acquire(chunks)
            self.weights.release(chunks)
            n_chunks += len(chunks)
        return n_chunks * CHUNK_BYTES


def chunks_of(expert: int) -> list[int]:
    """Return the chunks of an expert."""
    starts = range(expert * EXPERT_CHUNKS, (expert + 1) * EXPERT_CHUNKS, EXPERT_CHUNKS // 3)
    return [chunk for start in starts for chunk in range(start, start + PART_CHUNKS)]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    readers, rows = Readers(2), []
    books = Books(readers)
    books.run()
    for number in range(arguments.rounds):
        started = time.process_time()
        n_bytes = books.run()
        rows.append({"round": number, "cpu_s_per_gb": (time.process_time() - started) / n_bytes * 1e9})
        print(rows[-1], flush=True)
    readers.close()
    best = min(float(row["cpu_s_per_gb"]) for row in rows)
    write_results("reader-books", rows, f"{__doc__}\n* {best:.4f} CPU s per GB.")


if __name__ == "__main__":
    main()
