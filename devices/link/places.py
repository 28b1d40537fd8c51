"""Checks what members announce of their data links: keys, and addresses that may be tried from here.

An address of this machine, such as loopback, is tried only where a process of this machine says that a member's link
listens there. Such a process says so with a mark: a local socket whose name is made from the link's key and port. A
member on another machine cannot make a mark, so it cannot have others connect to ports of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import psutil

from edge_run.base.errors import ProtocolError
from edge_run.devices.host.locks import own_folders, user_folders

logger = logging.getLogger(__name__)

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

LEAST_PORT = 1024  # below are the services of systems, to which nobody is to be sent
KEY_BYTES = 32
MOST_KNOWN = 4096
_PLACE = re.compile(r"tcp://(?:\[([0-9a-f:.]{2,45})\]|([0-9.]{7,15})):([1-9][0-9]{3,4})")
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"  # of Z85
_VALUES = {letter: value for value, letter in enumerate(_LETTERS)}
_METADATA = {
    ipaddress.ip_address(text) for text in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254")
}
# The points of Curve25519 whose order is small, so that what is agreed with them is known to everybody, as numbers in
# little endian; the highest bit is not looked at (RFC 7748, 5; the list is libsodium's).
_FIELD = 2**255 - 19
_WEAK = {
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    _FIELD - 1,
    _FIELD,
    _FIELD + 1,
}


def check_key(text: str) -> None:
    """Raise ProtocolError where `text` is no key of CURVE in Z85, or a weak one."""
    number = 0
    if len(text) != KEY_BYTES * 5 // 4 or not set(text) <= _VALUES.keys():
        raise ProtocolError(f"key of a data link: must be {KEY_BYTES * 5 // 4} letters of Z85")
    for start in range(0, len(text), 5):
        word = 0
        for letter in text[start : start + 5]:
            word = word * 85 + _VALUES[letter]
        if word >> 32:
            raise ProtocolError("key of a data link: is no Z85, a group of five letters stands for too much")
        number |= int.from_bytes(word.to_bytes(4, "big"), "little") << 32 * (start // 5)
    if number & (1 << 255) - 1 in _WEAK:
        raise ProtocolError("key of a data link: is weak, everybody could read what is encrypted for it")


def parse_link_address(text: str) -> tuple[Address, int]:
    """Return address and port of `text`. Raises ProtocolError for what can be no device's data link."""
    form = _PLACE.fullmatch(text)
    try:
        if form is None:
            raise ValueError("must be tcp://ADDRESS:PORT, in numbers")
        address, port = ipaddress.ip_address(form[1] or form[2]), int(form[3])
    except ValueError as error:
        raise ProtocolError(f"address of a data link: {text[:60]!r} is none ({error})") from None
    if not LEAST_PORT <= port <= 65535:
        raise ProtocolError(f"address of a data link: port {port}, must be {LEAST_PORT} to 65535")
    mapped = getattr(address, "ipv4_mapped", None)
    if (
        mapped is not None
        or address.is_unspecified
        or address.is_multicast
        or address in _METADATA
        or (address.version == 4 and (address.is_reserved or address.packed[0] == 0))  # 240/4 has broadcast, too
    ):
        raise ProtocolError(f"address of a data link: {address} is no device's")
    return address, port


class Mark:
    """Tells processes of this machine that the link with `key` listens on `port`, until it or this process ends."""

    def __init__(self, key: str, port: int) -> None:
        """Where there can be no mark, other processes of this machine do not reach the link; a line says so."""
        self._socket: socket.socket | None = None
        self._name = _mark_name(key, port)
        if self._name is None:
            return
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self._name)
        except OSError as error:
            logger.warning("data link: other programs of this device do not find it (%s)", error)
            self.close()

    def close(self) -> None:
        """Remove it. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._name and self._name[0] != "\0":
                with contextlib.suppress(OSError):
                    Path(self._name).unlink()


def is_marked(key: str, port: int) -> bool:
    """Whether a process of this machine says that the link with `key` listens on `port`. Raises OSError."""
    name = _mark_name(key, port)
    if name is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        asking.connect(name)
        return True
    return False


class AddressFilter:
    """Finds the announced addresses that may be tried from here. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], bool] = {}

    def usable(self, key: str, places: Sequence[str]) -> tuple[str, ...]:
        """Return those of `places` that may lead to the member whose link has `key`; what was found out is kept."""
        return tuple(place for place in places if self._is_usable(key, place))

    def _is_usable(self, key: str, place: str) -> bool:
        found = self._known.get((key, place))
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            try:
                found = self._known[key, place] = may_try(key, place)
            except OSError:  # no files are left now
                return False
        return found


def may_try(key: str, place: str) -> bool:
    """Whether `place` may lead to the member whose link has `key`: on another machine, or marked on this one.

    Raises OSError where that cannot be found out now.
    """
    try:
        address, port = parse_link_address(place)
    except ProtocolError:
        return False
    return not is_own(address) or is_marked(key, port)


def is_own(address: Address) -> bool:
    """Whether `address` is one of this machine's."""
    own = (one.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for one in addresses)
    return address.is_loopback or str(address) in own


def _mark_name(key: str, port: int) -> str | None:
    """Return the name of a mark: on Linux one of the network namespace, which is what shares its loopback."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    digest = hashlib.sha256(f"edge-run link\0{key}\0{port}".encode()).hexdigest()[:32]
    if sys.platform == "linux":
        return f"\0edge-run-link-{digest}"
    return next((str(folder / f"link-{digest}") for folder in own_folders(user_folders())), None)
