"""Who this device is: an Ed25519 key in a file of its own, a node id made from it, and an id for each life of it.

One process at a time has the device's own key. Another one of the same device gets a key of its own for as long as it
lives: it is a node like any other, since what makes a node trusted is the proof that it knows the cluster's secret.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.base.errors import MeshError, NotTrusted
from edge_run.base.extras import need

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

if sys.platform != "win32":
    import fcntl

KEY_BYTES, SIGNATURE_BYTES, NODE_LETTERS = 32, 64, 16
BOOT_DIGITS = 20  # of the start in milliseconds 12, of chance 8: a later life has the greater id
_KEY_FILE, _BOOT_FILE = "node.key", "node.boot"
_ED25519 = "cryptography.hazmat.primitives.asymmetric.ed25519"


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key and this life of it. is_lasting: the device's own, which it has again when it starts anew."""

    node: str
    boot: str
    public_key: bytes
    is_lasting: bool
    _private: Ed25519PrivateKey = field(repr=False)
    _lock: int = field(default=-1, repr=False)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return self._private.sign(data)

    def release(self) -> None:
        """Let another process of this device have the key. Idempotent."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)


def node_of(public_key: bytes) -> str:
    """Return the id of the node that has `public_key`."""
    digest = hashlib.sha256(b"edge-run node\0" + public_key).digest()
    return base64.b32encode(digest).decode().lower()[:NODE_LETTERS]


def is_signed(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` is that of `data` by the holder of `public_key`."""
    exceptions = need("cryptography.exceptions", "mesh")
    try:
        need(_ED25519, "mesh").Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (exceptions.InvalidSignature, ValueError):
        return False
    return True


def take_identity(folder: Path, wall_clock: Callable[[], float]) -> Identity:
    """Return the device's own identity, made where there is none; a passing one while another process has it.

    Raises NotTrusted where others may read the key, MeshError where it cannot be read or written.
    """
    try:
        lock = _lock(folder / _KEY_FILE)
        if lock is None:
            return make_identity(wall_clock)
        private = os.pread(lock, 2 * KEY_BYTES, 0)
        if not private:
            private = secrets.token_bytes(KEY_BYTES)
            os.pwrite(lock, private, 0)
            os.fsync(lock)
        if len(private) != KEY_BYTES:
            raise MeshError(f"{folder / _KEY_FILE}: is no key of {KEY_BYTES} bytes; remove it, and a new one is made")
        return _identity(private, _next_boot(folder / _BOOT_FILE, wall_clock), lock)
    except OSError as error:
        raise MeshError(f"{folder}: the key of this device cannot be kept ({error.strerror})") from error


def make_identity(wall_clock: Callable[[], float]) -> Identity:
    """Return an identity that lives as long as this process."""
    return _identity(secrets.token_bytes(KEY_BYTES), _boot(int(wall_clock() * 1e3)))


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def check_private(path: Path) -> None:
    """Raise NotTrusted where others than the owner may read the secrets at `path`."""
    if sys.platform != "win32" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise NotTrusted(f"{path}: others may read it; chmod 600 {path}")


def _identity(private: bytes, boot: str, lock: int = -1) -> Identity:
    key = need(_ED25519, "mesh").Ed25519PrivateKey.from_private_bytes(private)
    public = key.public_key().public_bytes_raw()
    return Identity(node_of(public), boot, public, lock >= 0, key, lock)


def _lock(path: Path) -> int | None:
    """Return the descriptor of the key file, locked; None while another process has it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        check_private(path)
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _next_boot(path: Path, wall_clock: Callable[[], float]) -> str:
    """Return the id of a life later than any before, also where the clock went backwards in between."""
    last_ms = 0
    with contextlib.suppress(OSError, ValueError):
        last_ms = int(json.loads(path.read_text()))
    start_ms = max(int(wall_clock() * 1e3), last_ms + 1)
    write_private(path, json.dumps(start_ms).encode())
    return _boot(start_ms)


def _boot(start_ms: int) -> str:
    return f"{start_ms:012x}{secrets.token_hex(4)}"
