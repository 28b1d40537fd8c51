"""Which model a file holds, by a hash of all its bytes, so that two devices know that they run the same.

A hash is kept beside the file's size and time of change, so that a file is read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from edge_run.base.errors import ModelFileError

_BLOCK_BYTES = 4 << 20


def fingerprint(paths: Sequence[Path], cache_folder: Path) -> str:
    """Return the hash of the shards at `paths` together. Raises ModelFileError where one cannot be read."""
    return hashlib.blake2b("\n".join(_hash(path, cache_folder) for path in paths).encode(), digest_size=32).hexdigest()


def _hash(path: Path, cache_folder: Path) -> str:
    try:
        found = path.stat()
        key = json.dumps([str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ino])
        kept = cache_folder / "hashes" / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            known, _, digest = kept.read_text().partition("\n")
            if known == key and len(digest) == 64:
                return digest
        digest = _read(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error})") from error
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_text(f"{key}\n{digest}")
        fresh.replace(kept)
    return digest


def _read(path: Path) -> str:
    """Return the hash of a file's bytes; what it leaves in the page cache is dropped."""
    state = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            state.update(block)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return state.hexdigest()
