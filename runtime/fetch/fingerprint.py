"""The fingerprint of a model: digests of all its pieces, by which two devices know that they run the same model.

Digests are kept with the file's size and time of change, so that each file is read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import not_opened, reason_of
from edge_run.base.files.identity import file_facts
from edge_run.base.files.whole import keep_file
from edge_run.base.interrupt import go_on
from edge_run.tiers import _libc
from edge_run.tiers.pieces import DIGEST_BYTES, PIECE_BYTES, model_hash, piece_digest


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The sizes of a model's shards, the digests of its pieces end to end, and the hash of both."""

    sizes: tuple[int, ...]
    digests: bytes

    @property
    def model(self) -> str:
        """The hash, in hexadecimal."""
        return model_hash(self.sizes, self.digests)


def fingerprint(paths: Sequence[Path], cache_folder: Path, check: Callable[[], None] = go_on) -> Fingerprint:
    """Return that of the shards at `paths` together. Raises ModelFileError where one cannot be read.

    check: runs after each piece that is read, and may raise.
    """
    found = [_digests(path, cache_folder, check) for path in paths]
    return Fingerprint(tuple(size for size, _ in found), b"".join(digests for _, digests in found))


def _digests(path: Path, cache_folder: Path, check: Callable[[], None]) -> tuple[int, bytes]:
    """Return a file's size, and the digests of its pieces."""
    try:
        facts = file_facts(path)
        key = json.dumps(facts).encode()
        kept = cache_folder / "hashes" / hashlib.blake2b(key, digest_size=16).hexdigest()
        with contextlib.suppress(OSError):
            content = kept.read_bytes()
            digests = content[:-DIGEST_BYTES]
            if content == digests + _seal(key, digests):
                return facts.size_bytes, digests
        digests = _read(path, check)
    except OSError as error:
        why = reason_of(error)
        raise not_opened(error, f"{path}: cannot be read ({why}); check its permissions, and the drive") from error
    keep_file(kept, digests + _seal(key, digests), "a model's digests")
    return facts.size_bytes, digests


def _seal(key: bytes, digests: bytes) -> bytes:
    """Return what shows that `digests` were kept whole, and of the file that `key` says."""
    return hashlib.blake2b(key + digests, digest_size=DIGEST_BYTES).digest()


def _read(path: Path, check: Callable[[], None]) -> bytes:
    """Return the digests of a file's pieces; what it leaves in the page cache is dropped."""
    digests = []
    with path.open("rb", buffering=0) as file:
        while piece := _read_piece(file.fileno()):
            digests.append(piece_digest(piece))
            check()
        _libc.forget_pages(file.fileno())
    return b"".join(digests)


def _read_piece(descriptor: int) -> bytes:
    """Return the next bytes of a file, a whole piece but at its end: one read may give less."""
    piece = os.read(descriptor, PIECE_BYTES)
    while len(piece) < PIECE_BYTES and (more := os.read(descriptor, PIECE_BYTES - len(piece))):
        piece += more
    return piece
