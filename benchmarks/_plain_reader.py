"""Reads a file past the page cache at a pace, and does nothing else: what reading alone takes of a machine.

    _plain_reader.py FILE OFFSET

Each line on standard input is bytes a second, 0 for none; it ends when there are no more lines.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time

READ_BYTES = 8 << 20


def main() -> None:
    """Read as told."""
    file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(file).st_size // READ_BYTES * READ_BYTES
    buffer = mmap.mmap(-1, 2 * READ_BYTES)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    offset, rate, due_s = int(sys.argv[2]) // READ_BYTES * READ_BYTES % size, 0.0, 0.0
    into = [memoryview(buffer)[:READ_BYTES]]
    while True:
        if not rate or select.select([0], [], [], 0)[0]:
            lines = os.read(0, 4096).split()
            if not lines:
                return
            rate, due_s = float(lines[-1]), time.monotonic()
            continue
        due_s = max(due_s, time.monotonic()) + READ_BYTES / rate
        offset = (offset + os.preadv(file, into, offset)) % size
        time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main()
