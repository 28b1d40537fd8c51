"""The identity of this device: a key in a file, a node id made from the key, and an id for each start of the node.

One process at a time is the device's own node. A second process on the same device gets a key of its own for as long
as it runs, and the device's key signs that key. Such a node is like any other, and goes when the device is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edge_run.base.errors import MeshError, NotTrusted, reason_of
from edge_run.base.files.whole import whole_file
from edge_run.base.protocols import Clock
from edge_run.base.strict_json import parse
from edge_run.devices.host.locks import NO_LOCKS, fcntl, own_folders, user_folders
from edge_run.devices.members.keys import KEY_BYTES, DeviceKey, is_signed

logger = logging.getLogger(__name__)

INCARNATION_DIGITS = 20  # of the start in milliseconds 12, of chance 8: a later incarnation has the greater id
LATEST_MS, MOST_INCARNATION_BYTES = 1 << 47, 40  # the year 6429; a later one would not fit the id
_KEY_FILE, _INCARNATION_FILE = "node.key", "node.incarnation"


@dataclass(frozen=True, slots=True)
class Identity:
    """A node, in one incarnation.

    node: its id, made from its key.
    incarnation: the id of this start of it; a later start has the greater one.
    is_lasting: the node is the device's own, which it is again when it starts anew.
    device: the key of the device that the node runs on.
    certificate: the device's signature of the node's key, where they are not the same.
    """

    node: str
    incarnation: str
    is_lasting: bool
    device: DeviceKey = field(repr=False)
    certificate: bytes = field(repr=False)
    _key: DeviceKey = field(repr=False)
    _lock: list[int] = field(default_factory=list, repr=False, compare=False)  # its descriptor, until it is released

    @property
    def public_key(self) -> bytes:
        """What the node's signatures are verified with."""
        return self._key.public_key

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return self._key.sign(data)

    def release(self) -> None:
        """Let another process of this device have the key. Idempotent."""
        with contextlib.suppress(IndexError, OSError):  # taken out first: closed twice, it could be another's by then
            os.close(self._lock.pop())


def is_certified(device_key: bytes, certificate: bytes, public_key: bytes) -> bool:
    """Whether the node with `public_key` runs on the device with `device_key`, by the signature of the device."""
    return device_key == public_key or is_signed(device_key, certificate, _certified(public_key))


def take_identity(folder: Path, wall_clock: Clock) -> Identity:
    """Return the device's own node, its key made where there is none; a passing one while another process is it.

    Raises NotTrusted where others may read the key, MeshError where it cannot be read or written.
    """
    with _key_file(folder) as descriptor:
        key = DeviceKey(_seed(descriptor, folder / _KEY_FILE))
        if (lock := _own_lock(descriptor, key.node)) is None:  # another process is the device's own node
            return make_identity(wall_clock, key)
        incarnation = _next_incarnation(folder / _INCARNATION_FILE, wall_clock)
        return Identity(key.node, incarnation, True, key, b"", key, [lock])


def device_key(folder: Path) -> DeviceKey:
    """Return the key of this device, also while another process is its node. Raises as `take_identity`."""
    with _key_file(folder) as descriptor:
        return DeviceKey(_seed(descriptor, folder / _KEY_FILE))


def make_identity(wall_clock: Clock, device: DeviceKey | None = None) -> Identity:
    """Return a node of `device`, or of a device of its own, that lives as long as this process."""
    key = DeviceKey(secrets.token_bytes(KEY_BYTES))
    certificate = device.sign(_certified(key.public_key)) if device else b""
    return Identity(key.node, _incarnation(int(wall_clock() * 1e3)), False, device or key, certificate, key)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all, after a power cut too. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole_file(path, 0o600, is_durable=True) as draft:
        draft.write_bytes(content)


def check_private(path: Path) -> None:
    """Raise NotTrusted where others than the owner may read the secrets at `path`."""
    if sys.platform != "win32" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise NotTrusted(f"{path}: others may read it; chmod 600 {path}")


def _certified(public_key: bytes) -> bytes:
    return b"edge-run passing node\0" + public_key


def _own_lock(descriptor: int, node: str) -> int | None:
    """Return a descriptor with the lock of the open key file; None where another process has it. Raises OSError.

    Where the file system of the key has no locks, it is that of a file in the user's folder of this machine; None where
    there is none either.
    """
    if fcntl is None:
        return os.dup(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.dup(descriptor)  # a copy has the lock, too
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    for folder in own_folders(user_folders())[:1]:
        with contextlib.suppress(OSError):
            other = os.open(folder / f"node-{node}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return other
            except OSError:
                os.close(other)
    return None


@contextlib.contextmanager
def _key_file(folder: Path) -> Iterator[int]:
    """Open the key file, made where there is none, for this block. Raises NotTrusted, and MeshError for an OSError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, flags = folder / _KEY_FILE, getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS or not path.exists():
                raise
            descriptor = os.open(path, os.O_RDONLY | flags)  # it is there already
        try:
            check_private(folder / _KEY_FILE)
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MeshError(f"{folder}: the key of this device cannot be kept ({reason_of(error)})") from error


def _seed(descriptor: int, path: Path) -> bytes:
    """Return the seed in an open key file, made where it is empty: by one process, which others wait for."""
    if not (seed := os.pread(descriptor, 2 * KEY_BYTES, 0)):
        with brief_lock(path.with_name(f"{path.name}.lock")):
            if not (seed := os.pread(descriptor, 2 * KEY_BYTES, 0)):
                seed = secrets.token_bytes(KEY_BYTES)
                os.pwrite(descriptor, seed, 0)
                os.fsync(descriptor)
    if len(seed) != KEY_BYTES:
        raise MeshError(f"{path}: is no key of {KEY_BYTES} bytes; remove it, and a new one is made")
    return seed


@contextlib.contextmanager
def brief_lock(path: Path, *, is_patient: bool = True) -> Iterator[None]:
    """Keep other processes out of this block. Raises BlockingIOError where one is within, unless it is patient."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX if is_patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def _next_incarnation(path: Path, wall_clock: Clock) -> str:
    """Return the id of an incarnation later than any before, also where the clock went backwards in between.

    Where it cannot be noted, as on a full or read-only drive, the next one is later by the clock only.
    """
    last_ms = 0
    with contextlib.suppress(OSError, ValueError):
        with path.open("rb") as file:
            found = parse(file.read(MOST_INCARNATION_BYTES))
        last_ms = found if type(found) is int and 0 <= found < LATEST_MS else 0
    start_ms = max(int(wall_clock() * 1e3), last_ms + 1)
    try:
        write_private(path, json.dumps(start_ms).encode())
    except OSError as error:
        logger.warning("%s: when this device last joined cannot be noted (%s)", path, reason_of(error))
    return _incarnation(start_ms)


def _incarnation(start_ms: int) -> str:
    return f"{start_ms:012x}{secrets.token_hex(4)}"
