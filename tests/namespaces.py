"""Devices as network namespaces behind a bridge, with links of a given speed (root, iproute2)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

NOWHERE = "02:00:00:00:00:01"  # a hardware address that nobody has
_SPACES, _CLONE_NEWNET = Path("/var/run/netns"), 0x40000000


def why_not() -> str:
    """Return why there can be none here, an empty string when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    return f"{missing[0]} is not installed" if missing else ""


def enter(space: str) -> None:
    """Move this process, which has one thread, to a namespace: `os.setns` is not in every Python."""
    with (_SPACES / space).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {space}")


def run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Network:
    """A bridge with an address of this process's own, and a namespace behind it for each device."""

    def __init__(self, names: Sequence[str]) -> None:
        number = os.getpid()
        self._tag, self._net = f"e{number % 100000}", f"10.{100 + number % 100}.{number // 100 % 250}"
        self.here = f"{self._net}.1"
        self.addresses = {name: f"{self._net}.{i}" for i, name in enumerate(names, 2)}

    def make(self) -> None:
        bridge = f"{self._tag}br"
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.here}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for name, address in self.addresses.items():
            space = self.space(name)
            run("ip", "netns", "add", space)
            run("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", space, "master", bridge, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def wrap(self, name: str) -> list[str]:
        """Return what a command is put behind to run on a device."""
        return ["ip", "netns", "exec", self.space(name)]

    def space(self, name: str) -> str:
        """Return the namespace of a device."""
        return f"{self._tag}{name}"

    def shape(self, name: str, rate: str) -> None:
        """Give a device's card a speed, each way (`5mbit`); tbf, since netem is not in every kernel."""
        space, limit = self.space(name), ("root", "tbf", "rate", rate, "burst", "3100", "latency", "2s")
        run("tc", "qdisc", "replace", "dev", space, *limit)
        run("tc", "-n", space, "qdisc", "replace", "dev", "eth0", *limit)

    def unplug(self, name: str) -> None:
        """Take a device off the network: nobody is told, and no connection is closed."""
        run("ip", "link", "set", self.space(name), "nomaster")

    def plug(self, name: str) -> None:
        """Put a device back on the network."""
        run("ip", "link", "set", self.space(name), "master", f"{self._tag}br", "up")

    def cut(self, source: str, target: str) -> None:
        """Let nothing get from one device to another any more; an empty name is this process's place."""
        run(*self._neighbour(source, "replace", target), "lladdr", NOWHERE, "nud", "permanent")

    def mend(self, source: str, target: str) -> None:
        """Take back a `cut`, if it was not yet."""
        subprocess.run(self._neighbour(source, "del", target), check=False, capture_output=True)

    def hasten(self, name: str) -> None:
        """Take back a `shape`, if it was not yet."""
        for card in (["dev", self.space(name)], ["-n", self.space(name), "dev", "eth0"]):
            words = ["tc", *card[:-2], "qdisc", "del", *card[-2:], "root"]
            subprocess.run(words, check=False, capture_output=True)

    def _neighbour(self, source: str, what: str, target: str) -> list[str]:
        where, card = (["-n", self.space(source)], "eth0") if source else ([], f"{self._tag}br")
        return ["ip", *where, "neigh", what, self.addresses.get(target, self.here), "dev", card]

    def remove(self) -> None:
        for name in self.addresses:
            subprocess.run(["ip", "link", "del", self.space(name)], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self.space(name)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}br"], check=False, capture_output=True)


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Make namespaces, and remove them."""
    one = Network(names)
    try:
        one.make()
        yield one
    finally:
        one.remove()
