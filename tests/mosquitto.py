"""A real mosquitto, on a free port, with its own configuration; without one, tests are skipped."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
START_S = 60.0
PORTS = 15_000, 32_000  # below those that connections are given


def free_port(in_a_row: int = 1) -> int:
    """Return a port of loopback that nobody listens on now, and that the kernel gives no connection by itself.

    in_a_row: so many ports that begin with it are so.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(in_a_row):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            return port


class Mosquitto:
    """A broker that can be stopped and started again at the same address."""

    def __init__(self, folder: Path, settings: str = "allow_anonymous true", address: str = "127.0.0.1") -> None:
        self.port, self.address = free_port(), address
        self._configuration = folder / "mosquitto.conf"
        user = "user root\n" if os.geteuid() == 0 else ""  # or it could not read files in a folder of root's
        self._configuration.write_text(f"{user}listener {self.port} {address}\npersistence false\n{settings}\n")
        self.log = folder / "mosquitto.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://{self.address}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        assert PROGRAM is not None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([PROGRAM, "-c", str(self._configuration)], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1.0):
                return
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "mosquitto does not answer"
            time.sleep(0.02)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None


@contextlib.contextmanager
def mosquitto(folder: Path, settings: str = "allow_anonymous true", address: str = "127.0.0.1") -> Iterator[Mosquitto]:
    """Run a broker in this block."""
    if PROGRAM is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    broker = Mosquitto(folder, settings, address)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
